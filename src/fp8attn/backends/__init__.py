"""The backends, and which of them can serve a call.

| backend | serves |
|---|---|
| `"hopper"` | compute capability 9.0, head_dim up to 256, latents |
| `"triton"` | every GPU that Triton compiles for |
| `"reference"` | every device, slowly |
| `"fa3"` | an installed FlashAttention-3: dense calls only |

On a GPU, `"auto"` is `hopper` if it can run, else `triton`, and never `reference`. On a CPU it is `reference`. It is
chosen for each call, so layers of different head_dims may have different backends. A GPU never falls back to
`reference`.

Each backend has a file of its name (`hopper.py`, `triton.py`, `reference.py`, `fa3.py`). `base.py` has the interface,
`Backend`, and the writing of pages, which `hopper` and `triton` share.
"""

from __future__ import annotations

from functools import cache

import torch

from ..errors import UsageError
from ..formats.spec import HEAD_DIMS, PageSpec, spec_of
from ..params import BACKENDS, DENSE_BACKENDS, BackendName, DenseBackendName, check_backend
from . import fa3
from .base import Backend
from .hopper import Hopper
from .reference import Reference
from .triton import Triton

__all__ = [
    "BACKENDS",
    "DENSE_BACKENDS",
    "Backend",
    "fa3",
    "find",
    "load",
    "select_backend",
    "unsupported_reason",
]

_CLASSES: dict[str, type[Backend]] = {each.name: each for each in (Hopper, Triton, Reference)}


def unsupported_reason(
    backend: DenseBackendName,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int | PageSpec | None = None,
) -> str | None:
    """Why `backend` cannot serve `dtype` inputs of `head_dim` on `device`; None if it can.

    Args:
        backend: `"hopper"`, `"triton"`, `"reference"` or `"fa3"`; or `"auto"`: then the reason is that of the last one
            that `"auto"` tries.
        head_dim: or a `PageSpec`, as `PageSpec.of` takes it. None: the smallest.
    Raises:
        UsageError: there is no such backend.
    """
    check_backend(backend, DENSE_BACKENDS)
    if backend == "fa3":
        return fa3.unsupported_reason(device, dtype)
    return _first(backend, torch.device(device), dtype, PageSpec.of(head_dim or HEAD_DIMS[0]))[1]


def _first(
    backend: BackendName, device: torch.device, dtype: torch.dtype, spec: PageSpec
) -> tuple[BackendName, str | None]:
    """Of the backends that a name means, the first one that can serve this, and None; or the last one, and why it
    cannot.
    """
    names: tuple[BackendName, ...] = (backend,)
    if backend == "auto":
        names = ("reference",) if device.type == "cpu" else ("hopper", "triton")
    for name in names:
        if (reason := _CLASSES[name].supports(spec, dtype, device)) is None:
            break
    return name, reason


def select_backend(
    backend: BackendName,
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    head_dim: int | PageSpec | None = None,
) -> BackendName:
    """Resolve `backend` to the name of one that works on pages; `"auto"` in the order that this module describes.

    The arguments are those of `unsupported_reason`.

    Raises:
        UsageError: the backend cannot serve this; the message has the reason.
    """
    if backend == "fa3":
        raise UsageError(
            f"backend 'fa3' takes dense K and V, not pages; choose 'auto', {', '.join(map(repr, BACKENDS))}"
        )
    check_backend(backend)
    spec = PageSpec.of(head_dim or HEAD_DIMS[0])
    name, reason = _first(backend, torch.device(device), dtype, spec)
    if reason is None:
        return name
    hint = "; backend='reference' runs anywhere, slowly" if name != "reference" and spec.refusal is None else ""
    raise UsageError(f"backend {name!r} cannot run here: {reason}{hint}")


@cache
def load(name: BackendName) -> Backend:
    """The backend of a resolved name. Its kernels are imported at the first call."""
    return _CLASSES[name]()


@cache
def find(backend: BackendName, device: torch.device, dtype: torch.dtype, spec_name: str) -> Backend:
    """The backend for a call, with `"auto"` resolved: the same for the life of the process. A spec is passed by its
    name, which a format has at hand.

    Raises:
        UsageError: as `select_backend`.
    """
    return load(select_backend(backend, device, dtype, spec_of(spec_name)))
