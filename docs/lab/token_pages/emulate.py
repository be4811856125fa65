"""The kernels on the CPU, against float64 or bit for bit: `python -m docs.lab.token_pages.emulate [words]`; with TRITON_INTERPRET=1 the
append."""

from __future__ import annotations

import sys
from unittest import mock

import numpy as np
import torch
from triton import knobs

from fp8attn import AttentionParams
from fp8attn.kernels.decode import plan
from tests.emulator import emulate, machine
from tests.emulator.arithmetic import arithmetic
from tests.support.kernel_cases import poison_empty
from tests.support.machine_code import dry

from .append import append
from .check import appended_to, errors, uneven, wrong_copies, wrong_rows
from .copy import copy, target_of
from .decode import token_decode
from .layout import store

DECODE = {  # lengths, KV heads, group, head_dim, query tokens, window
    "D128": ([300, 1, 129], 2, 4, 128, 1, 0),
    "D128 split": ([1700, 0, 128], 1, 4, 128, 1, 0),
    "D128 rows 16, three queries": ([300, 131, 4], 1, 8, 128, 3, 0),
    "D128 MHA": ([300, 40], 2, 1, 128, 1, 0),
    "D64": ([700, 5], 2, 7, 64, 1, 0),
    "D256": ([300, 128], 1, 8, 256, 1, 0),
    "D128 window": ([900, 130], 1, 4, 128, 2, 200),
}
UNEVEN = 2.5  # of V in "D128 split": its scales then differ by up to 2^24, and FP16 outputs do not overflow


def _max(warp, opcode, operands, mask, active):
    """The emulator's `max`, and that of pairs of 16-bit integers."""
    if opcode[-1] != "s16x2":
        return arithmetic(warp, opcode, operands, mask, active)
    a, b = (np.ascontiguousarray(warp.get(x, "b32")).view(np.int16) for x in operands[1:])
    warp.put(operands[0], np.maximum(a, b).view(np.uint32), mask)


def run(launch) -> None:
    with mock.patch.dict(machine.INSTRUCTIONS, max=_max):
        emulate(launch)


def emulate_decode(name: str, v_spread: float = 0.7) -> float:
    lengths, heads, group, head_dim, queries, window = DECODE[name]
    torch.manual_seed(0)
    k, v = (uneven(sum(lengths), heads, head_dim, spread) for spread in (0.7, v_spread))
    pages = store(k, v, lengths)
    q = torch.randn(len(lengths) * queries, heads * group, head_dim).half()
    params = AttentionParams(None, queries, True, head_dim**-0.5, window=window, return_lse=True)
    with dry() as (launches, patch):
        patch.setattr(plan, "num_sms", lambda device: 2)
        poison_empty(patch)
        out, lse = token_decode(q, pages, params)
    run(launches[0])
    return errors(pages, q, out, lse, queries, window)


def emulate_copy(head_dim: int) -> list[str]:
    torch.manual_seed(0)
    lengths, heads = [200, 0, 128, 5], 2
    pages = store(*(uneven(sum(lengths), heads, head_dim, 1.0) for _ in "kv"), lengths)
    target = target_of(pages, 200)
    target.pool.fill_(0x7F)
    with dry() as (launches, _):
        copy(pages, target)
    run(launches[0])
    return wrong_copies(pages, target)


def interpret_append(head_dim: int, held: int = 40, new: int = 200) -> list[str]:
    """One sequence, which holds `held` tokens before. With TRITON_INTERPRET=1."""
    torch.manual_seed(0)
    k, v = (uneven(held + new, 2, head_dim, 1.0).bfloat16() for _ in "kv")
    expected = store(k, v, [held + new])
    pages = appended_to(expected, held)
    append(pages, k[held:].contiguous(), v[held:].contiguous(), new, native=False)
    return wrong_rows(pages, expected)


def main() -> None:
    if knobs.runtime.interpret:
        for head_dim in (64, 128):
            print(f"append D{head_dim}, wrong: {interpret_append(head_dim)}", flush=True)
        return
    for name in DECODE:
        if all(word in name for word in sys.argv[1:]):
            print(f"decode {name}: {emulate_decode(name):.2e}", flush=True)
    if all(word in "D128 split" for word in sys.argv[1:]):
        print(f"decode D128 split, uneven V: {emulate_decode('D128 split', UNEVEN):.2e}", flush=True)
    for head_dim in (64, 128, 256):
        if all(word in f"copy {head_dim}" for word in sys.argv[1:]):
            print(f"copy D{head_dim}, wrong: {emulate_copy(head_dim)}", flush=True)


if __name__ == "__main__":
    main()
