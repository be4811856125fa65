"""Times of writes to the cache: a decode step's append, a prompt's append, and `fp8attn.from_dense`, beside a kernel
that only reads and writes.

`fp8attn` writes keys of the default format, `fp8attn-e4m3-keys` (or `-int8-keys`) of the other; both rotate them.

8 KV heads of 128 (`quantize`: 32), CUDA graphs, the L2 cache flushed before every run. What is written is checked
before it is timed: an append's bytes are the reference's. `gbps` counts what must be read and written: two bytes read
and one written for each element of K and V. `ceiling` reads and writes as many bytes: it converts BF16 to E4M3, element
by element.

A step is all of a decode step's append: `ms` is what it adds to a graph in which kernels read as much as
attention does (`measure.between_reads`). Alone after a flush, which leaves the cache full of dirty lines, it takes
longer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl

import fp8attn
from fp8attn import KVPages, params, reference
from fp8attn.formats.codec import FP8
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.kernels import append
from fp8attn.kernels.launch import launch, make_constants
from fp8attn.numerics import relative_error

from .measure import between_reads, graph_of, interleaved
from .problem import DEVICE, KEYS, randn

HEADS, DIM = 8, 128
STEPS = 1024  # that a sequence has pages for
BLOCK = 4096  # elements of one program of the ceiling
FP8_ERROR = 0.03  # 2.6% is E4M3's, and INT8's is less
ROUNDS = 21


class Prepared(NamedTuple):
    """A case with its own tensors: our calls by implementation, and the bytes that each call moves.

    `check` raises if a call writes wrong bytes. `restart` drops the tokens that steps have appended.
    """

    calls: dict[str, Callable]
    bytes: int
    check: Callable[[], None]
    restart: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Append:
    """Appends new tokens at the ends of sequences."""

    batch: int
    new: int  # tokens of each sequence
    held: int = 0  # tokens that are there

    def prepare(self) -> Prepared:
        step, count = self.new == 1, self.batch * self.new
        columns = -(-(self.held + (STEPS if step else self.new)) // PAGE_SIZE)
        num_pages = self.batch * columns
        lengths = torch.zeros(
            len(KEYS), self.batch, dtype=torch.int32, device=DEVICE
        )  # of all caches: one launch sets them back
        caches = {}
        for (impl, name), row in zip(KEYS.items(), lengths, strict=True):
            pages = KVPages.empty(num_pages, HEADS, DIM, self.batch, columns, DEVICE, key_dtype=name)
            caches[impl] = replace(pages, cache_seqlens=row)
        before = [randn(self.batch * self.held, HEADS, DIM) for _ in "kv"]
        for pages in caches.values():
            pages.page_table.copy_(torch.randperm(num_pages, device=DEVICE).view(self.batch, columns))
            append.append(pages, *before, params.Append(None, self.held))
        k, v = (randn(count, HEADS, DIM) for _ in "kv")
        how = params.Append(None, self.new)

        def check() -> None:
            restart()
            for impl, pages in caches.items():
                expected = copy.deepcopy(pages)
                append.append(pages, k, v, how)
                reference.append(expected, k, v, how)
                assert torch.equal(pages.pool, expected.pool), f"{self}, {impl}: bytes are not the reference's"

        def restart() -> None:
            lengths.fill_(self.held)

        nbytes = count * 2 * HEADS * DIM * 3

        def write(impl: str) -> None:
            if not step:  # a step has pages for every repetition
                restart()
            append.append(caches[impl], k, v, how)

        calls = {impl: partial(write, impl) for impl in caches}
        return Prepared(calls, nbytes, check, restart)


@dataclass(frozen=True)
class Quantize:
    """Quantizes K and V of a prompt, `[1, H, S, D]`, contiguous or transposed from `[1, S, H, D]`."""

    length: int
    heads: int = 32
    transposed: bool = False

    def prepare(self) -> Prepared:
        k, v = (randn(1, self.length, self.heads, DIM).transpose(1, 2) for _ in "kv")
        if not self.transposed:
            k, v = k.contiguous(), v.contiguous()
        calls = {impl: partial(fp8attn.from_dense, k, v, key_dtype=name) for impl, name in KEYS.items()}

        def check() -> None:
            for call in calls.values():
                for x, y in zip(call().read(0, self.length), (k, v), strict=True):
                    assert (error := relative_error(x, y[0].transpose(0, 1))) < FP8_ERROR, f"{self}: {error:.1%} off"

        return Prepared(calls, 3 * (k.numel() + v.numel()), check)


CASES: dict[str, Append | Quantize] = {
    **{f"step-B{batch}": Append(batch, 1, 1000) for batch in (1, 64, 256)},
    "prompt-B1-S65536": Append(1, 65536), "prompt-B8-S4096": Append(8, 4096, 100),
    **{f"quantize-S{length}": Quantize(length) for length in (4096, 16384, 65536, 131072)},
    "quantize-S16384-transposed": Quantize(16384, transposed=True), "gqa-quantize-S16384": Quantize(16384, 8),
}  # fmt: skip


@triton.jit
def _cast(x_ptr, y_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < count).to(y_ptr.dtype.element_ty), mask=i < count)


def ceiling(nbytes: int) -> Callable[[], None]:
    """Reads two thirds of `nbytes` and writes one third."""
    count = nbytes // (3 * BLOCK) * BLOCK  # whole blocks: of a count that is no multiple of 16, loads would be narrow
    source = torch.ones(count, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source, dtype=FP8)
    given = make_constants("cast", source.device, BLOCK=BLOCK, num_warps=4)
    return lambda: launch(_cast, (-(-len(source) // BLOCK),), (source, target, len(source)), given)


def calls(case: str) -> dict[str, Callable]:
    return CASES[case].prepare().calls


def ceilings(case: str) -> dict[str, Callable]:
    return {} if case.startswith("step") else {"ceiling": ceiling(CASES[case].prepare().bytes)}


@torch.inference_mode()
def measure(case: str) -> Iterator[dict]:
    torch.manual_seed(0)
    made = CASES[case].prepare()
    made.check()
    made.restart()
    if case.startswith("step"):
        for impl, call in made.calls.items():
            yield {"case": case, "impl": impl, "ms": round(between_reads(call, ROUNDS, before=made.restart), 5)}
        return
    read_and_write = ceiling(made.bytes)
    found = made.calls | {
        "ceiling": lambda: (made.restart(), read_and_write())
    }  # it too pays for the launch that sets the lengths back
    replays = {impl: graph_of(call)[0] for impl, call in found.items()}
    for impl, ms in interleaved(replays, ROUNDS, flush=True).items():
        yield {"case": case, "impl": impl, "ms": round(ms, 5), "gbps": round(made.bytes / ms * 1e-6, 1)}
