"""What users call: check the arguments, choose a backend, run it; as a torch op where something traces or intercepts those.

Both work on device state alone and never read it back to the host (but for `reference`, which is a loop over sequences), so they can be
compiled and captured in CUDA graphs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .backends import append_kernel, attention_kernel, select_backend
from .layout import KVPages
from .rope import check_rope


def append(
    pages: KVPages,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    q: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    rope_cos: torch.Tensor | None = None,
    rope_sin: torch.Tensor | None = None,
    rope_interleaved: bool = False,
    static_scales: bool = False,
    fix_means: bool = False,
    backend: str = "auto",
) -> torch.Tensor | None:
    """Quantise new tokens onto the end of every sequence: `x_fp8 = fp8((x - mean) / scale)`.

    A page's scale is the smallest power of two that holds its largest value; when a later token needs a larger one, the tokens already
    in the page are shifted to it. The pages must be there: `PagedKVCache.append` sees to that, and is what most users want.

    Args:
        pages: the cache; its bytes, scales and lengths are changed in place, its means with `fix_means`.
        k, v: `[T, num_kv_heads, head_dim]`, the sequences' new tokens one after another, last dimension contiguous.
        q: `[T, num_q_heads, head_dim]`, the same tokens' queries, to be rotated as K is; needs `rope_cos` and `rope_sin`.
        cu_seqlens: `[num_seqs + 1]` int32, where each sequence's tokens begin in T. None: every sequence has T / num_seqs.
        max_seqlen: the most new tokens of any sequence; needed with `cu_seqlens`.
        rope_cos, rope_sin: `[T, R / 2]`: K is rotated first (see `rope.apply_rope`); V never is.
        rope_interleaved: which channels are pairs.
        static_scales: the pages' scales are given and stay (calibrated); larger values saturate.
        fix_means: sequences that are empty before this call get their means from a sample of it (`numerics.shrunk_mean`).
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.
    Returns:
        The rotated queries `[T, num_q_heads, head_dim]` in q's dtype, for `attention`; None without `q`.
    Raises:
        ValueError: a shape, dtype or backend that does not fit, with what would.
        RuntimeError: a gradient is wanted.
    """
    name = check_append(pages, k, v, q, rope_cos, rope_sin, backend)
    max_seqlen = _longest(k, pages, cu_seqlens, max_seqlen, "cu_seqlens", "max_seqlen")
    q_out = None if q is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    options = dict(
        q=q, q_out=q_out, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, rope_cos=rope_cos, rope_sin=rope_sin,
        rope_interleaved=rope_interleaved, static_scales=static_scales, fix_means=fix_means,
    )  # fmt: skip
    if _unobserved(k):
        append_kernel(name)(pages, k, v, **options)
    else:
        torch.ops.fp8attn.append(k, v, *pages.tensors, *options.values(), name)
    return q_out


def attention(
    q: torch.Tensor,
    pages: KVPages,
    *,
    cu_seqlens_q: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    causal: bool = True,
    softmax_scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    leftpad_k: torch.Tensor | None = None,
    return_lse: bool = False,
    backend: str = "auto",
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Attention of new queries over the cache: `softmax(mask(softcap(softmax_scale * q k^T))) v`.

    The queries of a sequence are its last tokens, already appended: query `i` of `n` stands at position `cache_seqlens - n + i`. One
    call serves prefill, chunked prefill and decode.

    Args:
        q: `[T, num_q_heads, head_dim]`, last dimension contiguous; `num_q_heads` a multiple of `num_kv_heads` (GQA, MQA).
        pages: the cache.
        cu_seqlens_q: `[num_seqs + 1]` int32, where each sequence's queries begin in T. None: every sequence has T / num_seqs.
        max_seqlen_q: the most queries of any sequence; needed with `cu_seqlens_q`.
        causal: a query sees its own position and what lies before; otherwise the whole sequence.
        softmax_scale: default `1 / sqrt(head_dim)`.
        window: a query sees its own position and the `window - 1` before it; needs `causal`.
        softcap: `softcap * tanh(score / softcap)` (Gemma 2).
        sinks: `[num_q_heads]` logits, one more column of every row's softmax, with no value (gpt-oss).
        leftpad_k: `[num_seqs]` int32, how many of a sequence's first tokens are padding and seen by nobody.
        return_lse: also return the natural logarithm of the softmax denominator (sinks included).
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.
    Returns:
        `out [T, num_q_heads, head_dim]` in q's dtype; rows that see no key are zero. With `return_lse` also `lse [T, num_q_heads]`
        float32, `-inf` in such rows.
    Raises:
        ValueError: a shape, dtype, option or backend that does not fit, with what would.
        RuntimeError: a gradient is wanted.
    """
    _check_tokens(q, pages)
    max_seqlen_q = _longest(q, pages, cu_seqlens_q, max_seqlen_q, "cu_seqlens_q", "max_seqlen_q")
    _, num_q_heads, q_dim = q.shape
    _, num_kv_heads, _, head_dim = pages.k.shape
    if num_q_heads % num_kv_heads or q_dim != head_dim:
        raise ValueError(f"q must be [T, num_q_heads, {head_dim}] with num_q_heads a multiple of {num_kv_heads}; got {tuple(q.shape)}")
    if window is not None and (not causal or window < 1):
        raise ValueError(f"window counts the visible keys of a causal query, so it needs causal=True and window >= 1; got {window}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive (None for no cap); got {softcap}")
    if sinks is not None and sinks.shape != (num_q_heads,):
        raise ValueError(f"sinks must be [{num_q_heads}], one logit per query head; got {tuple(sinks.shape)}")
    if leftpad_k is not None and leftpad_k.shape != (pages.num_seqs,):
        raise ValueError(f"leftpad_k must be [{pages.num_seqs}], one count per sequence; got {tuple(leftpad_k.shape)}")
    scale = 1 / math.sqrt(head_dim) if softmax_scale is None else softmax_scale
    name = _resolve(backend, q)
    options = dict(
        cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, causal=causal, softmax_scale=scale, window=window or 0,
        softcap=softcap or 0.0, sinks=sinks, leftpad_k=leftpad_k,
    )  # fmt: skip
    if _unobserved(q):
        out, lse = attention_kernel(name)(q, pages, **options)
    else:
        out, lse = torch.ops.fp8attn.attention(q, *pages.tensors, *options.values(), name)
    return (out, lse) if return_lse else out


