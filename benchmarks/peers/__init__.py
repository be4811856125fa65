"""The peers: other systems' attention, as callables on one problem.

A file of this folder with a `PEER` is one system (`peer.Peer` says what it consists of); a new file adds a system
everywhere: to `make peers`, the benchmarks, tables and pictures. Libraries come from `.peers/`. A system whose
libraries are missing, or that cannot do a case, is left out, with the reason printed.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

import torch

from ..measure import left_out
from ..problem import Run, Shape
from .peer import Call, Peer


def _found() -> dict[str, Peer]:
    modules = {each.name: import_module(f"{__name__}.{each.name}") for each in iter_modules(__path__)}
    return {name: module.PEER for name, module in modules.items() if hasattr(module, "PEER")}


PEERS = _found()  # by file
CALLS: dict[str, Call] = {impl: call for peer in PEERS.values() for impl, call in peer.calls.items()}
PREFILL = tuple(impl for impl, call in CALLS.items() if call.prefill)
DECODE = tuple(impl for impl, call in CALLS.items() if call.decode)


def of(impl: str) -> str | None:
    """The file of the peer that an implementation is a call of. In `engine`, `-split` is a call of two parts, and pages
    are not named. In `needle`, options of a call are behind a colon."""
    plain = impl.removesuffix("-split").partition(":")[0]
    return next((name for name, peer in PEERS.items() if {plain, f"{plain}-paged"} & peer.calls.keys()), None)


@cache
def available() -> frozenset[str]:
    """The files of the peers that load here. The reason why another does not is printed once."""
    found = set()
    for name, peer in PEERS.items():
        try:
            peer.load()
            found.add(name)
        except Exception as problem:  # torchao's activation raises types of several libraries
            print(f"without {name}, which `make peers` collects: {type(problem).__name__}: {problem}", flush=True)
    return frozenset(found)


def releases(impls: Iterable[str]) -> dict[str, str]:
    """The releases of the peers among implementations, by file."""
    names = {of(impl) for impl in impls} - {None}
    return {name: PEERS[name].release() for name in sorted(names & available())} if names else {}


def runs(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: Iterable[str] = PREFILL
) -> dict[str, Run]:
    """The installed peers that support the problem, on the same `q`, `k` and `v` in 16 bits."""
    found = {}
    for name in names:
        if of(name) not in available():
            continue
        try:
            found[name] = CALLS[name].run(shape, q, k, v)
        except Exception as problem:  # cuDNN's graphs raise types of their own
            left_out(name, problem)
    return found
