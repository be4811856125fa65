"""Collects other systems' kernels into `.peers/` (`make peers`): from their wheels, and compiled from their sources. About 32 MiB that a
machine without a network can get.

What cannot be had is named with the reason, and the rest goes on. A file that is there is not collected again. Compiling needs nvcc of CUDA
13, and repositories: `FP8ATTN_SOURCES` is a folder with checkouts of them where GitHub cannot be reached.
"""

from __future__ import annotations

import lzma
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

from evidence.fingerprint import ROOT

from . import build_peers
from .build_peers import HEADERS, LIBRARIES, TVM_FFI, run

FOLDER = ROOT / ".peers"
# A release, and the extension module in its wheel, kept as FOLDER/NAME.so.xz; None: the wheel is kept.
RELEASES = {
    "fa3-fwd==0.0.3": ("fa3_fwd", "fa3_fwd/_C.abi3.so"),
    "vllm==0.22.0": ("vllm_fa3", "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so"),
    "nvidia-cudnn-frontend==1.18.0": None,
    "torchao==0.18.0": None,
    TVM_FFI: None,  # calls FlashInfer's modules
}
# What is measured otherwise, or not at all.
OTHERS = {
    "cuDNN": "torch's own is measured, 9.19.0 with torch 2.11; newer wheels are 500 MB, of which attention needs more than 100 MB",
    "transformers' FP8 cache": "no kernel: each step dequantizes all of it, and attends in 16 bits; real_model measures what it loses",
}  # fmt: skip
# The GPU machine's: PyTorch 2.11 on Python 3.12.
PYTHON = ("--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none")
PLATFORMS = (
    *(f"--platform=manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 24, 17)),
    "--platform=manylinux2014_x86_64",
    "--platform=any",
)


def download(release: str, folder: Path) -> Path:
    """A release's wheel.

    Raises:
        LookupError: it cannot be downloaded, with the reason.
    """
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", *PYTHON, *PLATFORMS, "-d", str(folder)]
    ended = subprocess.run([*command, release], capture_output=True, text=True)
    if ended.returncode:
        errors = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        raise LookupError(errors[-1] if errors else ended.stderr.strip())
    [wheel] = folder.glob(f"{release.split('==')[0].replace('-', '_')}-*.whl")
    return wheel


def keep(name: str, contents: bytes) -> Path:
    """The path of a library, packed."""
    unfinished = FOLDER / f"{name}.unfinished"
    unfinished.write_bytes(lzma.compress(contents, preset=3))
    return unfinished.rename(FOLDER / f"{name}.so.xz")


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
        wheel = download(release, Path(folder))
        if library is None:
            return Path(shutil.copy(wheel, FOLDER))
        with zipfile.ZipFile(wheel) as held:
            if library[1] not in held.namelist():
                raise LookupError(f"{wheel.name} holds no {library[1]}")
            return keep(library[0], held.read(library[1]))


def compile(name: str, work: Path) -> Path:
    """The path of a library that is compiled. Sources and headers go into `work`, for the other libraries, too.

    Raises:
        LookupError: its source cannot be had, or does not compile; with the reason.
    """
    library = LIBRARIES[name]
    extra = library.keep[1] if library.keep else None
    if (found := FOLDER / f"{name}.so.xz").exists() and (extra is None or (FOLDER / extra).exists()):
        return found
    headers = [unpacked(release, work, inside) / inside for release, inside in HEADERS.items()]
    source = checkout(library.source, work) if "://" in library.source else unpacked(library.source, work, "flashinfer/")
    folder = work / name
    folder.mkdir()
    made = build_peers.build(library, source, headers, folder)
    if library.keep:
        shutil.copy(source / library.keep[0], FOLDER / library.keep[1])
    return keep(name, made.read_bytes())


@lru_cache
def unpacked(release: str, work: Path, inside: str) -> Path:
    """A folder with the files of a wheel whose names begin with `inside`."""
    folder = work / release
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(download(release, folder)) as held:
        held.extractall(folder, [name for name in held.namelist() if name.startswith(inside)])
    return folder


@lru_cache
def checkout(source: str, work: Path) -> Path:
    """A folder with a commit of a repository, `URL@COMMIT`."""
    url, commit = source.split("@")
    name = url.rsplit("/", 1)[1]
    if "FP8ATTN_SOURCES" in os.environ:
        folder = Path(os.environ["FP8ATTN_SOURCES"]) / name
        if not folder.exists():
            raise LookupError(f"FP8ATTN_SOURCES holds no {name}")
        return folder
    run("git", "clone", "-q", url, work / name)
    run("git", "-C", work / name, "checkout", "-q", commit)
    return work / name


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    missing = 0
    with tempfile.TemporaryDirectory() as work:
        ways: dict[str, Callable[[], Path]] = {release: partial(collect, release) for release in RELEASES}
        for name, library in LIBRARIES.items():
            ways[f"{name} of {library.source}"] = partial(compile, name, Path(work))
        for name, way in ways.items():
            try:
                print(f"{name}: {way().relative_to(ROOT)}", flush=True)
            except LookupError as problem:
                missing += 1
                print(f"{name}: {problem}", flush=True)
    for name, reason in OTHERS.items():
        print(f"{name}: {reason}", flush=True)
    sys.exit(f"{missing} peers are missing: benchmarks leave them out" if missing else None)


if __name__ == "__main__":
    main()
