"""Tables of archives: files of results whose benchmarks are gone."""

from __future__ import annotations

import re

from ..rows import latest, over
from .writing import block, number, table, tokens, value

SYSTEMS = {
    "bf16": "bf16", "fp8attn": "fp8attn", "fp8attn-e4m3-keys": "fp8attn, E4M3 keys",
    "fa3-fp8": "FA3 FP8, scales of one", "fa3-fp8:calibrated": "FA3 FP8, calibrated", "fa3-fp8:means": "FA3 FP8, scales of one, means off",
    "fa3-fp8:calibrated+means": "FA3 FP8, calibrated, means off", "vllm-fa3-fp8": "vLLM's FA3, scales of one",
    "vllm-fa3-fp8:calibrated": "vLLM's FA3, calibrated",
}  # fmt: skip
STRESS = {"as trained": "niah_multikey_2-S131072"} | {f"stress {n}": f"niah_multikey_2-stress{n}-S131072" for n in (1, 2, 3)}
ENGINES = {"vllm-bf16": "BF16", "vllm-fp8": "vLLM's FP8", "fp8attn": "fp8attn"}


@block("needle")
def retrieval() -> str:
    """RULER's needles: how many answers are right."""
    found = latest("needle")[1]

    def cell(row: dict | None) -> str:
        return "" if row is None else f"{100 * row['accuracy']:.4g} ({row['samples']})"

    body = [[label, *(cell(found.get((case, impl))) for case in STRESS.values())] for impl, label in SYSTEMS.items()]
    return table(["131,072 tokens, % right (samples)", *STRESS], body)


@block("vllm")
def vllm_times() -> str:
    """Engines of vLLM: milliseconds to the first token, of decode steps, and of a mixed load."""
    title, here = latest("vllm")
    body = []
    for case in dict.fromkeys(case for case, impl in here if "ms" in here[case, impl]):
        kind, *sizes = re.findall(r"[a-z]+|\d+", case.lower().replace("-b", "-").replace("-s", "-"))
        label = {"prefill": "first token, prompt of {}", "decode": "decode step, {} x {}"}.get(kind, "the mixed load")
        cells = [value(here, case, impl, "ms", ",.2f" if kind == "decode" else ",.1f") for impl in ENGINES]
        body.append([label.format(*(tokens(int(n)) for n in sizes)), *cells, number(over(here, case, "fp8attn", "vllm-fp8"))])
    return table(["", *(f"{title}: {label}, ms" for label in ENGINES.values()), "vLLM's FP8 over fp8attn"], body)
