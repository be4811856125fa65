"""Collects other systems' kernels into `.peers/` (`make peers`): from their wheels, and compiled from their sources. About 80 MiB that a
machine without a network can get; cuDNN's two libraries are 50 of them.

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
from functools import lru_cache
from pathlib import Path

from evidence.results import ROOT

from . import build_peers
from .build_peers import HEADERS, run
from .peers import PEERS
from .peers.peer import FOLDER, Source, Wheel

PACKING = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 128 << 20}]
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
    unfinished.write_bytes(lzma.compress(contents, filters=PACKING))
    return unfinished.rename(FOLDER / f"{name}.so.xz")


def collect(wanted: Wheel) -> list[Path]:
    """The paths of a release's libraries, or of its wheel.

    Raises:
        LookupError: they are not there and cannot be downloaded, with the reason.
    """
    name, version = wanted.release.split("==")
    libraries = wanted.libraries
    kept = [FOLDER / f"{library}.so.xz" for library in libraries]
    found = kept or list(FOLDER.glob(f"{name.replace('-', '_')}-{version}-*.whl"))
    if found and all(path.exists() for path in found):
        return found
    with tempfile.TemporaryDirectory() as folder:
        wheel = download(wanted.release, Path(folder))
        if not libraries:
            return [Path(shutil.copy(wheel, FOLDER))]
        with zipfile.ZipFile(wheel) as held:
            for path in libraries.values():
                if path not in held.namelist():
                    raise LookupError(f"{wheel.name} holds no {path}")
            return [keep(library, held.read(path)) for library, path in libraries.items()]


def compile(library: Source, work: Path) -> list[Path]:
    """The path of a library that is compiled, alone in a list. Sources and headers go into `work`, for the other libraries, too.

    Raises:
        LookupError: its source cannot be had, or does not compile; with the reason.
    """
    extra = library.keep[1] if library.keep else None
    if (found := FOLDER / f"{library.name}.so.xz").exists() and (extra is None or (FOLDER / extra).exists()):
        return [found]
    headers = [unpacked(release, work, inside) / inside for release, inside in HEADERS.items()]
    source = checkout(library.source, work) if "://" in library.source else unpacked(library.source, work, "flashinfer/")
    folder = work / library.name
    folder.mkdir()
    made = build_peers.build(library, source, headers, folder)
    if library.keep:
        shutil.copy(source / library.keep[0], FOLDER / library.keep[1])
    return [keep(library.name, made.read_bytes())]


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
    wanted = {str(each): each for peer in PEERS.values() for each in peer.needs}
    with tempfile.TemporaryDirectory() as work:
        for name, each in wanted.items():
            try:
                found = collect(each) if isinstance(each, Wheel) else compile(each, Path(work))
                print(f"{name}:", *(path.relative_to(ROOT) for path in found), flush=True)
            except LookupError as problem:
                missing += 1
                print(f"{name}: {problem}", flush=True)
    sys.exit(f"{missing} files of peers are missing: benchmarks leave them out" if missing else None)


if __name__ == "__main__":
    main()
