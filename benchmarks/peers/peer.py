"""What a peer is: another system's attention, the libraries that it needs, and how tables and pictures show it."""

from __future__ import annotations

import contextlib
import importlib
import lzma
import os
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from evidence.results import ROOT

from ..problem import Run

TVM_FFI = "apache-tvm-ffi==0.1.15.post2"
TORCH_LIBRARIES = ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")
FOLDER = ROOT / ".peers"  # what `make peers` collects
UNPACKED = Path("/tmp/fp8attn-peers")


@dataclass(frozen=True)
class Wheel:
    """A release on the package index, for Python 3.12 and PyTorch 2.11.

    Attributes:
        release: `name==version`.
        libraries: by name, the path in the wheel of each library that is kept as `.peers/NAME.so.xz`; none: the wheel
            is kept.
    """

    release: str
    libraries: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.release


@dataclass(frozen=True)
class Source:
    """A library that is compiled with nvcc, and kept as `.peers/NAME.so.xz`.

    Attributes:
        name: of the library.
        source: a repository and a commit, `URL@COMMIT`, or a release on the package index.
        files: what is compiled, relative to the source; those of `prepare` are compiled first.
        includes: folders of headers in the source.
        flags: of nvcc.
        needs: libraries, by soname without `lib` and `.so`.
        missing: the beginning of the mangled names of functions that are not compiled.
        prepare: makes more files, `prepare(source, folder)`, which may be compiled already.
        package: the folder of a release that is unpacked.
        keep: a file of the source, and its name in `.peers`.
    """

    name: str
    source: str
    files: tuple[str, ...]
    includes: tuple[str, ...]
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    missing: str = "none"
    prepare: Callable[[Path, Path], list[Path]] = lambda source, folder: []
    package: str = ""
    keep: tuple[str, str] | None = None

    def __str__(self) -> str:
        return f"{self.name} of {self.source}"


@dataclass(frozen=True)
class Call:
    """One way to call a peer: an implementation in rows of results.

    Attributes:
        run: `run(shape, q, k, v)`, of tensors in 16 bits, gives the peer's run, which rounds them as it needs them.
        title: in tables.
        color: in pictures.
        prefill, decode: whether it is measured in prompts and in decode steps.
        levels: of its sums of FP8 products: 1, all in the tensor core; 2, also in FP32; 0: it computes in 16 bits.
    """

    run: Callable[..., Run]
    title: str
    color: str
    prefill: bool = False
    decode: bool = False
    levels: int = 0


@dataclass(frozen=True)
class Peer:
    """A system: one file in this folder, which has it as `PEER`.

    Attributes:
        calls: by the name of the implementation.
        needs: what `make peers` collects for it.
        load: loads that into this process; raises if it is not there.
        release: names the release that was loaded, for the header of results.
    """

    calls: Mapping[str, Call]
    needs: tuple[Wheel | Source, ...] = ()
    load: Callable[[], object] = lambda: None
    release: Callable[[], str] = lambda: f"torch {torch.__version__}"


def library(name: str) -> Path:
    """The path of a library of `.peers`, unpacked."""
    packed = FOLDER / f"{name}.so.xz"
    return unpacked(f"{name}.so", lambda path: path.write_bytes(lzma.decompress(packed.read_bytes())))


def load_ops(name: str) -> None:
    """Load a library of torch ops."""
    torch.ops.load_library(library(name))


def import_wheel(module: str, name: str) -> None:
    """Import a module, from its wheel if it is not installed."""
    if wheels := sorted(FOLDER.glob(f"{name}-*.whl")):
        sys.path.append(str(unpacked(wheels[-1].stem, lambda path: zipfile.ZipFile(wheels[-1]).extractall(path))))
    importlib.import_module(module)


def unpacked(name: str, unpack: Callable[[Path], object]) -> Path:
    """A path below `UNPACKED`, which `unpack` creates once. Several processes may unpack it at the same time: it is
    complete, or it does not exist."""
    UNPACKED.mkdir(exist_ok=True)
    path = UNPACKED / name
    if not path.exists():
        unfinished = UNPACKED / f"{name}.{os.getpid()}"
        unpack(unfinished)
        with contextlib.suppress(OSError):  # another process was first
            unfinished.rename(path)
    return path
