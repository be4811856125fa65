"""The backends, and which of them can serve a call.

| backend | serves |
|---|---|
| `"hopper"` | compute capability 9.0 |
| `"triton"` | every GPU that Triton compiles for |
| `"reference"` | every device, slowly |
| `"fa3"` | an installed FlashAttention-3: dense calls only |

On a GPU, `"auto"` is `hopper` if it can run, else `triton`, and never `reference`. On a CPU it is `reference`.
"""

from __future__ import annotations

from functools import cache

import torch

from ..errors import UsageError
from ..params import BACKENDS, DENSE_BACKENDS, BackendName, DenseBackendName, check_backend
from .base import Backend
from .fa3 import FlashAttention3
from .hopper import Hopper
from .reference import Reference
from .triton import Triton

__all__ = ["BACKENDS", "DENSE_BACKENDS", "Backend", "find", "load", "load_fa3", "select_backend", "unsupported_reason"]

_CLASSES: dict[str, type[Backend]] = {found.name: found for found in (Hopper, Triton, Reference)}


def unsupported_reason(backend: DenseBackendName, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why `backend`, one of `DENSE_BACKENDS`, cannot serve `dtype` inputs on `device`; None if it can.

    Raises:
        UsageError: there is no such backend.
    """
    device = torch.device(device)
    if backend == FlashAttention3.name:
        return FlashAttention3.unsupported_reason(device, dtype)
    check_backend(backend)
    return _CLASSES[backend].unsupported_reason(device, dtype)


def select_backend(backend: BackendName, device: torch.device | str, dtype: torch.dtype) -> BackendName:
    """Resolve `backend` to the name of one that works on pages; `"auto"` in the order that this module describes.

    Raises:
        UsageError: the backend cannot serve this; the message has the reason.
    """
    device = torch.device(device)
    if backend == FlashAttention3.name:
        raise UsageError(f"backend 'fa3' takes dense K and V, not pages; choose 'auto', {', '.join(map(repr, BACKENDS))}")
    candidates: tuple[BackendName, ...] = (backend,)
    if backend == "auto":
        candidates = ("reference",) if device.type == "cpu" else ("hopper", "triton")
    for name in candidates:
        if (reason := unsupported_reason(name, device, dtype)) is None:
            return name
    hint = "; backend='reference' runs anywhere, slowly" if name != "reference" else ""
    raise UsageError(f"backend {name!r} cannot run here: {reason}{hint}")


@cache
def load(name: BackendName) -> Backend:
    """The backend of a resolved name. Its kernels are imported at the first call."""
    return _CLASSES[name]()


@cache  # the result is the same for the life of the process
def find(backend: BackendName, device: torch.device, dtype: torch.dtype) -> Backend:
    """The backend for a call, with `"auto"` resolved.

    Raises:
        UsageError: as `select_backend`.
    """
    return load(select_backend(backend, device, dtype))


def load_fa3(device: torch.device, dtype: torch.dtype) -> FlashAttention3:
    """The installed FlashAttention-3.

    Raises:
        UsageError: it cannot serve this; the message has the reason.
    """
    reason = unsupported_reason("fa3", device, dtype)
    if reason is not None:
        raise UsageError(f"backend 'fa3' cannot run here: {reason}")
    return FlashAttention3()
