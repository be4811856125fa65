"""Loads the libraries that `get_peers` has put into `.peers/`."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import importlib.machinery
import lzma
import os
import sys
import types
import zipfile
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path

import torch

from ..get_peers import CUDNN, FOLDER

UNPACKED = Path("/tmp/fp8attn-peers")
FLASHINFER = ("flashinfer_fmha", "flashinfer_xqa")


@lru_cache
def available() -> frozenset[str]:
    """The names of `LOADERS` that load here. The reason why another does not is printed once."""
    found = set()
    for name, load in LOADERS.items():
        try:
            load()
            found.add(name)
        except Exception as problem:  # of any type: torchao's activation is of several libraries
            print(f"without {name}, which `make peers` collects: {type(problem).__name__}: {problem}", flush=True)
    return frozenset(found)


def library(name: str) -> Path:
    """The path of a library, unpacked."""
    packed = FOLDER / f"{name}.so.xz"
    return unpacked(f"{name}.so", lambda path: path.write_bytes(lzma.decompress(packed.read_bytes())))


def _ops(name: str) -> None:
    """Load a library of torch ops."""
    torch.ops.load_library(library(name))


def _wheel(module: str, name: str) -> None:
    """Import a module, from its wheel if it is not installed."""
    if wheels := sorted(FOLDER.glob(f"{name}-*.whl")):
        sys.path.append(str(unpacked(wheels[-1].stem, lambda path: zipfile.ZipFile(wheels[-1]).extractall(path))))
    importlib.import_module(module)


def unpacked(name: str, unpack: Callable[[Path], object]) -> Path:
    """A path below `UNPACKED`, which `unpack` creates once. Several processes may unpack it at the same time: it is complete, or it does
    not exist."""
    UNPACKED.mkdir(exist_ok=True)
    path = UNPACKED / name
    if not path.exists():
        unfinished = UNPACKED / f"{name}.{os.getpid()}"
        unpack(unfinished)
        with contextlib.suppress(OSError):  # another process was first
            unfinished.rename(path)
    return path


def _hpc_ops() -> None:
    """Load the ops, and their repository's module of calls as `hpc_attention`."""
    _ops("hpc_ops")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    importlib.import_module("hpc_attention")


def _flashinfer() -> None:
    _wheel("tvm_ffi", "apache_tvm_ffi")
    for name in FLASHINFER:
        library(name)


def _cudnn() -> None:
    """Load the newest cuDNN's libraries, if they are there, and the frontend.

    `libcudnn`, which torch has loaded, opens the others by name when it is first called, and finds these: torch's own calls go to the
    newest cuDNN, too. Its version is part of the rows' fingerprints.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in [library(name) for name in CUDNN]:
            ctypes.CDLL(str(path))
    _wheel("cudnn", "nvidia_cudnn_frontend")


_registered: list[torch.library.Library] = []


def _torchao() -> None:
    """Import torchao, and make FlashAttention-3 torch's flash backend, for the whole process, as torchao asks of its users.

    torch looks for the package `flash_attn_interface` and calls `flash_attn_3::fwd`, which is `fa3_fwd::fwd` by another name.
    """
    _wheel("torchao", "torchao")
    schema = str(torch.ops.fa3_fwd.fwd.default._schema).split("::", 1)[1]
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define(schema)
    library.define("bwd(Tensor x) -> Tensor")
    library.impl("fwd", lambda *args, **kwargs: torch.ops.fa3_fwd.fwd(*args, **kwargs), "CUDA")
    _registered.append(library)
    stand_in = types.ModuleType("flash_attn_interface")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    sys.modules["flash_attn_interface"] = stand_in
    torch.nn.attention.activate_flash_attention_impl("FA3")
    from torchao.prototype.attention.fp8_fa3.attention import fp8_fa3_sdpa  # noqa: F401


LOADERS = {
    "fa3": partial(_ops, "fa3_fwd"),
    "vllm-fa3": partial(_ops, "vllm_fa3"),
    "hpc-ops": _hpc_ops,
    "flashinfer": _flashinfer,
    "sage": partial(_ops, "sage_sm90"),
    "cudnn": _cudnn,
    "torchao": _torchao,
}
