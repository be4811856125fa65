"""Attention over latents: speed, errors, and needles of the small model's twin."""

from __future__ import annotations

import re

from ..rows import header, latest, ratio
from .writing import block, number, table, tokens, value

LATENT = {"fp8attn": "fp8attn", "vllm-flashmla-fp8": "vLLM's FlashMLA, FP8", "flashmla-bf16": "FlashMLA, BF16"}
NEEDLES = {"bf16": LATENT["flashmla-bf16"], **{impl: LATENT[impl] for impl in ("vllm-flashmla-fp8", "fp8attn")}}


@block("latent")
def latent() -> str:
    """Microseconds of a step, ratios, and errors by the mean of latents."""
    title, rows = latest("latent")
    body = []
    for case in dict.fromkeys(case for case, _ in rows):
        ours, *theirs = (rows.get((case, impl)) for impl in LATENT)
        errors = [
            " / ".join(value(rows, case, impl, key, ".2f", 100) for key in ("rel_err_0", "rel_err_0.3", "rel_err"))
            for impl in LATENT
            if (case, impl) in rows
        ]
        body.append(
            [
                case,
                *(number(1000 * row["ms"] if row else None, ".1f") for row in (ours, *theirs)),
                *(number(ratio(ours, row)) for row in theirs),
                *errors,
                *[""] * (len(LATENT) - len(errors)),
            ]
        )
    head = [f"{title}; us a step", *LATENT.values(), "over vLLM's FP8", "over BF16"]
    return table([*head, *(f"{name}: error, %, at mean 0 / 0.3 / 1" for name in LATENT.values())], body)


@block("latent")
def latent_errors() -> str:
    """The largest errors in a long batch, for README."""
    title, rows = latest("latent")
    ours, theirs = (rows["H128-B66-S131072", impl]["rel_err"] for impl in ("fp8attn", "vllm-flashmla-fp8"))
    release = header("latent")["peers"]["flashmla"].replace("vllm==", "vLLM ")
    return (
        f"attention is {100 * ours:.1f}% off on an {title} ({release}'s FP8 kernel: {100 * theirs:.0f}%), with latents "
        f"of mean 1 in 66 sequences of 131,072 tokens and 128 heads."
    )


@block("latent_needle")
def latent_needle() -> str:
    """Right answers and perplexity of the twin."""
    title, rows = latest("latent_needle")

    def cell(case: str, impl: str) -> str:
        row = rows.get((case, impl))
        return "" if row is None else f"{100 * row['accuracy']:.4g}% of {row['samples']}; {row['ppl']:.2f}"

    cases = dict.fromkeys(case for case, _ in rows)
    body = [[case, *(cell(case, impl) for impl in NEEDLES)] for case in cases]
    return table([f"{title}; right answers; perplexity", *NEEDLES.values()], body)


@block("latent_step")
def latent_step() -> str:
    """Milliseconds of a step in transformers, and what it holds and allocates."""
    title, rows = latest("latent_step")
    head = [f"{title}; tokens"]
    impls = {"dynamic-cache": "DynamicCache", "fp8attn": "fp8attn"}
    for key in ("ms a step", "cache, MiB", "a step's own memory, MiB"):
        head += [f"{name}: {key}" for name in impls.values()]
    body = [
        [case.removeprefix("S"), *(value(rows, case, impl, key, form) for key, form in
                                   (("ms", ".1f"), ("cache_mib", ".0f"), ("peak_mib", ",.0f")) for impl in impls)]
        for case in dict.fromkeys(case for case, _ in rows)
    ]  # fmt: skip
    return table(head, body)


@block("latent_vllm")
def latent_vllm() -> str:
    """Distances by batch, and milliseconds of attention in a step, of engines."""
    title, rows = latest("latent_vllm")
    impls = {"vllm-bf16": "BF16 (FlashAttention-3)", "vllm-flashmla": LATENT["flashmla-bf16"]}
    impls |= {impl: LATENT[impl] for impl in ("fp8attn", "vllm-flashmla-fp8")}
    forms = (
        ("alone-B66", "an answer alone, nats from BF16's", "nats_from_bf16", ".3f"),
        ("alone", "an answer among others of the same length, nats from its answer alone", "nats_from_alone", ".3f"),
        ("hit", "an answer after a hit of the prefix cache, nats from the first time", "nats_from_first", ".3f"),
        ("prefill", "the first token of a prompt, ms", "ms", ".1f"),
        ("decode", "attention in a step, ms", "attention_ms", ".3f"),
    )
    body = []
    for kind, text, key, form in forms:
        cases = {case for case, _ in rows if f"-{kind}-" in case}
        for case in sorted(cases, key=lambda case: [int(size) for size in re.findall(r"\d+", case)]):
            heads, batch, length = re.fullmatch(r"mla(\d+)-\w+-(?:B(\d+)-)?S(\d+)", case).groups()
            others = "" if batch is None or key == "nats_from_bf16" else f"{batch} x "
            shape = f"{heads} heads, {others}{tokens(int(length))}"
            body.append([f"{shape}: {text}", *(value(rows, case, impl, key, form) for impl in impls)])
    return table([f"vLLM {header('latent_vllm')['peers']['vllm'].split()[-1]}, {title}", *impls.values()], body)
