"""The kernels on the CPU, against float64 or bit for bit: `python -m docs.lab.token_pages.emulate [words]`."""

from __future__ import annotations

import sys
from unittest import mock

import numpy as np
import torch

from benchmarks.measure import exact, relative
from fp8attn import AttentionParams
from fp8attn.kernels.decode import plan
from tests.emulator import emulate, machine
from tests.emulator.arithmetic import arithmetic
from tests.support.kernel_cases import poison_empty
from tests.support.machine_code import dry

from .decode import token_decode
from .layout import TokenPages, store

DECODE = {  # lengths, KV heads, group, head_dim, query tokens, window
    "D128": ([300, 1, 129], 2, 4, 128, 1, 0),
    "D128 split": ([1700, 0, 128], 1, 4, 128, 1, 0),
    "D128 rows 16, three queries": ([300, 131, 4], 1, 8, 128, 3, 0),
    "D128 MHA": ([300, 40], 2, 1, 128, 1, 0),
    "D64": ([700, 5], 2, 7, 64, 1, 0),
    "D256": ([300, 128], 1, 8, 256, 1, 0),
    "D128 window": ([900, 130], 1, 4, 128, 2, 200),
}


def _max(warp, opcode, operands, mask, active):
    """The emulator's `max`, and that of pairs of 16-bit integers."""
    if opcode[-1] != "s16x2":
        return arithmetic(warp, opcode, operands, mask, active)
    a, b = (np.ascontiguousarray(warp.get(x, "b32")).view(np.int16) for x in operands[1:])
    warp.put(operands[0], np.maximum(a, b).view(np.uint32), mask)


def run(launch) -> None:
    with mock.patch.dict(machine.INSTRUCTIONS, max=_max):
        emulate(launch)


def uneven(count: int, heads: int, head_dim: int, spread: float) -> torch.Tensor:
    """Tokens whose magnitudes differ by powers of e."""
    return torch.randn(count, heads, head_dim) * torch.exp(spread * torch.randn(count, heads, 1))


def errors(pages: TokenPages, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, queries: int, window: int = 0) -> float:
    """Of all rows, against float64 on what is stored. LSE is compared, too."""
    pairs = []
    for seq, length in enumerate(pages.lengths.tolist()):
        rows = slice(seq * queries, (seq + 1) * queries)
        k, v = pages.read(seq)
        for row in range(rows.start, rows.stop):
            last = length - queries + row - rows.start
            first = max(last - window + 1, 0) if window else 0
            seen = slice(first, max(last + 1, first))
            one = q[row : row + 1]
            pairs.append((out[row : row + 1], exact(one, k[seen], v[seen], pages.head_dim**-0.5)))
            if seen.stop > seen.start:
                group = q.shape[1] // k.shape[1]
                scores = torch.einsum("hd,khd->hk", one[0].double(), k[seen].repeat_interleave(group, 1)) * pages.head_dim**-0.5
                off = float((lse[row].double() - torch.logsumexp(scores, 1)).abs().max())
                assert off < 1e-3, f"LSE is {off} off"
    return relative([(a.double(), b) for a, b in pairs])


def emulate_decode(name: str, spread: float = 0.7) -> float:
    lengths, heads, group, head_dim, queries, window = DECODE[name]
    torch.manual_seed(0)
    k, v = (uneven(sum(lengths), heads, head_dim, spread) for _ in "kv")
    pages = store(k, v, lengths)
    q = torch.randn(len(lengths) * queries, heads * group, head_dim).half()
    params = AttentionParams(None, queries, True, head_dim**-0.5, window=window, return_lse=True)
    with dry() as (launches, patch):
        patch.setattr(plan, "num_sms", lambda device: 2)
        poison_empty(patch)
        out, lse = token_decode(q, pages, params)
    run(launches[0])
    return errors(pages, q, out, lse, queries, window)


def main() -> None:
    for name in DECODE:
        if all(word in name for word in sys.argv[1:]):
            print(f"decode {name}: {emulate_decode(name):.2e}", flush=True)


if __name__ == "__main__":
    main()
