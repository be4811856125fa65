"""Measures how exactly every FP8 kernel on this machine sums, by length, as `fp8attn doctor` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from evidence.fingerprint import of_call
from fp8attn.formats.codec import FP8
from fp8attn_tools.diagnostics.accumulation import HEAD_DIM, HEADS, LENGTHS, QUERIES, kernels
from fp8attn_tools.diagnostics.accumulation import measure as accumulation

from . import peers
from .problem import DEVICE

OURS = "fp8attn hopper"
CASES = {f"S{length}": length for length in LENGTHS}


def calls(case: str) -> dict[str, Callable]:
    """Our call on tensors of the shapes that `fp8attn_tools.diagnostics.accumulation` makes, filled with zeros, for its fingerprint."""
    q, k = (torch.zeros(1, heads, tokens, HEAD_DIM, device=DEVICE).to(FP8) for heads, tokens in ((HEADS, QUERIES), (1, max(LENGTHS))))
    k = k[:, :, : CASES[case]]
    return {OURS: lambda: kernels()[OURS](q, k, k)}


def measure(case: str) -> Iterator[dict]:
    peers.available()  # loads those in `.peers`, which `kernels` finds
    for impl, attend in kernels().items():
        found = accumulation(attend, DEVICE, (CASES[case],))
        yield {"case": case, "impl": impl, "rel_err": found.errors[CASES[case]], "fingerprint": of_call(impl, calls(case).get(impl))}
