"""Collects other systems' kernels from their wheels into `.peers/` (`make peers`), about 35 MiB that a machine without a network can get.

What cannot be had is named with the reason, and the rest goes on. A file that is there is not collected again.
"""

from __future__ import annotations

import lzma
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


def kept(release: str) -> Path | None:
    """Where the peer of a release is, if it is there."""
    module = RELEASES[release]
    name, version = release.split("==")
    pattern = f"{module[0]}.so.xz" if module else f"{name.replace('-', '_')}-{version}-*.whl"
    return next(iter(FOLDER.glob(pattern)), None)


def collect(release: str) -> str | None:
    """Download a release without what it depends on, and keep what is needed of it; the reason if that fails."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *PYTHON, *PLATFORMS, "-d", folder]
        ended = subprocess.run([*command, release], capture_output=True, text=True)
        if ended.returncode:
            return next((line for line in reversed(ended.stderr.splitlines()) if line.startswith("ERROR")), ended.stderr.strip())
        [wheel] = Path(folder).glob("*.whl")
        if RELEASES[release] is None:
            (FOLDER / wheel.name).write_bytes(wheel.read_bytes())
            return None
        name, module = RELEASES[release]
        try:
            with zipfile.ZipFile(wheel) as unpacked:
                library = unpacked.read(module)
        except KeyError:
            return f"{wheel.name} holds no {module}"
        unfinished = FOLDER / f"{name}.unfinished"
        unfinished.write_bytes(lzma.compress(library, preset=0))
        unfinished.rename(FOLDER / f"{name}.so.xz")
        return None


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    missing = 0
    for release in RELEASES:
        problem = None if kept(release) else collect(release)
        missing += problem is not None
        print(f"{release}: {problem or kept(release).relative_to(ROOT)}", flush=True)
    sys.exit(f"{missing} peers are missing: benchmarks leave them out" if missing else None)


if __name__ == "__main__":
    main()
