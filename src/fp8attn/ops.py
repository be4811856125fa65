"""The functions on pages: `append`, `attention` and `from_dense`. Each checks its arguments, chooses a backend and runs
it. While torch ops are traced or intercepted, it calls the torch op.

They read and write only device state and never read it back to the host, so they can be compiled and captured in CUDA
graphs. The exception is the backend `reference`, a loop over sequences.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ._torch_ops import Target, flatten_format, flatten_pages, resolve, unobserved
from .checks import (
    LARGEST,
    check_dense,
    check_flags,
    check_is_tensor,
    check_mean,
    check_number,
    check_tensor,
    check_tokens,
    is_whole,
)
from .contents import at_hand, check_appended, check_attended
from .derivatives import check_derivatives
from .errors import UsageError
from .formats.codec import DEFAULT_KEY_DTYPE, FP8, KeyDtype
from .formats.kv_format import KVFormat
from .formats.spec import PageSpec
from .pages import KVPages
from .params import Append, AttentionArguments, AttentionParams, BackendName

MOST_WINDOW = 2**63 - 1  # torch's ops take 64 bits; kernels clamp it


def append(
    pages: KVPages,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    static_scales: bool = False,
    advance: bool = True,
    backend: BackendName = "auto",
) -> None:
    """Quantize new tokens and write them at the end of their sequences.

        x_8bit = round((x - mean) / scale)

    Latents (`PageSpec.latent`) and their keys with RoPE take the places of K and V: `formats/latent.py` has their
    equation, in which nothing grows.

    K goes through the rotation (`rotation.rotate`) if `pages.format.rotate` is True, then through this equation. The
    first token of a page sets the page's scale, with headroom. The scale grows when a later token does not fit
    (`numerics.settle`). So the stored bytes do not depend on how tokens are divided over calls. The page table must
    name a page for every token: `PagedKVCache.append` allocates these pages and then writes them.

    Inf saturates, and becomes finite. A NaN stays NaN. INT8 has none: a NaN in an INT8 K makes all tokens of its page
    NaN, or becomes zero with `static_scales` (docs/numerics.md, "What is not finite").

    Args:
        pages: the cache. Its bytes and lengths change in place.
        k, v: `[T, num_kv_heads, head_dim]`, all new tokens, sequence after sequence; K after RoPE. The last dimension
            is contiguous. For latents `[T, 1, rank]` and `[T, 1, rope]`.
        cu_seqlens: `[num_seqs + 1]` int32, the index in T of each sequence's first token, then T. None: every sequence
            has T / num_seqs.
        max_seqlen: the largest number of new tokens of a sequence, required with `cu_seqlens`. With a smaller number, a
            GPU loses tokens. Without `cu_seqlens` leave it out.
        static_scales: the pages have calibrated scales, which do not grow. Larger values saturate.
        advance: `cache_seqlens` are the lengths before the new tokens, and this call adds the new tokens to them.
            False: they count the new tokens already, as serving engines keep them, and do not change. Then nothing is
            written for a sequence that is shorter than its new tokens: it is padding of the batch.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.
    Raises:
        TypeError: `pages` is not a `KVPages`.
        ValueError: a shape, dtype or backend does not fit; the message says what would. On a CPU, and of the backend
            `reference`, also if cu_seqlens, max_seqlen, the page table or the lengths contradict each other
            (`contents`): a GPU does not check them.
        RuntimeError: an input requires a gradient.
    """
    if not isinstance(pages, KVPages):
        raise _no_pages(pages, "append(pages, k, v)")
    target = check_append(pages.format.spec, pages.pool.shape[1], pages.pool.device, k, v, backend)
    if not type(static_scales) is type(advance) is bool:
        check_flags(static_scales=static_scales, advance=advance)
    if static_scales and pages.spec.v_in_k:
        raise UsageError("the scale of a latent is its token's own, so there are no static_scales: leave them out")
    max_seqlen = _longest(k, pages, cu_seqlens, max_seqlen, "cu_seqlens", "max_seqlen")
    options = Append(cu_seqlens, max_seqlen, static_scales, advance)
    if not isinstance(target, str) and at_hand(k, target.name):
        check_appended(pages, k.shape[0], options)
    run_append(target, pages, k, v, options)


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
    exact: bool = False,
    batch_invariant: bool = False,
    out: torch.Tensor | None = None,
    backend: BackendName = "auto",
) -> torch.Tensor | Any:  # a pair with `return_lse`; a union with it would make every caller tell them apart
    """Attention of new queries over the cache, for prefill, chunked prefill and decode.

        out = softmax(mask(softcap(softmax_scale * q k^T))) v

    The queries of a sequence are its last tokens, which were appended before: query `i` of `n` has position
    `cache_seqlens - n + i`.

    Args:
        q: `[T, num_q_heads, head_dim]` after RoPE, with `num_q_heads` a multiple of `num_kv_heads` (GQA, MQA). The last
            dimension is contiguous. Over latents `[T, num_q_heads, rank + rope]`: the absorbed query, which is q times
            the matrix that expands a latent to the head's key, and then the channels with RoPE.
        pages: the cache.
        softmax_scale: None: `1 / sqrt(head_dim)`. Over latents it must be given, because it depends on the expanded
            keys.
        window, softcap: None: no window, no softcap. `window` requires `causal`.
        cu_seqlens_q, max_seqlen_q: give both or neither.
        out: of the result's shape and q's dtype, contiguous, to write the result into. It must not share memory with
            `q`. An address that is no multiple of 16 bytes costs a copy. None: a new tensor.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.

    `AttentionParams` has the shapes, dtypes and meanings of the options, and those of the arguments that are not listed
    here.

    Returns:
        `out`, of q's shape and dtype, contiguous; over latents `[T, num_q_heads, rank]`. Rows that see no key are zero,
        and so are, on a GPU, rows after those of the last sequence (the padding of a CUDA graph). With `return_lse`
        also `lse [T, num_q_heads]` float32. It is `-inf` in rows that see neither a key nor a sink, and unspecified in
        rows after those of the last sequence.
    Raises:
        TypeError: `pages` is not a `KVPages`.
        ValueError: a shape, dtype, option or backend does not fit; the message says what would. On a CPU, and of the
            backend `reference`, also if cu_seqlens_q, max_seqlen_q, the page table or the lengths contradict each other
            (`contents`): a GPU does not check them.
        RuntimeError: an input requires a gradient.
    """
    if not isinstance(pages, KVPages):
        raise _no_pages(pages, "attention(q, pages)")
    check_queries(q, pages)
    if cu_seqlens_q is None and pages.ragged is not None and sum(pages.ragged) == q.shape[0]:
        raise ValueError(
            f"q has a row for each of the {q.shape[0]} tokens of the last append, whose lengths {list(pages.ragged)} "
            f"differ: give cu_seqlens_q and max_seqlen_q, or call PagedKVCache.attention, which knows them"
        )
    max_seqlen_q = _longest(q, pages, cu_seqlens_q, max_seqlen_q, "cu_seqlens_q", "max_seqlen_q")
    options = causal, softmax_scale, window, softcap, sinks, leftpad_k, return_lse, exact, batch_invariant
    params = params_of(q, pages, cu_seqlens_q, max_seqlen_q, options)
    if out is not None:
        _check_out(out, q, pages)
    target = resolve(backend, q, pages.format.name)
    if not isinstance(target, str) and at_hand(q, target.name):
        check_attended(pages, q.shape[0], params)
    result, lse = run_attention(target, q, pages, params, out)
    return result if lse is None or not return_lse else (result, lse)


def from_dense(
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    k_mean: torch.Tensor | None = None,
    v_mean: torch.Tensor | None = None,
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    backend: BackendName = "auto",
) -> KVPages:
    """Quantize dense K (after RoPE) and V into pages, for `attention`.

    K and V are read once, without a copy. The bytes are the same as after an `append` to an empty cache. Sequence b has
    the pages `b * n` to `(b + 1) * n - 1` in order, with n pages for S tokens.

    Args:
        k, v: `[B, num_kv_heads, S, head_dim]` bfloat16 or float16 (`"reference"`: float32 and float64, too), of any
            strides, not empty. The last dimension is contiguous.
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, means of K (not rotated) and of V, subtracted before
            quantization. None: zero.
        key_dtype: the format of keys, as `PagedKVCache` takes it.
        rotate_keys: rotate K before quantization (`rotation.rotate`).
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.
    Raises:
        ValueError: a shape, dtype or backend does not fit; the message says what would.
        RuntimeError: an input requires a gradient.
    """
    check_dense(k, "k")
    check_dense(v, "v")
    if k.shape != v.shape or k.dtype != v.dtype or k.device != v.device or not k.numel():
        raise ValueError(
            f"k and v must be of one shape [B, num_kv_heads, S, head_dim], dtype and device, not empty; "
            f"got {tuple(k.shape)} {k.dtype} on {k.device} and {tuple(v.shape)} {v.dtype} on {v.device}"
        )
    for name, mean in (("k_mean", k_mean), ("v_mean", v_mean)):
        check_mean(mean, name, (k.shape[1], k.shape[3]), k.device)
    check_flags(rotate_keys=rotate_keys)
    if k.dtype == FP8:
        raise ValueError(
            f"k and v are {FP8} already: pass them in 16 bits, before they are rounded, or attend over them as they "
            f"are with fp8attn.scaled_dot_product_attention_quantized"
        )
    if (refusal := PageSpec.of(k.shape[3], key_dtype).refusal) is not None:
        raise UsageError(refusal)
    format = KVFormat.of(k.shape[3], key_dtype, rotate_keys, k_mean, v_mean)
    target = resolve(backend, k, format.name)
    if not isinstance(target, str):
        return target.from_dense(k, v, format)
    pool, table, lengths = torch.ops.fp8attn.from_dense(k, v, *flatten_format(format), target)
    return KVPages(pool, table, lengths, format)


def run_append(target: Target, pages: KVPages, k: torch.Tensor, v: torch.Tensor, options: Append) -> None:
    """`append` with checked arguments, by what `resolve` returned."""
    if isinstance(target, str):
        torch.ops.fp8attn.append(k, v, *flatten_pages(pages), *options, target)
    else:
        target.append(pages, k, v, options)


def run_attention(
    target: Target, q: torch.Tensor, pages: KVPages, params: AttentionParams, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`attention` with checked arguments, by what `resolve` returned. Without `params.return_lse`, the LSE is
    unspecified.
    """
    if isinstance(target, str):
        result, lse = torch.ops.fp8attn.attention(q, *flatten_pages(pages), *params, target)
        return result if out is None else out.copy_(result), lse
    # Kernels write 16 bytes at a time. Outside of inference mode, torch does not write to tensors of this mode.
    if out is None or (not out.data_ptr() & 15 and (not out.is_inference() or torch.is_inference_mode_enabled())):
        return target.attention(q, pages, params, out)
    result, lse = target.attention(q, pages, params)
    with torch.inference_mode():
        return out.copy_(result), lse


