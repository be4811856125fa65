"""Attention of a few query tokens over the cache, on Hopper: bound by memory, and exact.

The arithmetic is 16-bit with FP32 accumulation, all of it on the tensor cores, and the operands stand the other way round from what is
usual: a tile's tokens (then V's channels) are the MMA's 16 rows, and the query rows (query tokens x GQA group) its 8 columns. So eight
query rows cost nothing in padding, and the accumulator of a warp is `[head_dim, 8]`.

    S^T [tokens, rows] = K [tokens, d] Q^T [d, rows]        O^T [d, rows] += V [d, tokens] P^T [tokens, rows]

Each of four warps owns 32 of a page's 128 tokens, with its own running maximum, sum and output, so the loop has no exchange between
warps. E4M3 becomes FP16 in registers. INT8 keys stay as they are: the queries are rounded to 16-bit integers, each row with its own scale,
and the two bytes of these are multiplied apart and summed exactly in INT32, with no conversion of K at all. V is transposed and in
`V_ORDER`: four bytes of a channel are the four tokens that one thread's A fragment wants. P^T's fragments are the scores' accumulators
transposed 8x8, which `movmatrix` does.

Work is cut flat over (sequence, head, page): every CTA finds its range from `cache_seqlens` by itself. A head that several ranges share
is combined, in order, by the last of them to finish.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from ...layout import KVPages
from ..devices import DEFAULT, Chip, chip
from ..launch import Constants, Counters, constants, launch, num_sms
from ..pages import tiles
from .kernel import decode
from .queries import LOG2E

WARPS = 4  # that consume; the producer's warp counts as four more, for warps are given registers by fours
MAX_ROWS = 128  # query tokens x GQA group that this kernel is meant for


@dataclass(frozen=True)
class Config:
    """What is compiled into the kernel."""

    D: int  # head_dim
    WIDTH: int  # head_dim, padded to a power of two
    GROUP: int  # query heads of a KV head
    ROWS: int  # query rows of a tile
    USED: int  # of them, those that exist, padded to a power of two
    TILES: int  # row tiles of a KV head
    STAGES: int  # pages in shared memory
    BLOCK: int  # sequences that a CTA looks at side by side
    CAUSAL: bool
    RAGGED: bool
    WINDOW: bool
    SOFTCAP: bool
    SINKS: bool
    LEFTPAD: bool
    ROTATE: bool
    MIN_PAGES: int  # of a range
    WHOLE_PAGES: int  # of a head that is not shared between ranges
    EARLY_V: bool  # V is in registers before the scores are computed, if there are registers enough


@dataclass(frozen=True)
class Launch:
    """How the kernel is laid out for one shape of problem: everything that is compiled in, and the number of CTAs."""

    head_dim: int
    group: int
    max_rows: int  # query tokens x group of the longest sequence
    num_seqs: int
    causal: bool = False  # among the query tokens
    ragged: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    leftpad: bool = False
    rotate: bool = False  # the queries, as the keys are
    chip: Chip = DEFAULT

    @property
    def width(self) -> int:
        return 1 << (self.head_dim - 1).bit_length()

    @property
    def rows(self) -> int:
        return 8 if self.max_rows <= 8 else 16

    @property
    def tiles(self) -> int:
        return -(-self.max_rows // self.rows)

    @property
    def stages(self) -> int:
        most = 2 if self.width == 256 and self.rows > 8 else 4  # that there is shared memory for
        return min(self.chip.decode_stages[self.width], most)

    def workers(self, num_sms: int, heads: int) -> int:
        """Ranges that the work of one row tile is cut into: one an SM, or two if there are heads enough for all; or a few less, if then
        sequences of one length are cut alike. (Two are faster by 1% where no head is shared; else one is, with half the parts.)"""
        for ctas in range(self.chip.decode_ctas[self.width], 0, -1):
            most = max(1, ctas * num_sms // self.tiles)
            even = [n for n in range(most - most // 16, most + 1) if n % heads == 0 or heads % n == 0]
            workers = max(even, key=lambda n: n & -n) if even else max(most // 32 * 32, min(most, 32))
            if workers <= heads:
                break
        return workers

    def config(self) -> Config:
        return Config(
            D=self.head_dim, WIDTH=self.width, GROUP=self.group, ROWS=self.rows, TILES=self.tiles, STAGES=self.stages,
            USED=min(self.rows, 1 << (self.max_rows - 1).bit_length()), BLOCK=32 if self.num_seqs <= 32 else 128, CAUSAL=self.causal,
            RAGGED=self.ragged, WINDOW=self.window, SOFTCAP=self.softcap, SINKS=self.sinks, LEFTPAD=self.leftpad, ROTATE=self.rotate,
            MIN_PAGES=self.chip.decode_min_pages, WHOLE_PAGES=self.chip.decode_whole_pages, EARLY_V=self.width * self.rows <= 2048,
        )  # fmt: skip

    def options(self) -> dict[str, int]:
        """Under warp specialization every register must be spoken for, so `maxnreg` is the SM's 65536 over all its threads."""
        return {"num_warps": WARPS, "maxnreg": min(65536 // (self.chip.decode_ctas[self.width] * 2 * WARPS * 32), 248)}


class Plan(NamedTuple):
    """What the host works out of a problem's shape, once."""

    workers: int
    grid: tuple[int]
    counters: Counters  # one for each range of each row tile
    plane: int  # rows of partial results: two a range at most, of a head that began before it and of one that ends after it
    width: int
    constants: Constants


@lru_cache(maxsize=4096)
def plan(device: torch.device, heads: int, *shape) -> Plan:
    """The plan for `Launch(*shape)` and `heads` heads of all sequences together."""
    how = Launch(*shape, chip=chip(device))
    workers = how.workers(num_sms(device), heads)
    given = constants("decode", device, config=how.config(), **how.options())
    return Plan(workers, (workers * how.tiles,), Counters(workers * how.tiles), 2 * workers * how.tiles * how.rows, how.width, given)


def unsupported_reason(q: torch.Tensor, pages: KVPages, max_seqlen_q: int) -> str | None:
    """Why this kernel does not take these queries; None if it does."""
    group = q.shape[-2] // pages.num_kv_heads
    if max_seqlen_q * group > MAX_ROWS:
        return f"{max_seqlen_q} query tokens x {group} heads of a group are more than the {MAX_ROWS} rows that decoding is made for"
    return None


def attention(
    q: torch.Tensor,
    pages: KVPages,
    *,
    cu_seqlens_q: torch.Tensor | None,
    max_seqlen_q: int,
    causal: bool,
    softmax_scale: float,
    window: int,
    softcap: float,
    sinks: torch.Tensor | None,
    leftpad_k: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`reference.attention` for up to 128 rows (query tokens x GQA group) a sequence: one launch, nothing read back to the host."""
    device = q.device
    num_tokens, num_q_heads, head_dim = q.shape
    num_pages, heads, num_seqs = pages.num_pages, pages.num_kv_heads, pages.num_seqs
    out = torch.empty(num_tokens, num_q_heads, head_dim, dtype=q.dtype, device=device)
    lse = torch.empty(num_tokens, num_q_heads, dtype=torch.float32, device=device)
    if not num_tokens or not num_pages or not pages.page_table.shape[1]:
        return out.zero_(), lse.copy_(sinks if sinks is not None else torch.tensor(float("-inf")))
    group = num_q_heads // heads
    workers, grid, counters, plane, width, given = plan(
        device, heads * num_seqs, head_dim, group, max_seqlen_q * group, num_seqs, causal and max_seqlen_q > 1, cu_seqlens_q is not None,
        window > 0, softcap > 0, sinks is not None, leftpad_k is not None, pages.rotate_keys,
    )  # fmt: skip
    parts = torch.empty(plane * (width + 3), dtype=torch.float32, device=device)
    table, lengths = pages.page_table, pages.cache_seqlens
    stride_t, stride_h, _ = q.stride()
    args = (
        q, stride_t, stride_h,
        *tiles(pages, width, width),
        pages.pool, pages.k_mean, pages.v_mean, table, table.stride(0), lengths,
        # The lengths stand in for what is not given and not read.
        lengths if cu_seqlens_q is None else cu_seqlens_q, lengths if leftpad_k is None else leftpad_k, lengths if sinks is None else sinks,
        out, lse, parts, plane, counters, num_seqs, heads, max_seqlen_q, num_tokens, window, workers,
        float(softmax_scale), softcap * LOG2E.value,
    )  # fmt: skip
    launch(decode, grid, args, given)
    return out, lse
