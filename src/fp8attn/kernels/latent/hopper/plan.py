"""The plan of a call, from what the host knows about a problem, and the compile-time options."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from ....formats.page_layout import PAGE_SIZE
from ....formats.rotation import MAX_BLOCK
from ....formats.spec import PageSpec
from ...common import power_of_two
from ...decode.plan import even_workers
from ...launch import Constants, ConstexprFields, make_constants, num_sms
from ...view import View

TILE = 64  # tokens of a tile: half a page
ROUNDED = 16  # rows of queries that a program rounds
MMA_ROWS = 64  # of a warpgroup's product: the digits of all rows
SCALE_BYTES = 4  # of a token, FP32
STAGES = (8, 4, 3, 2)  # tiles in shared memory: the first that fits
SHARED_MEMORY = 232448  # bytes of a CTA
SMALL = 2048  # bytes for numbers and barriers
# Queries and weights have two digits up to this number of heads of a KV head, and with fewer rows than that.
EXACT_HEADS, MANY = 32, 1024
# Tiles after which a row's unit grows in any case, with two digits: a sum of 2^17 tokens fits into INT32, whatever they
# are. A power of two.
MOST_TILES = 2048
# Registers of a thread that computes weights, by digits. Fewer in `accumulate` or here spill in a loop. Prompts spill
# with 104, and are 2 and 30% slower with 120 and 136.
SOFTMAX_REGISTERS = {1: 104, 2: 136}


@dataclass(frozen=True)
class LatentOptions(ConstexprFields):
    """The one constexpr parameter of each of the three kernels. The host makes it, and device code reads it."""

    rank: int  # channels of the latent, key and value of all heads
    rope: int  # channels of the key with RoPE
    rope_in_16_bits: bool  # else it is in codes
    heads: int  # KV heads of a page
    group: int  # query heads of each
    digits: int  # of queries and weights: INT8 operands, each of them rows of a product
    rows: int  # query rows (token, head) of a CTA
    stages: int  # tiles in shared memory
    block: int  # sequences whose lengths a CTA loads at once
    causal: bool  # among several query tokens
    ragged: bool  # the queries' bounds are given
    leftpad: bool  # sequences begin with padding
    softmax_registers: int  # of a thread that computes weights
    most_tiles: int  # `MOST_TILES`
    prompt: bool  # a CTA has a row tile of one KV head of a sequence; else a range of pages
    # For `decode.work`: its list has whole pages, without windows and places for beginnings and ends.
    tile: int = PAGE_SIZE
    window: bool = False
    whole_tiles: int = 0
    head_tiles: int = 0


@dataclass(frozen=True)
class LatentPlan:
    """The numbers that the host computes from a problem's shape, once."""

    options: LatentOptions
    row_tiles: int
    workers: int  # ranges of a row tile; in prompts one
    # Rows of partial results: one for each row of the output, from the range in which its sequence begins; then those
    # of each CTA, of the sequence that began before its range (none in prompts).
    parts: int
    numbers: int  # FP32: the LSE of parts, their units, the factors of quantized rows, the scores of the mean
    q: View
    q_rope: View
    codes: View
    rope: View
    scales: View
    round_grid: tuple[int]
    grid: tuple[int]
    combine_grid: tuple[int]
    round: Constants  # the three kernels' constants
    attend: Constants
    combine: Constants


