"""Collects other systems' kernels from their wheels into `.peers/` (`make peers`), about 35 MiB that a machine without a network can get.

What cannot be had is named with the reason, and the rest goes on. A file that is there is not collected again.
"""

from __future__ import annotations

import lzma
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from evidence.fingerprint import ROOT

FOLDER = ROOT / ".peers"
# A release, and the extension module in its wheel, kept as FOLDER/NAME.so.xz; None: the wheel is kept.
RELEASES = {
    "fa3-fwd==0.0.3": ("fa3_fwd", "fa3_fwd/_C.abi3.so"),
    "vllm==0.22.0": ("vllm_fa3", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"),
    "nvidia-cudnn-frontend==1.18.0": None,
    "torchao==0.18.0": None,
}
# The GPU machine's: PyTorch 2.11 on Python 3.12.
PYTHON = ("--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none")
PLATFORMS = (
    *(f"--platform=manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 24, 17)),
    "--platform=manylinux2014_x86_64",
    "--platform=any",
)


def collect(release: str) -> Path:
    """The path of a release's library or wheel.

    Raises:
        LookupError: it is not there and cannot be downloaded, with the reason.
    """
    name, version = release.split("==")
    library = RELEASES[release]
    pattern = f"{library[0]}.so.xz" if library else f"{name.replace('-', '_')}-{version}-*.whl"
    if found := list(FOLDER.glob(pattern)):
        return found[0]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *PYTHON, *PLATFORMS, "-d", folder]
        ended = subprocess.run([*command, release], capture_output=True, text=True)
        if ended.returncode:
            errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
            raise LookupError(errors[-1] if errors else ended.stderr.strip())
        [wheel] = Path(folder).glob("*.whl")
        if library is None:
            return Path(shutil.copy(wheel, FOLDER))
        with zipfile.ZipFile(wheel) as held:
            if library[1] not in held.namelist():
                raise LookupError(f"{wheel.name} holds no {library[1]}")
            unfinished = FOLDER / f"{library[0]}.unfinished"
            unfinished.write_bytes(lzma.compress(held.read(library[1]), preset=0))
        return unfinished.rename(FOLDER / pattern)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    missing = 0
    for release in RELEASES:
        try:
            print(f"{release}: {collect(release).relative_to(ROOT)}", flush=True)
        except LookupError as problem:
            missing += 1
            print(f"{release}: {problem}", flush=True)
    sys.exit(f"{missing} peers are missing: benchmarks leave them out" if missing else None)


if __name__ == "__main__":
    main()
