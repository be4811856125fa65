"""In which order `kernels.prefill` takes the sequences of a ragged batch: its search, compiled for sm_90 and run on the CPU (`ptx.py`).

Prints JSON. A process of its own (`test_prefill_order.py` runs it), because a process with TRITON_INTERPRET=1 cannot compile.
"""

from __future__ import annotations

import json
import random

import torch
import triton
from ptx import Machine, Memory
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from fp8attn.kernels.gluon import gl, gluon
from fp8attn.kernels.prefill import NO_WINDOW, _advance_to, _outset

PROGRAMS = 5
BLOCK = 192


@gluon.jit
def _walk(cu_ptr, lens_ptr, out_ptr, num_tokens, num_seqs, heads, window, claims, BLOCK: gl.constexpr):
    """Every claim's sequence, its first item, first query and queries; searched for where the claim before was of another one."""
    place = _outset()
    seq = 0
    base = 0
    start = 0
    q_len = 0
    blocks = 0
    claim = gl.program_id(0)
    while claim < claims:
        place, seq, base, start, q_len, blocks = _advance_to(
            claim, (place, seq, base, start, q_len, blocks), num_seqs + 1, heads, cu_ptr, lens_ptr, num_tokens, num_seqs, heads, window,
            BLOCK)  # fmt: skip
        gl.store(out_ptr + 4 * claim, seq)
        gl.store(out_ptr + 4 * claim + 1, base)
        gl.store(out_ptr + 4 * claim + 2, start)
        gl.store(out_ptr + 4 * claim + 3, q_len)
        claim += gl.num_programs(0)


def compiled():
    signature = dict.fromkeys(_walk.arg_names, "i32") | dict.fromkeys(("cu_ptr", "lens_ptr", "out_ptr"), "*i32") | {"BLOCK": "constexpr"}
    source = GluonASTSource(_walk, signature, {(_walk.arg_names.index("BLOCK"),): BLOCK})
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})


def walk(kernel, queries: list[int], keys: list[int], rest: int, heads: int, window: int) -> dict:
    """A batch's claims; `rest` rows lie behind the last sequence."""
    items = heads * sum(-(-n // BLOCK) for n in [*queries, rest])
    out = torch.full((items + 3, 4), -1, dtype=torch.int32)
    memory = Memory(1 << 20)
    tensors = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int(), torch.tensor(keys, dtype=torch.int32), out
    numbers = sum(queries) + rest, len(queries), heads, window, len(out)
    machine = Machine(kernel.asm["ptx"], kernel.metadata.shared, memory, [*map(memory.add, tensors), *numbers, 0, 0], PROGRAMS)
    machine.run()
    return {"queries": queries, "keys": keys, "rest": rest, "heads": heads, "window": window, "claims": out.tolist()}


def main() -> None:
    kernel, pick = compiled(), random.Random(0)
    cases = [([700], [700], 0, 2, NO_WINDOW), ([0, 0], [0, 900], 70, 3, NO_WINDOW)]
    for count, rest, window in ((5, 0, NO_WINDOW), (32, 193, 300), (75, 0, NO_WINDOW)):
        queries = [pick.choice((0, 0, 1, 190, 192, 200, 700)) for _ in range(count)]
        keys = [pick.choice((n, n + 5000, max(n - 100, 0), pick.randrange(1 << pick.randrange(1, 18)))) for n in queries]
        cases.append((queries, keys, rest, pick.randrange(1, 4), window))
    print(json.dumps([walk(kernel, *case) for case in cases]))


if __name__ == "__main__":
    main()
