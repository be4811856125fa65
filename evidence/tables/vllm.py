"""Tables of vLLM's engines, by the shape of the model."""

from __future__ import annotations

import re

from benchmarks.vllm_models import NAMES

from ..rows import latest, over
from .writing import block, number, table, tokens, value

IMPLS = {"vllm-bf16": "BF16", "vllm-fp8": "vLLM's FP8", "fp8attn": "fp8attn"}
LABELS = {"prefill": "first token, prompt of {}", "decode": "decode step, {} x {}"}


def label(case: str) -> str:
    """What was timed, of a case without its model: "decode-B16-S2048"."""
    kind, *sizes = re.findall(r"[a-z]+|\d+", re.sub(r"-[BS]", "-", case))
    return LABELS[kind].format(*(tokens(int(n)) for n in sizes))


@block("vllm")
def vllm_times() -> str:
    """A table for each model: milliseconds to the first token, and of decode steps."""
    (title, found), made = latest("vllm"), []
    for model, name in NAMES.items():
        cases = [case for case in dict.fromkeys(case for case, _ in found) if case.startswith(f"{model}-") and not case.endswith("-check")]
        ratios = [[number(over(found, case, "fp8attn", impl)) for impl in ("vllm-bf16", "vllm-fp8")] for case in cases]
        body = [
            [label(case.removeprefix(f"{model}-")), *(value(found, case, impl, "ms", ",.2f") for impl in IMPLS), *ratio]
            for case, ratio in zip(cases, ratios, strict=True)
        ]
        head = [name, *(f"{title}: {impl}, ms" for impl in IMPLS.values()), "BF16 over fp8attn", "vLLM's FP8 over fp8attn"]
        made += [table(head, body)] if cases else []
    return "\n\n".join(made)
