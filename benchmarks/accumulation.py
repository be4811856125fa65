"""How exactly every FP8 kernel here sums, by length: what `fp8attn doctor` measures, as a results file.

PYTHONPATH=src python -m benchmarks.accumulation [--save]
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8attn.accumulation import HEAD_DIM, HEADS, LENGTHS, QUERIES, kernels, measure
from fp8attn.layout import FP8

from . import peers, results
from .fingerprint import launched, peer
from .problem import DEVICE

OURS = "fp8attn hopper"
CASES = {f"S{length}": length for length in LENGTHS}


def calls(name: str) -> dict[str, Callable]:
    """Our implementation of a case, on what `measure` gives it, but for the values."""
    q, k = (torch.zeros(1, heads, tokens, HEAD_DIM, device=DEVICE).to(FP8) for heads, tokens in ((HEADS, QUERIES), (1, max(LENGTHS))))
    k = k[:, :, : CASES[name]]
    return {OURS: lambda: kernels()[OURS](q, k, k)}


def main() -> None:
    args = results.parse(results.arguments(__doc__, cases=False))
    peers.available()  # loads those in `.peers`, for `kernels` to find
    rows = []
    for impl, attend in kernels().items():
        found = measure(attend, DEVICE)
        print(f"{impl}: {found}", flush=True)
        for case, length in CASES.items():
            fingerprint = launched(calls(case)[impl]) if impl == OURS else peer(impl)
            rows.append({"case": case, "impl": impl, "rel_err": found.errors[length], "fingerprint": fingerprint})
    if args.save:
        results.save("accumulation", rows)


if __name__ == "__main__":
    main()
