"""What 8 bits cost public models: perplexity and divergence by model and cache, and right answers in tasks."""

from __future__ import annotations

import re

from benchmarks.public_models import IMPLS

from ..rows import Rows, latest
from .texts import cost
from .writing import block, table, tokens

TITLES = {
    "smollm2": "SmolLM2-135M",
    "qwen": "Qwen2.5-Coder-0.5B",
    "qwen15b": "Qwen2.5-Coder-1.5B",
    "gemma": "Gemma 3 270M",
}
STORED = {
    "fp8attn-int8-keys": "INT8 keys", "fp8attn-exact": "INT8 keys, `exact`", "fp8attn-e4m3-keys": "E4M3 keys",
    "scale-1": "a plain cast to E4M3",
    "transformers-fp8": "transformers' FP8 cache", "vllm-int8-per-token-head": "vLLM's `int8_per_token_head`",
    "vllm-fp8-per-token-head": "vLLM's `fp8_per_token_head`",
    "vllm-int4-per-token-head": "vLLM's `int4_per_token_head`",
    "llama-cpp-q8-0": "llama.cpp's `q8_0`",
}  # fmt: skip
TASKS = {"humaneval": "HumanEval", "gsm8k": "GSM8K"}
ANSWERED = {"bf16": "BF16"} | STORED
LABELS = {"source": "fp8attn's code", "docs": "fp8attn's docs"}
BESIDE = {
    "smollm2": "code",
    "qwen": "prose",
    "qwen15b": "docs",
    "gemma": "prose",
}  # a text of each model, for docs/comparison.md


def stored(impl: str) -> str:
    """What is stored, and how it is read, by the implementation's name."""
    name, _, how = impl.rpartition("-")
    return STORED[impl] if impl in STORED else f"{STORED[name]}, {how}"


def texts(found: Rows, model: str) -> dict[str, str]:
    """A model's cases, short contexts first: by case its text and context."""
    parsed = {case: match for case, _ in found if (match := re.fullmatch(rf"{model}-(\w+)-S(\d+)", case))}
    return {
        case: f"{LABELS.get(match[1], match[1])}, {tokens(int(match[2]))}"
        for case, match in sorted(parsed.items(), key=lambda item: (int(item[1][2]), item[1][1]))
    }


def columns(name: str, cases: dict[str, str]) -> tuple[str, Rows, dict[str, str]]:
    """The device, its rows, and by label those of these labeled cases that were measured."""
    title, found = latest(name)
    return title, found, {label: case for case, label in cases.items() if case in {c for c, _ in found}}


@block("public_models")
def public_models() -> str:
    """A table for each model: caches by text and context."""
    device, found = latest("public_models")
    tables = []
    for model in TITLES:
        cases = texts(found, model)
        body = [[stored(impl), *(cost(found.get((case, impl))) for case in cases)] for impl in IMPLS if impl != "bf16"]
        body = [line for line in body if any(line[1:])]
        if body:
            tables.append(table([f"{TITLES[model]} ({device})", *cases.values()], body))
    return "\n\n".join(tables)


@block("public_models")
def own_texts() -> str:
    """The perplexity in BF16 of this repository's code and docs, by context."""
    _, found = latest("public_models")
    measured = [
        f"{label} {found[case, 'bf16']['ppl']:.1f}"
        for case, label in texts(found, "qwen15b").items()
        if (case, "bf16") in found
    ]
    return f"Perplexity in BF16: {'; '.join(measured)}."


@block("public_models")
def caches_beside() -> str:
    """Perplexity over BF16's at 8k tokens, of caches read in 16 bits."""
    device, found, cases = columns(
        "public_models",
        {f"{model}-{text}-S8192": f"{TITLES[model]}, {LABELS.get(text, text)}" for model, text in BESIDE.items()},
    )
    body = []
    for impl, label in STORED.items():
        rows = [found.get((case, impl), found.get((case, f"{impl}-decode"))) for case in cases.values()]
        costs = ["" if row is None or row["d_ppl_pct"] is None else f"{row['d_ppl_pct']:+.1f}%" for row in rows]
        if any(costs):
            body.append([f"fp8attn, {label}" if impl.startswith("fp8attn") else label, *costs])
    return table([f"perplexity over BF16's, 8k tokens ({device})", *cases], body)


def task_case(model: str, task: str) -> str:
    """The case of a task: those of Qwen2.5-Coder-0.5B have the task's name alone, those of others begin with the
    model's.
    """
    return task if model == "qwen" else f"{model}-{task}"


@block("tasks")
def tasks() -> str:
    """A table for each model: right answers by task and cache, and the difference from BF16 on the same questions."""

    def right(row: dict | None) -> str:
        return "" if row is None else f"{row['right']} of {row['samples']}"

    def change(row: dict | None) -> str:
        if row is None or "low" not in row:
            return ""
        chance = "p < 0.01" if row["p"] < 0.01 else f"p {row['p']:.2f}"
        return f"{100 * row['difference']:+.1f} ({100 * row['low']:+.1f} to {100 * row['high']:+.1f}), {chance}"

    made = []
    for model, name in TITLES.items():
        device, found, cases = columns("tasks", {task_case(model, task): title for task, title in TASKS.items()})
        cells = {
            impl: [make(found.get((case, impl))) for case in cases.values() for make in (right, change)]
            for impl in ANSWERED
        }
        body = [[ANSWERED[impl], *line] for impl, line in cells.items() if any(line)]
        if body:
            made.append(
                table([f"{name} ({device})", *(head for task in cases for head in (task, "points, beside BF16"))], body)
            )
    return "\n\n".join(made)