def check_append(pages: KVPages, k, v, q, rope_cos, rope_sin, backend: str) -> str:
    """All of `append`'s checks that need no lengths: raises as it does, returns the backend's name."""
    _check_tokens(k, pages)
    if k.shape != v.shape or k.shape[1:] != (pages.num_kv_heads, pages.head_dim) or k.dtype != v.dtype:
        raise ValueError(
            f"k and v must both be [T, {pages.num_kv_heads}, {pages.head_dim}] and of one dtype; "
            f"got {tuple(k.shape)} {k.dtype} and {tuple(v.shape)} {v.dtype}"
        )
    _check_tokens(v, pages)
    if (rope_cos is None) != (rope_sin is None):
        raise ValueError("give rope_cos and rope_sin together, or neither")
    if rope_cos is not None:
        check_rope(k, rope_cos, rope_sin)
    if q is not None:
        _check_tokens(q, pages)
        if rope_cos is None or q.shape[::2] != k.shape[::2]:
            raise ValueError(
                f"q is there to be rotated: it must be [{k.shape[0]}, num_q_heads, {k.shape[2]}] and come with rope_cos and rope_sin; "
                f"got {tuple(q.shape)}, {'without' if rope_cos is None else 'with'} them"
            )
    return _resolve(backend, k)


_selected = cache(select_backend)  # a machine does not change


def _resolve(backend: str, x: torch.Tensor) -> str:
    """The backend's name, or `backend` itself while Dynamo traces, which cannot look at the machine: then the op resolves it."""
    return backend if torch.compiler.is_compiling() else _selected(backend, x.device, x.dtype)


def _unobserved(x: torch.Tensor) -> bool:
    """Whether nothing traces or intercepts torch ops now: then the kernel is called as it is. A torch op in Python costs 12 us more."""
    return not torch.compiler.is_compiling() and type(x) is torch.Tensor and not is_in_torch_dispatch_mode()


