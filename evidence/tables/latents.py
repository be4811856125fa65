"""Attention over latents: speed, errors, and needles of the small model's twin."""

from __future__ import annotations

import re

from benchmarks.accumulation import LATENTS, MEANS

from ..rows import header, latest, over, ratio
from .writing import block, number, span, table, tokens, value

LATENT = {"fp8attn": "fp8attn", "vllm-flashmla-fp8": "vLLM's FlashMLA, FP8", "flashmla-bf16": "FlashMLA, BF16"}
LARGEST = "mean3"  # cases of the largest planted mean
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


@block("accumulation")
def latent_sums() -> str:
    """Errors of vLLM's FP8 kernel, by batch, length and mean of latents."""
    title, rows = latest("accumulation")
    body = []
    for case in LATENTS:
        batch, length = map(int, re.findall(r"\d+", case))
        errors = (value(rows, case, "vllm-flashmla-fp8", f"rel_err_{mean:g}", ".1f", 100) for mean in MEANS)
        body.append([f"{batch} x {tokens(length)}", *errors])
    return table([f"{title}, requests x tokens", *(f"error, %, latents of mean {mean:g}" for mean in MEANS)], body)


@block("accumulation", "latent")
def latent_sums_in_words() -> str:
    """The same at the longest, beside BF16, and how much faster the FP8 kernel is."""
    _, rows = latest("accumulation")
    alone, many = (rows[f"latent-B{batch}-S131072", "vllm-flashmla-fp8"]["rel_err_1"] for batch in (1, 66))
    bf16 = span((rows[case, "flashmla-bf16"]["rel_err_1"] for case in LATENTS), ".1%")
    _, steps = latest("latent")
    faster = span((over(steps, case, "vllm-flashmla-fp8", "flashmla-bf16") for case, _ in steps), ".1f")
    return (
        f"It is {faster} times as fast as the BF16 kernel. Where latents have a mean, its output depends on how many "
        f"requests are in the batch: the same request over the same bytes is {alone:.1%} off alone, and {many:.0%} off "
        f"among 66. The BF16 kernel beside it is {bf16} off in every batch."
    )


@block("latent_needle")
def latent_needle_in_words() -> str:
    """What vLLM's FP8 kernel and fp8attn cost the twin on texts after a prompt."""
    costs = {impl: {} for impl in NEEDLES}
    for (case, impl), row in latest("latent_needle")[1].items():
        costs[impl][case] = row["d_ppl_pct"] / 100
    longest = {case: cost for case, cost in costs["vllm-flashmla-fp8"].items() if case.endswith("-S131072")}
    longest = {case: cost for case, cost in longest.items() if not case.startswith(LARGEST)}
    alone, many = (span((longest[case] for case in longest if ("B1-" in case) is one), ".1%") for one in (True, False))
    return (
        f"{many} more perplexity than in BF16 on texts after 131,072 tokens in batches of 66 and 132, and {alone} "
        f"alone; with fp8attn perplexity is within {max(map(abs, costs['fp8attn'].values())):.1%} in every case"
    )


@block("latent_needle")
def latent_needle_lost() -> str:
    """Needles that vLLM's FP8 kernel finds alone and in a batch, where latents have the largest mean."""
    rows = latest("latent_needle")[1]

    def found(impl: str, batch: int) -> str:
        row = rows[f"{LARGEST}-B{batch}-S131072", impl]
        return f"{row['accuracy'] * row['samples']:.0f} of {row['samples']}"

    theirs, ours = ([found(impl, batch) for batch in (1, 132)] for impl in ("vllm-flashmla-fp8", "fp8attn"))
    return f"{theirs[0]} alone and {theirs[1]} in a batch of 132 (fp8attn: {ours[0]} and {ours[1]})"


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
