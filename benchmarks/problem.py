"""An attention problem, the cache that holds its K and V, and our kernels called on it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch

from fp8attn import AttentionParams, KVPages, ops
from fp8attn.formats.codec import CODECS, DEFAULT_KEY_DTYPE, FP8
from fp8attn.formats.page_layout import PAGE_SIZE

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # "meta" in a dry run (`dry`)
POISON = 0x7F  # NaN in E4M3, the largest number in INT8
# Our implementations with 16-bit queries, and their keys: `fp8attn` is the default, and the other is named after its
# keys.
KEYS = {"fp8attn": DEFAULT_KEY_DTYPE} | {f"fp8attn-{name}-keys": name for name in CODECS if name != DEFAULT_KEY_DTYPE}
K = 1024


@dataclass(frozen=True)
class Shape:
    """Lengths of the sequences, heads, head_dim. Causal is aligned to the end: the last query sees the last key."""

    keys: tuple[int, ...]
    queries: tuple[int, ...]
    q_heads: int
    kv_heads: int
    dim: int
    causal: bool

    @property
    def uniform(self) -> bool:
        return len(set(self.keys)) == 1 and len(set(self.queries)) == 1

    @property
    def softmax_scale(self) -> float:
        return self.dim**-0.5

    @property
    def flops(self) -> float:
        """`4 * head_dim` per head, query and visible key, as usual: half of all pairs in a causal square."""
        pairs = sum(n * k - (n * n / 2 if self.causal else 0) for n, k in zip(self.queries, self.keys, strict=True))
        return 4.0 * self.q_heads * self.dim * pairs

    @property
    def kv_elements(self) -> int:
        return 2 * sum(self.keys) * self.kv_heads * self.dim

    def rows(self, seq: int) -> slice:
        """The indices of a sequence's queries."""
        return slice(sum(self.queries[:seq]), sum(self.queries[: seq + 1]))

    def split(self, *xs: torch.Tensor) -> Callable[[int], tuple[torch.Tensor, ...]]:
        """What gives the keys of a sequence in each of `xs`, whose rows are the keys of all sequences."""
        return lambda seq: tuple(x[sum(self.keys[:seq]) : sum(self.keys[: seq + 1])] for x in xs)

    def last_key(self, seq: int, queries: torch.Tensor) -> torch.Tensor | None:
        """The last key that each of some queries of a sequence sees. None: they see all keys."""
        return self.keys[seq] - self.queries[seq] + queries if self.causal else None

    def inputs(
        self, mean: float = 0.0, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q `[T, num_q_heads, head_dim]`, k and v `[tokens, num_kv_heads, head_dim]`, V of that mean."""
        torch.manual_seed(0)
        heads = (self.queries, self.q_heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads)
        q, k, v = (torch.randn(sum(lengths), count, self.dim, device=DEVICE).to(dtype) for lengths, count in heads)
        return q, k, v + mean


def square(dim: int, causal: bool, *lengths: int, q_heads: int = 0, kv_heads: int = 0) -> Shape:
    """A problem of prompts, with as many queries as keys. Without `heads`, there are 2048 / dim."""
    return Shape(lengths, lengths, q_heads or 2048 // dim, kv_heads or q_heads or 2048 // dim, dim, causal)


def steps(*lengths: int, kv_heads: int = 8, group: int = 4, dim: int = 128, queries: int = 1) -> Shape:
    """A problem of decode steps: the queries are the last tokens of sequences in a cache."""
    return Shape(lengths, (queries,) * len(lengths), kv_heads * group, kv_heads, dim, True)


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.bfloat16)


@lru_cache
def offsets(lengths: tuple[int, ...]) -> torch.Tensor:
    """The first index of each sequence, `[len(lengths) + 1]` int32. It is kept, because a CUDA graph cannot copy it
    from the host.
    """
    return torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int()


@dataclass(frozen=True)
class Run:
    """A call of one implementation of a problem, and the tensors that it gets."""

    call: Callable[[], torch.Tensor]  # gives `[T, num_q_heads, head_dim]`
    q: torch.Tensor  # `[T, num_q_heads, head_dim]`, or what gives its rows by their indices
    held: Callable[[int], tuple[torch.Tensor, ...]]  # K and V of a sequence, `[keys, num_kv_heads, head_dim]`
    unit: float = 1.0  # the output times this is attention


def hold(
    shape: Shape, k: torch.Tensor, v: torch.Tensor, *, key_dtype=DEFAULT_KEY_DTYPE, rotate_keys=True, spare=3
) -> KVPages:
    """A cache that `append` has filled with `k` and `v [tokens, num_kv_heads, head_dim]`, in shuffled pages.

    Bytes that no kernel may read are poison: `POISON` in the `spare` pages that no sequence holds and in K behind a
    sequence's end, NaN in the scales of those pages.
    """
    counts = [-(-n // PAGE_SIZE) for n in shape.keys]
    pages = KVPages.empty(
        sum(counts) + spare, shape.kv_heads, shape.dim, len(counts), max(*counts, 1), DEVICE, key_dtype=key_dtype,
        rotate_keys=rotate_keys,
    )  # fmt: skip
    order = torch.randperm(pages.num_pages, device=DEVICE)
    held = order[: sum(counts)]
    pages.pool.fill_(POISON)
    pages.v.view(torch.uint8)[held] = 0  # as a cache hands out pages
    for scale in (pages.k_scale, pages.v_scale):
        scale.fill_(torch.nan)
    pages.page_table[:] = order[-1]
    for seq, ids in enumerate(held.int().split(counts)):
        pages.page_table[seq, : counts[seq]] = ids
    ops.append(pages, k, v, cu_seqlens=offsets(shape.keys), max_seqlen=max(shape.keys))
    return pages


def given(
    impl: str, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options
) -> tuple[torch.Tensor, KVPages]:
    """The queries and the cache of one of our implementations. `fp8attn-q8` has FP8 queries, and E4M3 keys that are not
    rotated, as the peers have. The implementations of `KEYS` have `q` unchanged."""
    if impl == "fp8attn-q8":
        return q.to(FP8), hold(shape, k, v, key_dtype="e4m3", rotate_keys=False, **options)
    return q, hold(shape, k, v, key_dtype=KEYS.get(impl, DEFAULT_KEY_DTYPE), **options)


def ours(attention: Callable, shape: Shape, q: torch.Tensor, pages: KVPages) -> Callable[[], torch.Tensor]:
    """A call of one of our kernels, such as `kernels.prefill.prefill_attention`. It returns
    `[T, num_q_heads, head_dim]`.
    """
    equal = len(set(shape.queries)) == 1
    params = AttentionParams(
        None if equal else offsets(shape.queries),
        max(shape.queries),
        shape.causal,
        shape.softmax_scale,
        return_lse=True,
    )
    return lambda: attention(q, pages, params)[0]


def own(
    attention: Callable,
    impls: Iterable[str],
    shape: Shape,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    **options,
) -> dict[str, Run]:
    """Our implementations of a problem with one of our kernels, each with its own cache. Options go to `hold`."""
    found = {}
    for impl in impls:
        queries, pages = given(impl, shape, q, k, v, **options)
        held = lambda seq, pages=pages: pages.read(seq, shape.keys[seq], torch.float64)  # noqa: E731
        found[impl] = Run(ours(attention, shape, queries, pages), queries, held)
    return found