@lru_cache(maxsize=4096)
def make_latent_plan(
    device: torch.device, pool: tuple[int, ...], spec: PageSpec, group: int, num_tokens: int, num_seqs: int,
    max_q: int, causal: bool, ragged: bool, leftpad: bool,
) -> LatentPlan:  # fmt: skip
    """The plan for a pool of shape `pool [pages, KV heads, bytes]` on `device`, and for `num_tokens` query tokens with
    `group` heads of each KV head, of `num_seqs` sequences, each of which has up to `max_q`."""
    num_pages, heads, nbytes = pool
    num_pages, places = num_pages * heads, num_seqs * heads
    rank, rope = spec.widths
    many = max_q * group >= MANY
    digits = 2 if group <= EXACT_HEADS and not many else 1
    rows = MMA_ROWS // digits
    row_tiles, sms = -(-max_q * group // rows), num_sms(device)
    prompt = many and row_tiles * places >= sms
    rope_bytes = 1 if spec.rope_in_codes else 2
    token = rank + rope_bytes * rope  # bytes of codes and RoPE, also of a row of quantized queries
    room = SHARED_MEMORY - SMALL - MMA_ROWS * token - 2 * MMA_ROWS * TILE  # less queries and weights
    options = LatentOptions(
        rank, rope, rope > 0 and not spec.rope_in_codes, heads, group, digits, rows,
        stages=next(n for n in STAGES if n * TILE * (token + SCALE_BYTES) <= room),
        block=32 if num_seqs <= 32 else 128, causal=causal and max_q > 1, ragged=ragged, leftpad=leftpad,
        softmax_registers=SOFTMAX_REGISTERS[digits], most_tiles=MOST_TILES, prompt=prompt,
    )  # fmt: skip
    workers = 1 if prompt else even_workers(sms // row_tiles, places)
    blocks, results = row_tiles * places, num_tokens * heads * group
    parts = results if prompt else results + row_tiles * workers * rows
    # Of a program of the last kernel: parts that it loads at once, as many as a row has if sequences have one length;
    # rows and channels, for many loads at a time in few registers.
    at_once = min(64, power_of_two(max(1, workers // places)))
    together, channels = (32, MAX_BLOCK) if at_once == 1 else (1, rank if at_once <= 16 else MAX_BLOCK)
    # With FP16 parts, 128 bytes a thread: programs of one warp meet at no barrier. (With FP32 parts it is slower.)
    combine_warps = max(1, at_once // 4) if digits == 1 and channels == rank else 4
    warps = rank // 64  # that accumulate; each has 64 channels of O^T
    threads = (warps + 4 + 4) * 32  # registers are given to four warps together
    return LatentPlan(
        options=options,
        row_tiles=row_tiles,
        workers=workers,
        parts=parts,
        numbers=2 * parts + blocks * rows + results,
        q=View((blocks * MMA_ROWS, rank), (rank, 1), (MMA_ROWS, rank)),  # a block for each row tile of each sequence
        q_rope=View((blocks * MMA_ROWS, rope), (rope, 1), (MMA_ROWS, rope)),
        codes=View((num_pages, PAGE_SIZE, rank), (nbytes, rank, 1), (1, TILE, rank), dtype=torch.int8),
        rope=View(
            (num_pages, PAGE_SIZE, rope), (nbytes // rope_bytes, rope, 1), (1, TILE, rope),
            dtype=torch.int8 if spec.rope_in_codes else torch.float16, offset=PAGE_SIZE * rank,
        ),
        scales=View(
            (num_pages, PAGE_SIZE), (nbytes // SCALE_BYTES, 1), (1, TILE),
            swizzled=False, dtype=torch.float32, offset=PAGE_SIZE * token,
        ),
        round_grid=(blocks * rows // ROUNDED,),
        grid=(blocks if prompt else row_tiles * workers,),
        combine_grid=(-(-results // together) * (rank // channels),),
        round=make_constants(
            "latent queries", device, OPTIONS=options, num_warps=rank // MAX_BLOCK, launch_pdl=True
        ),
        attend=make_constants(
            "latent", device, operands="unsigned" if digits == 1 else "none",
            OPTIONS=options, num_warps=warps, maxnreg=65536 // threads // 8 * 8, launch_pdl=True,
        ),
        combine=make_constants(
            "latent combine", device, OPTIONS=options, R=together, S=at_once, CHANNELS=channels,
            num_warps=combine_warps, launch_pdl=True,
        ),
    )  # fmt: skip


def batches_of_variants(
    device: torch.device, pool: tuple[int, ...], spec: PageSpec, group: int, max_q: int
) -> tuple[int, ...]:
    """Numbers of sequences that launch all variants of the kernels, the least one of each, for an engine that compiles
    them before it serves. Each sequence has `max_q` query tokens, whose bounds are given.
    """
    batches: dict[tuple[int, ...], int] = {}
    most = max(num_sms(device), 32) + 1  # more sequences have the variants of this number
    for num_seqs in range(1, most + 1):
        plan = make_latent_plan(device, pool, spec, group, num_seqs * max_q, num_seqs, max_q, True, True, False)
        batches.setdefault((id(plan.round), id(plan.attend), id(plan.combine)), num_seqs)
    return tuple(batches.values())
