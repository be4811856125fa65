"""What 8 bits cost public models: perplexity and divergence by model and cache, and right answers in tasks."""

from __future__ import annotations

from benchmarks.public_models import CASES, IMPLS, MODELS, TEXTS

from ..rows import Rows, latest
from .texts import cost
from .writing import block, span, table, tokens

TITLES = {"smollm2": "SmolLM2-135M", "qwen": "Qwen2.5-Coder-0.5B", "qwen15b": "Qwen2.5-Coder-1.5B", "gemma": "Gemma 3 270M"}
STORED = {
    "fp8attn-int8-keys": "INT8 keys", "fp8attn-exact": "INT8 keys, `exact`", "fp8attn-e4m3-keys": "E4M3 keys",
    "scale-1": "a plain cast to E4M3",
    "transformers-fp8": "transformers' FP8 cache", "vllm-int8-per-token-head": "vLLM's `int8_per_token_head`",
    "vllm-fp8-per-token-head": "vLLM's `fp8_per_token_head`", "vllm-int4-per-token-head": "vLLM's `int4_per_token_head`",
    "llama-cpp-q8-0": "llama.cpp's `q8_0`",
}  # fmt: skip
ANSWERED = {"bf16": "BF16"} | STORED
LABELS = {"source": "our code", "docs": "our docs"}
BESIDE = {"smollm2": "code", "qwen": "prose", "qwen15b": "docs", "gemma": "prose"}  # a text of each model, for docs/comparison.md


def stored(impl: str) -> str:
    """What is stored, and how it is read, by the implementation's name."""
    name, _, how = impl.rpartition("-")
    return STORED[impl] if impl in STORED else f"{STORED[name]}, {how}"


def label(case: str) -> str:
    """The text of a case."""
    text = case.split("-")[1]
    return LABELS.get(text, text)


def columns(name: str, cases: dict[str, str]) -> tuple[str, Rows, dict[str, str]]:
    """The device, its rows, and by label those of these labeled cases that were measured."""
    title, found = latest(name)
    return title, found, {label: case for case, label in cases.items() if case in {c for c, _ in found}}


@block("public_models")
def public_models() -> str:
    """A table for each model: caches by text and context."""
    tables = []
    for model in MODELS:
        labels = {case: f"{label(case)}, {tokens(text.context)}" for case, text in CASES.items() if text.model == model}
        device, found, cases = columns("public_models", labels)
        body = [[stored(impl), *(cost(found.get((case, impl))) for case in cases.values())] for impl in IMPLS if impl != "bf16"]
        body = [line for line in body if any(line[1:])]
        if body:
            tables.append(table([f"{TITLES[model]} ({device})", *cases], body))
    return "\n\n".join(tables)


@block("public_models")
def own_texts() -> str:
    """The perplexity in BF16 of this repository's code and docs."""
    _, found = latest("public_models")
    cases = [case for case, text in CASES.items() if text.model == "qwen15b" and (case, "bf16") in found]
    by_text: dict[str, list[str]] = {}
    for case in cases:
        by_text.setdefault(label(case), []).append(f"{found[case, 'bf16']['ppl']:.1f}")
    lengths = ", ".join(dict.fromkeys(tokens(CASES[case].context) for case in cases))
    return f"Perplexity in BF16 at {lengths}: " + "; ".join(f"{name} {', '.join(numbers)}" for name, numbers in by_text.items()) + "."


@block("public_models")
def caches_beside() -> str:
    """Perplexity over BF16's at 8k tokens, of caches read in 16 bits."""
    device, found, cases = columns(
        "public_models", {f"{model}-{text}-S8192": f"{TITLES[model]}, {LABELS.get(text, text)}" for model, text in BESIDE.items()}
    )
    body = []
    for impl, label in STORED.items():
        rows = [found.get((case, impl), found.get((case, f"{impl}-decode"))) for case in cases.values()]
        costs = ["" if row is None or row["d_ppl_pct"] is None else f"{row['d_ppl_pct']:+.1f}%" for row in rows]
        if any(costs):
            body.append([f"fp8attn, {label}" if impl.startswith("fp8attn") else label, *costs])
    return table([f"perplexity over BF16's, 8k tokens ({device})", *cases], body)


@block("public_models")
def smollm2_loss() -> str:
    """What INT8 keys cost SmolLM2 through prefill, at 8,192 tokens."""
    device, found = latest("public_models")
    code, prose = (found[f"smollm2-{text}-S8192", "fp8attn-int8-keys-prefill"]["d_ppl_pct"] for text in ("code", "prose"))
    return f"{code:+.1f}% on code and {prose:+.1f}% on English prose ({device})"


@block("public_models")
def cast_loss() -> str:
    """What a plain cast to E4M3 costs SmolLM2, at 8,192 tokens."""
    device, found = latest("public_models")
    losses = [found[f"smollm2-{text}-S8192", f"scale-1-{how}"]["d_ppl_pct"] for text in TEXTS for how in ("prefill", "decode")]
    return f"{span(losses, '.1f')}% of perplexity at 8,192 tokens (SmolLM2, {device})"


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

    tables = []
    for model, prefix in {"qwen": "", "qwen15b": "qwen15b-"}.items():
        device, found, cases = columns("tasks", {f"{prefix}humaneval": "HumanEval", f"{prefix}gsm8k": "GSM8K"})
        body = []
        for impl, name in ANSWERED.items():
            cells = [make(found.get((case, impl))) for case in cases.values() for make in (right, change)]
            if any(cells):
                body.append([name, *cells])
        if body:
            heads = (name for head in cases for name in (head, "points, beside BF16"))
            tables.append(table([f"{TITLES[model]} ({device})", *heads], body))
    return "\n\n".join(tables)
