"""How exactly every FP8 kernel on this machine sums, by length, as `fp8attn doctor` measures it."""

from __future__ import annotations

from collections.abc import Iterator

from fp8attn_tools.diagnostics.accumulation import LENGTHS, kernels
from fp8attn_tools.diagnostics.accumulation import measure as accumulation

from . import peers
from .problem import DEVICE

CASES = {f"S{length}": length for length in LENGTHS}


def measure(case: str) -> Iterator[dict]:
    peers.available()  # loads those in `.peers`, which `kernels` finds
    for impl, attend in kernels().items():
        yield {"case": case, "impl": impl, "rel_err": accumulation(attend, DEVICE, (CASES[case],)).errors[CASES[case]]}
