"""The error of every variant against float64, on the CPU: `python -m docs.lab.int8_pv.emulate [words]`. Ten seconds each.

`wavefronts`: how often shared memory is accessed for one warp's load of the numbers of columns (128 bits a thread), and how often such
loads ran.
"""

from __future__ import annotations

import sys
from collections import Counter
from unittest import mock

import numpy as np
import torch

from benchmarks.measure import exact
from fp8attn.kernels.prefill import plan
from tests.emulator import emulate, machine, movement
from tests.support.kernel_cases import poison_empty
from tests.support.machine_code import dry

from .host import VARIANTS, call, store, unsigned


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b).norm() / b.norm())


def wavefronts(address: np.ndarray) -> int:
    """Of a load of 128 bits by 32 threads. Eight threads are served at a time, and a bank gives them one word of four bytes. Threads that
    read the same word share it."""
    count = 0
    for eight in address.astype(np.int64).reshape(4, 8):
        words = np.unique(eight[:, None] // 4 + np.arange(4))
        count += int(np.bincount(words % 32).max())
    return count


def run(name: str, keys: int = 900, queries: int = 200, uneven: float = 0.0, splits: int = 1) -> dict:
    variant = VARIANTS[name]
    torch.manual_seed(0)
    q = torch.randn(1, queries, 2, 128).bfloat16()
    k, v = torch.randn(2, 1, keys, 1, 128)
    k, v = (x * torch.exp(uneven * torch.randn(1, keys, 1, 1)) for x in (k, v))
    lab, out = store(k, v, variant), torch.full_like(q, torch.nan)
    with dry() as (launches, patch):
        patch.setattr(plan, "num_sms", lambda device: 1)
        poison_empty(patch)
        call(q, lab, variant, True, out)
    found: Counter[int] = Counter()
    load = movement.ld

    def counted(warp, opcode, operands, mask, active):
        if "shared" in opcode and "v4" in opcode and len(set(address := warp.address(operands[1]))) == 4:  # a load of columns
            found[wavefronts(address)] += 1
        load(warp, opcode, operands, mask, active)

    with unsigned(), mock.patch.dict(machine.INSTRUCTIONS, ld=counted):
        left = emulate(launches[0])
    last = keys - queries + torch.arange(queries)
    stored = exact(q[0], lab.k[0], lab.v[0], 128**-0.5, last)
    given = exact(q[0], k[0], v[0], 128**-0.5, last)
    return {"variant": name, "kernel": round(relative(out[0], stored), 5), "all": round(relative(out[0], given), 5),
            "storage": round(relative(stored, given), 5), "nan": bool(out.isnan().any()), "counters": left,
            "wavefronts": dict(found)}  # fmt: skip


if __name__ == "__main__":
    for name in VARIANTS:
        if not sys.argv[1:] or any(word in name for word in sys.argv[1:]):
            print(run(name), flush=True)
