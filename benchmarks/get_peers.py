"""Collects other systems' kernels into `.peers/` (`make peers`): from their wheels, and compiled from their sources.
About 80 MiB that a machine without a network can get; cuDNN's two libraries are 50 of them.

What cannot be had is named with the reason, and the rest goes on. A file that is there is not collected again.
Compiling needs nvcc of CUDA 13, no GPU, and repositories: `FP8ATTN_SOURCES` is a folder with checkouts of them where
GitHub cannot be reached. Headers come from wheels, so torch need not be installed. A library names what it needs
(torch's libraries, libcuda), and finds it where it is loaded. Only the
kernels that the benchmarks call are compiled: the other functions that a library's entry points name are null.
"""

from __future__ import annotations

import lzma
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

from evidence.results import ROOT

from .peers import PEERS
from .peers.peer import FOLDER, TVM_FFI, Source, Wheel

PACKING = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 128 << 20}]
# The GPU machine's: PyTorch 2.11 on Python 3.12.
PYTHON = ("--python-version=3.12", "--implementation=cp", "--abi=cp312", "--abi=abi3", "--abi=none")
PLATFORMS = (
    *(f"--platform=manylinux_2_{n}_x86_64" for n in (35, 34, 31, 28, 27, 24, 17)),
    "--platform=manylinux2014_x86_64",
    "--platform=any",
)
TORCH = "torch==2.11.0"
HEADERS = {
    TORCH: "torch/include/",
    "nvidia-cublas==13.0.2.14": "nvidia/cu13/include/",
    TVM_FFI: "tvm_ffi/include/",
}  # and where in a wheel
SM = 90
ARCHITECTURE = f"-gencode=arch=compute_{SM}a,code=sm_{SM}a"
FATBIN = struct.Struct("<IHHQ")  # the header of a library's code for GPUs: magic, version, its bytes, bytes behind it
FATBIN_BEGINS = struct.pack("<IHH", 0xBA55ED50, 1, FATBIN.size)
CODE = struct.Struct("<HHIQ12xI")  # the header of one of its parts: type, version, its bytes, bytes behind it, SM
# Headers of torch that ask for all of CUDA's libraries or Python's headers, of which the sources need little.
STAND_INS = {
    "ATen/cuda/CUDAContext.h": "#include <c10/cuda/CUDAStream.h>\nnamespace at::cuda { using "
    "c10::cuda::getCurrentCUDAStream; }\n",
    "torch/extension.h": "#include <torch/types.h>\n",
}


def download(release: str, folder: Path) -> Path:
    """A release's wheel.

    Raises:
        LookupError: it cannot be downloaded, with the reason.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--only-binary=:all:",
        *PYTHON,
        *PLATFORMS,
        "-d",
        str(folder),
    ]
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


def pruned(library: bytes) -> bytes:
    """A library in which code for other GPUs is zero, so that it packs to nothing. What has no code for this one keeps
    all: the driver may compile it.
    """
    found, at = bytearray(library), 0
    while (at := found.find(FATBIN_BEGINS, at)) >= 0:
        _, _, header, size = FATBIN.unpack_from(found, at)
        at, end, parts = at + header, at + header + size, []
        while at < end:
            _, _, header, size, sm = CODE.unpack_from(found, at)
            parts.append((sm, at + header, size))
            at += header + size
        for sm, begin, size in parts if SM in (sm for sm, _, _ in parts) else ():
            if sm != SM:
                found[begin : begin + size] = bytes(size)
    return bytes(found)


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
            return [keep(library, pruned(held.read(path))) for library, path in libraries.items()]


def compile(library: Source, work: Path) -> list[Path]:
    """The path of a library that is compiled, alone in a list. Sources and headers go into `work`, for the other
    libraries, too.

    Raises:
        LookupError: its source cannot be had, or does not compile; with the reason.
    """
    extra = library.keep[1] if library.keep else None
    if (found := FOLDER / f"{library.name}.so.xz").exists() and (extra is None or (FOLDER / extra).exists()):
        return [found]
    headers = [unpacked(release, work, inside) / inside for release, inside in HEADERS.items()]
    source = (
        checkout(library.source, work) if "://" in library.source else unpacked(library.source, work, library.package)
    )
    folder = work / library.name
    folder.mkdir()
    made = build(library, source, headers, folder)
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


def build(library: Source, source: Path, headers: Iterable[Path], folder: Path) -> Path:
    """The path of a library.

    Args:
        source: the folder of its source.
        headers: the folders of `HEADERS`.
        folder: for what is made.
    Raises:
        LookupError: it does not compile, with the first error.
    """
    made = library.prepare(source, folder)
    for name, text in STAND_INS.items():
        path = folder / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#pragma once\n{text}")
    includes = [folder / "include", folder, *(source / name for name in library.includes)]
    for path in headers:
        includes += [path, path / "torch/csrc/api/include"] if (path / "torch").exists() else [path]
    flags = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", ARCHITECTURE, *library.flags]
    flags += [f"-I{path}" for path in includes]

    def compiled(file: Path) -> Path:
        if file.suffix in (".o", ".a"):
            return file
        run("nvcc", *flags, "-x", "cu", "-c", file, "-o", target := folder / f"{file.name}.o")
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [*made, *(source / name for name in library.files)]))
    return linked(library, objects, folder)


def linked(library: Source, objects: list[Path], folder: Path) -> Path:
    """A shared library that needs those of `library.needs`, which are not here:
    empty ones with their names are linked.
    """
    for name in library.needs:
        soname = f"lib{name}.so" + ".1" * (name == "cuda")
        run("gcc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}", "-o", folder / f"lib{name}.so")
    names = {kind: set(run("nm", f"--{kind}-only", "-P", *objects).split()) for kind in ("undefined", "defined")}
    absent = sorted(name for name in names["undefined"] - names["defined"] if name.startswith(library.missing))
    run(
        "nvcc", "-shared", "-o", target := folder / "made.so", *objects, f"-L{folder}", "-Xlinker",
        "--no-as-needed,--strip-all",
        *(f"-l{name}" for name in library.needs), *(x for name in absent for x in ("-Xlinker", f"--defsym={name}=0")),
    )  # fmt: skip
    return target


def run(*command: str | Path) -> str:
    """The output of a command.

    Raises:
        LookupError: it is not installed, or failed; with the first error.
    """
    try:
        ended = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as problem:
        raise LookupError(f"{command[0]} is not installed") from problem
    if ended.returncode:
        lines = (ended.stderr + ended.stdout).strip().splitlines()
        raise LookupError(
            f"{command[0]}: {next((line for line in lines if 'error' in line), lines[-1] if lines else 'failed')}"
        )
    return ended.stdout


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
