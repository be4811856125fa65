"""The calls that a layer makes: the grid of prompts, chunks, steps and batches whose launches `warmup` records."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..backends import load
from ..errors import UsageError
from ..formats.codec import DEFAULT_KEY_DTYPE, KeyDtype
from ..formats.kv_format import KVFormat
from ..formats.page_layout import PAGE_SIZE
from ..formats.spec import PageSpec
from ..pages import KVPages
from ..params import LONG, MOST_DENSE, Append, AttentionOption, AttentionParams, BackendName

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

# The grid: new tokens of a sequence, sequences, and pages before the new tokens. `calls_of` combines them.
STEPS = range(1, 17)
PROMPTS = (
    17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 193, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288,
    16384, 24576, 32768,
)  # fmt: skip
BATCHES = 1, 2, 4, 8, 64
BEFORE = 0, 8, 64, 512
MOST = 1 << 17  # new tokens of a call
WINDOWS = 128, 1024, 4096  # tokens


@dataclass(frozen=True)
class Layer:
    """The properties of an attention layer and its cache that determine the kernels.

    Attributes:
        head_dim: or a spec of latents, of an engine's layer.
        dtype: the dtype of queries, keys and values: bfloat16 or float16.
        backend: `"hopper"` or `"triton"`.
        key_dtype, rotate_keys: as `PagedKVCache` takes them.
        advance: whether appends advance the lengths, as `fp8attn.append` takes it. An engine keeps them itself: its
            calls are causal and without padding, and have the bounds of sequences, but for one token of each and for
            prompts of one length that is above `LONG`.
        attention: what its attention has (`params.options_of`).
        longest: the most new tokens of a sequence for which attention is called. vLLM expands latents for longer ones.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int | PageSpec
    dtype: torch.dtype = torch.bfloat16
    backend: BackendName = "hopper"
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE
    rotate_keys: bool = True
    k_mean: bool = False
    v_mean: bool = False
    static_scales: bool = False
    advance: bool = True
    attention: frozenset[AttentionOption] = frozenset()
    longest: int = MOST

    def __post_init__(self) -> None:
        if (refusal := PageSpec.of(self.head_dim, self.key_dtype).refusal) is not None:
            raise UsageError(refusal)
        if self.num_kv_heads < 1 or self.num_q_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise UsageError(
                f"num_q_heads must be a multiple of num_kv_heads; got {self.num_q_heads}, {self.num_kv_heads}"
            )

    @property
    def spec(self) -> PageSpec:
        """What its pages hold."""
        return PageSpec.of(self.head_dim, self.key_dtype)


def calls_of(layer: Layer) -> Iterator[Callable[[], None]]:
    """The layer's calls of the grid, on the machine of `plan_for`."""
    # With few rows, the kernel depends on the exact number of tokens and on whether there are many sequences, but not
    # on the pages. Nor do those over latents.
    most_few, latents = 0, layer.spec.v_in_k
    if layer.backend == "hopper" and "batch_invariant" not in layer.attention and not latents:
        from ..kernels.decode import MAX_ROWS

        most_few = MAX_ROWS * layer.num_kv_heads // layer.num_q_heads
    # Dense calls have no softcap, sinks, calibrated scales, means or head_dim above 256, and an engine that keeps the
    # lengths has none.
    has_dense_calls = layer.advance and not layer.static_scales and layer.spec.k_dim <= MOST_DENSE
    has_dense_calls = has_dense_calls and not layer.attention & {"softcap", "sinks"}
    dense = replace(layer, k_mean=False, v_mean=False)
    for tokens in sorted({*STEPS, *range(1, most_few + 1), *PROMPTS}):
        few = tokens <= most_few
        for batch in _batches(layer, tokens, few):
            if batch * tokens > MOST or tokens > layer.longest:
                break
            for before in BEFORE[:1] if few or latents else BEFORE:
                if layer.advance:
                    yield partial(attend, layer, batch, tokens, before, leftpad=True)
                if layer.advance or not 1 < tokens <= LONG:
                    yield partial(attend, layer, batch, tokens, before)
                for ragged in {batch * tokens, tokens + batch - 1}:
                    yield partial(attend, layer, batch, tokens, before, ragged=ragged)
            if layer.advance and (not few or tokens == 1):
                yield partial(attend, layer, batch, tokens, 0, causal=False)
            for causal in (True, False) if has_dense_calls else ():
                yield partial(attend_new, dense, batch, tokens, causal)
        for ragged in (False, True) if layer.advance or not 1 < tokens <= LONG else (True,):
            yield partial(append, layer, tokens, ragged)
        if has_dense_calls:
            yield partial(from_dense, dense, tokens)
    # Few points of the grid combine parts of the keys, and the number of parts varies. Each of these kernels compiles
    # in 0.5 s.
    for splits in (1 << bits for bits in range(1, 8)):
        for tokens in (1, 1024):
            yield partial(_combine, layer, splits, tokens)