def _check_tokens(x: torch.Tensor, pages: KVPages) -> None:
    if x.dim() != 3 or x.stride(-1) != 1:
        raise ValueError(f"tokens must be [T, heads, head_dim] with the last dimension contiguous; got {tuple(x.shape)}, {x.stride()}")
    if x.device != pages.k.device:
        raise ValueError(f"the cache is on {pages.device} and the tokens are on {x.device}; move one of them")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("no gradient flows through FP8 pages, which are for inference. Use torch.no_grad() or torch.inference_mode()")


def _longest(x: torch.Tensor, pages: KVPages, cu_seqlens, max_seqlen, cu_name: str, max_name: str) -> int:
    """The longest sequence of new tokens; every sequence's length where `cu_seqlens` is None."""
    if cu_seqlens is not None:
        if max_seqlen is None:
            raise ValueError(f"{cu_name} needs {max_name}, the longest of its sequences")
        if cu_seqlens.shape != (pages.num_seqs + 1,) or cu_seqlens.dtype != torch.int32:
            raise ValueError(f"{cu_name} must be [{pages.num_seqs + 1}] int32; got {tuple(cu_seqlens.shape)} {cu_seqlens.dtype}")
        return max_seqlen
    length, rest = divmod(x.shape[0], pages.num_seqs)
    if rest:
        raise ValueError(f"{x.shape[0]} tokens do not divide over {pages.num_seqs} sequences; give {cu_name} and {max_name}")
    return length


# The torch ops, for `torch.compile` and whatever else traces. `torch.library.custom_op` would wrap each in Python kernels for autograd,
# aliasing and version counters: 25 to 90 us a call. They would have no work: `_check_tokens` refuses gradients, nothing returned is an
# alias, and no graph saves pages for a backward pass.

_LIBRARY = torch.library.Library("fp8attn", "DEF")


def _register(schema: str, implementation: Callable, fake: Callable) -> None:
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8attn::{name}", fake, lib=_LIBRARY)


def _append(
    k, v, k_pages, v_pages, k_scale, v_scale, k_mean, v_mean, page_table, cache_seqlens, q, q_out, cu_seqlens, max_seqlen, rope_cos,
    rope_sin, rope_interleaved, static_scales, fix_means, backend,
) -> None:  # fmt: skip
    pages = KVPages(k_pages, v_pages, k_scale, v_scale, k_mean, v_mean, page_table, cache_seqlens)
    append_kernel(_selected(backend, k.device, k.dtype))(
        pages, k, v, q=q, q_out=q_out, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, rope_cos=rope_cos, rope_sin=rope_sin,
        rope_interleaved=rope_interleaved, static_scales=static_scales, fix_means=fix_means,
    )  # fmt: skip


_register(
    "append(Tensor k, Tensor v, Tensor(a!) k_pages, Tensor(b!) v_pages, Tensor(c!) k_scale, Tensor(d!) v_scale, Tensor(e!) k_mean, "
    "Tensor(f!) v_mean, Tensor page_table, Tensor(g!) cache_seqlens, Tensor? q, Tensor(h!)? q_out, Tensor? cu_seqlens, SymInt max_seqlen, "
    "Tensor? rope_cos, Tensor? rope_sin, bool rope_interleaved, bool static_scales, bool fix_means, str backend) -> ()",
    _append,
    lambda *args: None,
)


def _attention(
    q, k_pages, v_pages, k_scale, v_scale, k_mean, v_mean, page_table, cache_seqlens, cu_seqlens_q, max_seqlen_q, causal, softmax_scale,
    window, softcap, sinks, leftpad_k, backend,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    pages = KVPages(k_pages, v_pages, k_scale, v_scale, k_mean, v_mean, page_table, cache_seqlens)
    return attention_kernel(_selected(backend, q.device, q.dtype))(
        q, pages, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, causal=causal, softmax_scale=softmax_scale, window=window,
        softcap=softcap, sinks=sinks, leftpad_k=leftpad_k,
    )  # fmt: skip


_register(
    "attention(Tensor q, Tensor k_pages, Tensor v_pages, Tensor k_scale, Tensor v_scale, Tensor k_mean, Tensor v_mean, Tensor page_table, "
    "Tensor cache_seqlens, Tensor? cu_seqlens_q, SymInt max_seqlen_q, bool causal, float softmax_scale, SymInt window, float softcap, "
    "Tensor? sinks, Tensor? leftpad_k, str backend) -> (Tensor, Tensor)",
    _attention,
    lambda q, *args: (q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=torch.float32)),
)
