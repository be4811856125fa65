"""Tables of vLLM's engines, by group."""

from __future__ import annotations

import re

from benchmarks.vllm import GROUPS
from benchmarks.vllm_models import NAMES

from ..rows import latest, over
from .writing import block, number, table, tokens, value

IMPLS = {
    "vllm-bf16": "BF16", "vllm-fp8": "vLLM's FP8", "vllm-int8-per-token-head": "`int8_per_token_head`",
    "vllm-fp8-per-token-head": "`fp8_per_token_head`", "vllm-int4-per-token-head": "`int4_per_token_head`",
    "vllm-flashmla": "FlashMLA, BF16", "vllm-flashmla-fp8": "FlashMLA, FP8", "fp8attn": "fp8attn",
}  # fmt: skip
LABELS = {"prefill": "first token, prompt of {}", "decode": "decode step, {} x {}"}


def label(case: str) -> str:
    """What was timed, of a case without its group: "decode-B16-S2048"."""
    kind, *sizes = re.findall(r"[a-z]+|\d+", re.sub(r"-[BS]", "-", case))
    return LABELS[kind].format(*(tokens(int(n)) for n in sizes))


@block("vllm")
def vllm_times() -> str:
    """A table for each group: milliseconds to the first token, and of decode steps."""
    (title, found), made = latest("vllm"), []
    for name, group in GROUPS.items():
        cases = [
            case
            for case in dict.fromkeys(case for case, _ in found)
            if case.startswith((f"{name}-prefill", f"{name}-decode"))
        ]
        impls = {impl: label for impl, label in IMPLS.items() if impl in group.impls}
        others = [impl for impl in impls if impl != "fp8attn"]
        body = [
            [
                label(case.removeprefix(f"{name}-")), *(value(found, case, impl, "ms", ",.2f") for impl in impls),
                *(number(over(found, case, "fp8attn", impl)) for impl in others),
            ]
            for case in cases
        ]  # fmt: skip
        head = [
            NAMES[group.shape] + f", {group.drafts} drafts" * (group.drafts > 0),
            *(f"{title}: {impl}, ms" for impl in impls.values()),
            *(f"{impls[impl]} over fp8attn" for impl in others),
        ]
        made += [table(head, body)] if cases else []
    return "\n\n".join(made)