def check_append(
    spec: PageSpec, num_kv_heads: int, device: torch.device, k: torch.Tensor, v: torch.Tensor, backend: BackendName
) -> Target:
    """Make all checks of an append to pages of `spec` that need no lengths, and return what serves it."""
    check_tokens(k, "k", device)
    if not isinstance(v, torch.Tensor):
        check_is_tensor(v, "v", "[T, heads, head_dim]")
    k_dim, v_dim = spec.widths
    if k.shape[1:] != (num_kv_heads, k_dim) or v.shape != (k.shape[0], num_kv_heads, v_dim) or k.dtype != v.dtype:
        heads = num_kv_heads
        wanted = f"k and v must both be [T, {heads}, {k_dim}] and have"
        if spec.v_in_k:
            wanted = f"k and v must be a latent [T, {heads}, {k_dim}] and its key with RoPE [T, {heads}, {v_dim}] of"
        raise ValueError(f"{wanted} one dtype; got {tuple(k.shape)} {k.dtype} and {tuple(v.shape)} {v.dtype}")
    check_tokens(v, "v", device)
    check_derivatives(k, v)
    return resolve(backend, k, spec.name)


def check_queries(q: torch.Tensor, pages: KVPages) -> None:
    """Raise ValueError unless attention over `pages` takes the shape and the device of `q`, RuntimeError if `q`
    requires a gradient.
    """
    if isinstance(q, torch.Tensor) and q.dim() == 4:
        raise ValueError(
            f"q must be [T, num_q_heads, head_dim]; got four dimensions {tuple(q.shape)}: pass q.transpose(1, "
            f"2).flatten(0, 1) if q is [B, num_q_heads, S, head_dim], q.flatten(0, 1) if it is [B, S, num_q_heads, "
            f"head_dim]"
        )
    check_tokens(q, "q", pages.pool.device)
    check_derivatives(q)
    _, num_q_heads, q_dim = q.shape
    num_kv_heads, spec = pages.pool.shape[1], pages.format.spec
    if not num_q_heads or num_q_heads % num_kv_heads or q_dim != spec.k_dim:
        absorbed = f": over latents, {spec.v_dim} channels of the absorbed query and then those with RoPE"
        raise ValueError(
            f"q must be [T, num_q_heads, {spec.k_dim}] with num_q_heads a multiple of {num_kv_heads}; got "
            f"{tuple(q.shape)}{absorbed * spec.v_in_k}"
        )


