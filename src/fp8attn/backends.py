"""Which implementation can do what, and why not, in words."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
from collections.abc import Callable
from functools import cache, partial

import torch

from .errors import UsageError
from .kernels.hopper import no_hopper_reason

BACKENDS = ("hopper", "triton", "reference")  # the order in which `auto` asks

TRITON_INSTALLED = importlib.util.find_spec("triton") is not None


def unsupported_reason(backend: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why `backend` cannot serve `dtype` inputs on `device`; None if it can.

    Raises:
        UsageError: there is no such backend.
    """
    device = torch.device(device)
    if backend == "reference":
        if dtype not in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
            return f"inputs must be floating point, not {dtype}"
        return None
    if backend == "hopper":
        if (reason := no_hopper_reason(device, "the kernels are")) is not None:
            return reason
        if not _has_gluon():
            return "Triton is not installed, or is older than 3.6 and has no Gluon for Hopper (pip install -U triton)"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"the kernels take bfloat16 and float16, not {dtype}"
        return None
    if backend == "triton":
        if not TRITON_INSTALLED:
            return "Triton is not installed (pip install triton)"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"the kernels take bfloat16 and float16, not {dtype}"
        if device.type not in ("cuda", "xpu") and os.environ.get("TRITON_INTERPRET") != "1":
            return f"no Triton on {device.type} (TRITON_INTERPRET=1 interprets it there, slowly, for tests)"
        return None
    raise UsageError(f"unknown backend {backend!r}; choose 'auto', {', '.join(map(repr, BACKENDS))}")


@cache
def _has_gluon() -> bool:
    """Whether Triton is new enough to hold Gluon as the kernels use it; looked up without importing Triton."""
    if not TRITON_INSTALLED:
        return False
    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:  # a source tree on the path
        version = importlib.import_module("triton").__version__
    major, minor = re.match(r"(\d+)\.(\d+)", version).groups()
    return (int(major), int(minor)) >= (3, 6)


def select_backend(backend: str, device: torch.device | str, dtype: torch.dtype) -> str:
    """Resolve `backend` to a name in `BACKENDS`.

    `auto` takes `hopper` where it can run, `triton` on every other GPU and `reference` on a CPU, and nothing else: a GPU never falls back
    to `reference` in silence.

    Raises:
        UsageError: the backend cannot serve this, with the reason.
    """
    device = torch.device(device)
    name = backend
    if backend == "auto":
        name = "reference" if device.type == "cpu" else "triton"
        if device.type == "cuda" and unsupported_reason("hopper", device, dtype) is None:
            name = "hopper"
    reason = unsupported_reason(name, device, dtype)
    if reason is not None:
        hint = "; backend='reference' runs anywhere, slowly" if name != "reference" else ""
        raise UsageError(f"backend {name!r} cannot run here: {reason}{hint}")
    return name


@cache
def append_kernel(name: str) -> Callable:
    """The `append` of a resolved backend: the signature of `reference.append`."""
    if name in ("hopper", "triton"):  # writing is the same everywhere
        from .kernels.append import append
    else:
        from .reference import append
    return append


@cache
def quantize_kernel(name: str) -> Callable:
    """The `quantize` of a resolved backend: the signature of `reference.quantize`."""
    if name in ("hopper", "triton"):
        from .kernels.append import quantize
    else:
        from .reference import quantize
    return quantize


@cache
def rotate_kernel(name: str) -> Callable:
    """The `rotate` of a resolved backend: the signature of `reference.rotate`."""
    if name in ("hopper", "triton"):
        from .kernels.append import rotate
    else:
        from .reference import rotate
    return rotate


@cache
def quantize_rows_kernel(name: str) -> Callable:
    """The `quantize_rows` of a resolved backend: the signature of `reference.quantize_rows`."""
    if name in ("hopper", "triton"):
        from .kernels.quantize_rows import quantize_rows
    else:
        from .reference import quantize_rows
    return quantize_rows


@cache
def attention_kernel(name: str) -> Callable:
    """The `attention` of a resolved backend: the signature of `reference.attention`, queries of three or four dimensions, and RoPE on them
    by `rope_cos` and `rope_sin` (`[T, R / 2]`, `[num_seqs, S, R / 2]`) and `rope_interleaved`. Without `return_lse` what comes back as
    `lse` is anything, or None."""
    rotate = rotate_kernel(name)
    if name == "hopper":
        from .kernels import decode, prefill
        from .kernels.decode import attention as plain
    elif name == "triton":
        from .kernels.portable import attention as plain
    else:
        from .reference import attention as plain
    dense = _one_after_another(plain)

    def attention(
        q: torch.Tensor, pages, *, cu_seqlens_q, max_seqlen_q, causal, softmax_scale, window, softcap, sinks, leftpad_k, return_lse,
        rope_cos=None, rope_sin=None, rope_interleaved=False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
        """Few query rows are bound by memory and stay exact (`decode`); many are bound by arithmetic and go to FP8 (`prefill`). That one
        takes four dimensions and most tables as they are; for the others RoPE is a launch before, rounded to q's dtype."""
        if not max_seqlen_q or not pages.page_table.shape[0]:  # no sequence has a query: an engine's idle step, with padded rows
            return q.new_zeros(q.shape), q.new_full(q.shape[:-1], -torch.inf, dtype=torch.float32)
        many = name == "hopper" and decode.unsupported_reason(q, pages, max_seqlen_q) is not None
        kernel = partial(prefill.attention, return_lse=return_lse) if many else plain if q.dim() == 3 else dense
        if rope_cos is not None:
            if many and prefill.takes_tables(rope_cos):
                kernel = partial(kernel, rope_cos=rope_cos, rope_sin=rope_sin, rope_interleaved=rope_interleaved)
            elif q.dim() == 4:
                q = rotate(q.transpose(1, 2), rope_cos, rope_sin, rope_interleaved).transpose(1, 2)
            else:
                q = rotate(q.transpose(0, 1)[None], rope_cos[None], rope_sin[None], rope_interleaved)[0].transpose(0, 1)
        return kernel(
            q, pages, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, causal=causal, softmax_scale=softmax_scale, window=window,
            softcap=softcap, sinks=sinks, leftpad_k=leftpad_k,
        )  # fmt: skip

    return attention


def _one_after_another(attention: Callable) -> Callable:
    """For kernels that know only `[T, num_q_heads, head_dim]`: `[num_seqs, S, num_q_heads, head_dim]`, copied where it must be."""

    def dense(q: torch.Tensor, pages, **options) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = (x.unflatten(0, q.shape[:2]) for x in attention(q.flatten(0, 1), pages, **options))
        like = torch.empty_like(q)
        return (out if out.stride() == like.stride() else like.copy_(out)), lse

    return dense
