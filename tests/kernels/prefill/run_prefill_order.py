"""The order in which `kernels.prefill` takes the sequences of a ragged batch: its search, compiled for sm_90 and
emulated on the CPU.

`test_schedule.py` calls this in a process where Triton compiles.
"""

from __future__ import annotations

import random

import torch

from fp8attn.kernels.gluon import gl, gluon
from fp8attn.kernels.launch import Launch, make_constants
from fp8attn.kernels.prefill.plan import NO_WINDOW
from fp8attn.kernels.prefill.schedule import PrefillBatch, advance_to, scheduler_init
from tests.emulator import emulate

PROGRAMS = 5
BLOCK = 192
WAVE_ROWS, WAVE_PAGES = 800, 100


@gluon.jit(do_not_specialize=["num_tokens", "num_seqs", "heads", "window", "claims", "wave_rows", "wave_pages"])
def _walk(cu_ptr, lens_ptr, out_ptr, num_tokens, num_seqs, heads, window, claims, wave_rows, wave_pages,
          BLOCK: gl.constexpr):  # fmt: skip
    """For every claim: its sequence, first item, first query, number of queries and heads in a wave. The sequence is
    searched for if the claim before had another one."""
    batch = PrefillBatch(
        bounds=cu_ptr, lengths=lens_ptr, new_keys=num_tokens, padding=None, num_tokens=num_tokens, num_seqs=num_seqs,
        num_q_heads=heads,
        window=window, wave=claims, wave_rows=wave_rows, wave_pages=wave_pages, BLOCK=BLOCK)  # fmt: skip
    q_len = 0
    sequence = scheduler_init(q_len, batch)
    claim = gl.program_id(0)
    while claim < claims:
        sequence = advance_to(claim, sequence, num_seqs + 1, heads, batch)
        gl.store(out_ptr + 5 * claim, sequence.index)
        gl.store(out_ptr + 5 * claim + 1, sequence.base)
        gl.store(out_ptr + 5 * claim + 2, sequence.start)
        gl.store(out_ptr + 5 * claim + 3, sequence.q_len)
        gl.store(out_ptr + 5 * claim + 4, sequence.wave)
        claim += gl.num_programs(0)


def walk(queries: list[int], keys: list[int], rest: int, heads: int, window: int) -> dict:
    """The claims of a batch. There are `rest` rows after the last sequence."""
    items = heads * sum(-(-n // BLOCK) for n in [*queries, rest])
    out = torch.full((items + 3, 5), -1, dtype=torch.int32)
    tensors = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int(), torch.tensor(keys, dtype=torch.int32), out
    constants = make_constants("walk", torch.device("cpu"), BLOCK=BLOCK, num_warps=1)
    numbers = sum(queries) + rest, len(queries), heads, window, len(out), WAVE_ROWS, WAVE_PAGES
    emulate(Launch(_walk, (PROGRAMS,), (*tensors, *numbers), constants, None))
    return {"queries": queries, "keys": keys, "rest": rest, "heads": heads, "window": window, "claims": out.tolist()}


def batches() -> list[dict]:
    pick = random.Random(0)
    cases = [([700], [700], 0, 2, NO_WINDOW), ([0, 0], [0, 900], 70, 3, NO_WINDOW)]
    for count, rest, window in ((5, 0, NO_WINDOW), (32, 193, 300), (75, 0, NO_WINDOW)):
        queries = [pick.choice((0, 0, 1, 190, 192, 200, 700)) for _ in range(count)]
        keys = [
            pick.choice((n, n + 5000, max(n - 100, 0), pick.randrange(1 << pick.randrange(1, 18)))) for n in queries
        ]
        cases.append((queries, keys, rest, pick.randrange(1, 4), window))
    return [walk(*case) for case in cases]