def params_of(
    q: torch.Tensor, pages: KVPages, cu_seqlens_q: torch.Tensor | None, max_seqlen_q: int, options: AttentionArguments
) -> AttentionParams:
    """The options of `attention`, checked. `cu_seqlens_q` and `max_seqlen_q` are right already.

    Raises:
        ValueError: an option does not fit `q` or `pages`; the message says what would.
    """
    causal, softmax_scale, window, softcap, sinks, leftpad_k, return_lse, exact, batch_invariant = options
    if not type(causal) is type(return_lse) is type(exact) is type(batch_invariant) is bool:
        check_flags(causal=causal, return_lse=return_lse, exact=exact, batch_invariant=batch_invariant)
    if window is not None and (not causal or not is_whole(window) or not 1 <= window <= MOST_WINDOW):
        raise ValueError(
            f"window must be an integer from 1 to {MOST_WINDOW:,}, the number of keys that a query sees, and needs "
            f"causal=True; got {window=}, {causal=}"
        )
    if softcap is not None:
        if unobserved(q):
            check_number(softcap, "softcap", " > 0 (None for no cap)")
        if softcap <= 0:
            raise ValueError(f"softcap must be positive (None for no cap); got {softcap}")
    if pages.format.spec.v_in_k:
        if softmax_scale is None:
            raise UsageError(
                "softmax_scale has no default over latents, because it depends on the expanded keys: pass 1 / sqrt of "
                "their channels (qk_nope_head_dim + qk_rope_head_dim), times what the model's RoPE scaling adds"
            )
        if softcap is not None or sinks is not None:
            raise UsageError("attention over latents has no softcap and no sinks: leave them out")
    if softmax_scale is None:
        softmax_scale = 1 / math.sqrt(q.shape[2])
    elif unobserved(q):
        check_number(softmax_scale, "softmax_scale", " (None for 1 / sqrt(head_dim))")
    if sinks is not None:
        check_tensor(sinks, "sinks, one logit per query head,", (q.shape[1],), None, q.device)
    if leftpad_k is not None:
        check_tensor(leftpad_k, "leftpad_k, one count per sequence,", (pages.num_seqs,), torch.int32, q.device)
    return AttentionParams(
        cu_seqlens_q, max_seqlen_q, causal, softmax_scale, window or 0, softcap or 0.0, sinks, leftpad_k, return_lse,
        exact, batch_invariant,
    )  # fmt: skip