def _batches(layer: Layer, tokens: int, few: bool) -> tuple[int, ...]:
    """Numbers of sequences of `tokens` new tokens. `few`: one kernel serves all that are more than one."""
    if not layer.spec.v_in_k or layer.backend != "hopper":
        return (BATCHES[0], BATCHES[-1]) if few else BATCHES
    from ..kernels.latent.hopper.plan import batches_of_variants

    heads, spec = layer.num_kv_heads, layer.spec
    pool = 1, heads, spec.layout.nbytes
    return batches_of_variants(torch.device("meta"), pool, spec, layer.num_q_heads // heads, tokens)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _pages(layer: Layer, batch: int, columns: int) -> KVPages:
    format = _format(layer)
    pool = _empty(batch * columns, layer.num_kv_heads, format.layout.nbytes, dtype=torch.uint8)
    # `append` adds to the lengths, and torch's `diff` on "meta" takes seconds to import.
    lengths = torch.zeros(batch, dtype=torch.int32)
    return KVPages.trusted(pool, _empty(batch, columns, dtype=torch.int32), lengths, format)


def _format(layer: Layer) -> KVFormat:
    mean = _empty(layer.num_kv_heads, layer.spec.k_dim, dtype=torch.float32)
    means = mean if layer.k_mean else None, mean if layer.v_mean else None
    return KVFormat(layer.spec.name, layer.rotate_keys, *means)


def attend(
    layer: Layer, batch: int, tokens: int, before: int, *, leftpad: bool = False, ragged: int = 0, causal: bool = True
) -> None:
    """Attention of `tokens` new tokens of each sequence (of `ragged` tokens in all, if it is not 0) to a cache with
    `before` older pages.
    """
    options = layer.attention
    q = _empty(ragged or batch * tokens, layer.num_q_heads, layer.spec.k_dim, dtype=layer.dtype)
    for window in WINDOWS if "window" in options and causal else (0,):
        params = AttentionParams(
            cu_seqlens_q=_empty(batch + 1, dtype=torch.int32) if ragged else None,
            max_seqlen_q=tokens,
            causal=causal,
            softmax_scale=1.0,
            window=window,
            softcap=30.0 if "softcap" in options else 0.0,
            sinks=_empty(layer.num_q_heads, dtype=layer.dtype) if "sinks" in options else None,
            leftpad_k=_empty(batch, dtype=torch.int32) if leftpad else None,
            exact="exact" in options,
            batch_invariant="batch_invariant" in options,
        )
        load(layer.backend).attention(q, _pages(layer, batch, -(-tokens // PAGE_SIZE) + before), params)


def attend_new(layer: Layer, batch: int, tokens: int, causal: bool, keys: int = 0) -> None:
    """Attention of a dense call, over pages that it has just written. `keys`: their tokens, if it is not as many as
    queries.
    """
    q = _empty(batch, tokens, layer.num_q_heads, layer.spec.k_dim, dtype=layer.dtype)
    pages = _pages(layer, batch, -(-(keys or tokens) // PAGE_SIZE))
    load(layer.backend).attention(q, pages, AttentionParams(None, tokens, causal, 1.0), new_keys=keys or tokens)


def append(layer: Layer, tokens: int, ragged: bool) -> None:
    """Append to a cache of two sequences that has tokens."""
    k, v = (_empty(2 * tokens, layer.num_kv_heads, width, dtype=layer.dtype) for width in layer.spec.widths)
    load(layer.backend).append(
        _pages(layer, 2, -(-tokens // PAGE_SIZE) + 1), k, v,
        Append(
            cu_seqlens=torch.zeros(3, dtype=torch.int32) if ragged else None, max_seqlen=tokens,
            static_scales=layer.static_scales,
            advance=layer.advance,
        ),
    )  # fmt: skip


def from_dense(layer: Layer, tokens: int) -> None:
    """Quantize the keys of a dense call."""
    x = _empty(2, layer.num_kv_heads, tokens, layer.spec.k_dim, dtype=layer.dtype)
    load(layer.backend).from_dense(x, x, _format(layer))


def _combine(layer: Layer, splits: int, tokens: int) -> None:
    """Combine attention over parts of the keys."""
    from ..kernels.combine import combine

    rows = tokens * layer.num_q_heads
    # `prefill` passes sinks in float32, the portable kernels in their own dtype.
    sinks = _empty(layer.num_q_heads, dtype=torch.float32 if layer.backend == "hopper" else layer.dtype)
    combine(
        _empty(splits, rows, layer.spec.v_dim, dtype=torch.float32), _empty(2, splits, rows, dtype=torch.float32),
        sinks if "sinks" in layer.attention else None, _empty(tokens, layer.num_q_heads, layer.spec.v_dim,
        dtype=layer.dtype),
        _empty(tokens, layer.num_q_heads, dtype=torch.float32), _pages(layer, 1, 1) if layer.spec.v_in_k else None,
    )  # fmt: skip
