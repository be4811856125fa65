"""RULER's tasks: how many answers are right."""

from __future__ import annotations

from collections.abc import Mapping

from ..rows import latest, lengths
from .writing import block, table

SYSTEMS = {
    "bf16": "bf16", "fp8attn": "fp8attn", "fp8attn-e4m3-keys": "fp8attn, E4M3 keys",
    "fa3-fp8": "FA3 FP8, scales of one", "fa3-fp8:calibrated": "FA3 FP8, calibrated", "fa3-fp8:means": "FA3 FP8, scales of one, means off",
    "fa3-fp8:calibrated+means": "FA3 FP8, calibrated, means off", "vllm-fa3-fp8": "vLLM's FA3, scales of one",
    "vllm-fa3-fp8:calibrated": "vLLM's FA3, calibrated",
}  # fmt: skip
PAIR = {name: name for name in ("bf16", "fp8attn")}
STRESS = {"as trained": "niah_multikey_2-S131072"} | {f"stress {n}": f"niah_multikey_2-stress{n}-S131072" for n in (1, 2, 3)}


def right(cases: Mapping[str, str], impls: Mapping[str, str], head: str, *, paired: bool = False) -> str:
    """Right answers: a line for each implementation, a column for each case.

    Args:
        cases, impls: by head and by name: a case, and a label.
        paired: a line more says of how many samples one alone of BF16 and `fp8attn` is right, and McNemar's p.
    """
    found = latest("needle")[1]
    body = [[label, *(answers(found.get((case, impl))) for case in cases.values())] for impl, label in impls.items()]
    if paired:
        ours = [found[case, "fp8attn"] for case in cases.values()]
        body.append(["lost, won (p)", *(f"{row['lost']}, {row['won']} ({row['p']:.2g})" for row in ours)])
    return table([f"{head}, % right (samples)", *cases], body)


def answers(row: dict | None) -> str:
    return "" if row is None else f"{100 * row['accuracy']:.4g} ({row['samples']})"


def needle_lengths(task: str) -> dict[str, str]:
    """The cases of a task that `fp8attn` has answered, by length."""
    found = latest("needle")[1]
    return {f"{n:,}": case for n, case in lengths(found, rf"{task}-S(\d+)").items() if (case, "fp8attn") in found}


@block("needle")
def retrieval() -> str:
    return right(STRESS, SYSTEMS, "131,072 tokens")


@block("needle")
def retrieval_lengths() -> str:
    return right(needle_lengths("niah_multikey_2"), PAIR, "`niah_multikey_2`", paired=True)