def _no_pages(value: object, call: str) -> TypeError:
    return TypeError(
        f"{call} takes KVPages, and got {type(value).__name__}: for a PagedKVCache pass cache.pages(layer), or call "
        f"its own append and attention"
    )


def _check_out(out: torch.Tensor, q: torch.Tensor, pages: KVPages) -> None:
    """Raise ValueError if attention of `q` over `pages` cannot be written into `out`."""
    check_tensor(out, "out", (*q.shape[:-1], pages.spec.v_dim), q.dtype, q.device)
    check_derivatives(out)
    # The spans cost some microseconds, and most outputs have memory of their own.
    if unobserved(q) and out.untyped_storage().data_ptr() == q.untyped_storage().data_ptr():
        (out_first, out_end), (q_first, q_end) = _span(out), _span(q)
        if out_first < q_end and q_first < out_end:
            raise ValueError(
                "out shares memory with q, which kernels still read while they write out: pass other memory"
            )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The addresses of a tensor's first byte and of the byte after its last; equal for a tensor without memory."""
    first = x.data_ptr()
    last = sum([(size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)])
    return first, first + (last + 1) * x.itemsize if first else 0


def _longest(
    x: torch.Tensor,
    pages: KVPages,
    cu_seqlens: torch.Tensor | None,
    max_seqlen: int | None,
    cu_name: str,
    max_name: str,
) -> int:
    """The largest number of new tokens of a sequence. Without `cu_seqlens`, all sequences have this number."""
    if cu_seqlens is not None:
        if max_seqlen is None:
            raise ValueError(
                f"{cu_name} needs {max_name}, the largest number of tokens of a sequence, as a Python int; got none"
            )
        if (type(max_seqlen) is not int and not is_whole(max_seqlen)) or not 0 <= max_seqlen <= LARGEST:
            raise ValueError(
                f"{max_name} must be a Python int >= 0, because the host sizes launches by it; got {max_seqlen!r}"
            )
        check_tensor(cu_seqlens, cu_name, (pages.num_seqs + 1,), torch.int32, x.device)
        return max_seqlen
    tokens, num_seqs = x.shape[0], pages.page_table.shape[0]
    if not tokens:
        return 0
    if not num_seqs or tokens % num_seqs:
        raise ValueError(
            f"{tokens} tokens cannot be divided evenly among {num_seqs} sequences; give {cu_name} and {max_name}"
        )
    each = tokens // num_seqs
    if max_seqlen is not None and max_seqlen != each:
        raise ValueError(
            f"without {cu_name} every sequence has {each} tokens, and {max_name} is {max_seqlen}: give both or neither"
        )
    return each
