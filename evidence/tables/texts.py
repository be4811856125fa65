"""What 8 bits cost models that read text: perplexity, divergence, tokens, memory."""

from __future__ import annotations

import math
import statistics

from benchmarks.problem import KEYS

from ..results import RESULTS
from ..rows import devices, latest, rows_of
from .writing import block, table

STORED = {  # of `real_model`
    "fp8attn-int8-keys": "INT8 keys, rotated", "fp8attn-e4m3-keys": "E4M3 keys, rotated", "fp8attn-e4m3-plain": "E4M3 keys, not rotated",
    "scale-1": "a plain cast to E4M3", "transformers-fp8": "transformers' FP8 cache",
}  # fmt: skip
TEXTS = {
    "smollm2-S2048": "code, 2k", "smollm2-S8192": "code, 8k", "smollm2-prose-S8192": "English prose, 8k", "stdlib-S4096": "our model, 4k",
    "stdlib-S131072": "our model, 128k",
}  # fmt: skip


@block
def real_model() -> str:
    """Perplexity beside BF16 and divergence beyond BF16's own, by what is stored and how it is read."""
    title, found = latest("real_model")
    cases = [case for case in TEXTS if (case, "bf16") in found]

    def cell(case: str, impl: str) -> str:
        row = found.get((case, impl))
        if row is None or row["d_ppl_pct"] is None:
            return ""
        return f"{row['d_ppl_pct']:+.2f} ± {row['d_ppl_se']:.2f}%, {1e3 * row['kl_excess']:.1f}"

    body = [
        [stored, how, *(cell(case, f"{name}-{how}") for case in cases)] for name, stored in STORED.items() for how in ("prefill", "decode")
    ]
    return table(["stored", f"read ({title})", *(TEXTS[case] for case in cases)], body)


@block
def agreement() -> str:
    """How far the log-probabilities of the same tokens are apart when they are prefilled and when they are decoded."""
    (title, found), named = latest("agreement"), {"bf16": "BF16 (FlashAttention-3)"} | STORED
    head = [title, "stored", "mean difference of log p", "largest", "KL, 1e-3 nats", "same likeliest token"]
    body = [
        [TEXTS[case], named[impl], f"{row['dlogp_mean']:.3f}", f"{row['dlogp_max']:.2f}", f"{1e3 * row['kl']:.2f}", f"{row['top1']:.1%}"]
        for (case, impl), row in found.items()
    ]
    return table(head, body)


@block
def speculative() -> str:
    """Prompts whose tokens equal plain greedy decoding's."""
    (title, found), impls = latest("speculative"), ("bf16", *KEYS)
    cell = lambda row: "" if row is None else f"{row['equal']} of {row['prompts']}"  # noqa: E731
    cases = dict.fromkeys(case for case, _ in found)
    return table([title, *impls], [[case.replace("-", ", ", 1), *(cell(found.get((case, impl))) for impl in impls)] for case in cases])


@block
def smollm2_loss() -> str:
    """What INT8 keys cost the public model through prefill, at 8,192 tokens."""
    title, found = latest("real_model")
    code, prose = (found[case, "fp8attn-int8-keys-prefill"]["d_ppl_pct"] for case in ("smollm2-S8192", "smollm2-prose-S8192"))
    return f"{code:+.1f}% on code and {prose:+.1f}% on English prose ({title})"


def losses(*impls: str) -> str:
    def line(of: str, impl: str, change: float, deviation: float, kl: float, same: float) -> list[str]:
        return [of, impl, f"{100 * change:+.2f} ± {100 * deviation:.2f}%", f"{kl:.4f}", f"{same:.1%}"]

    body = []
    for title, here in devices("perplexity").items():
        for row in here.values():
            if row["impl"] in impls:
                of = f"{row['context']:,}, {'prefilled' if row['mode'] == 'chunks' else 'decoded'}, {title}"
                body.append(line(of, row["impl"], row["change"], row["standard_error"], row["kl"], row["top1_agreement"]))
    for title, here in devices("drift").items():
        found = list(here.values())
        start, changes = found[0]["start"], [math.expm1(row["nll"] - row["baseline_nll"]) for row in found]
        of = f"{found[-1]['stop'] - start:,} decoded behind {start:,}, pages copied, reordered, truncated, {title}"
        kl, same = (statistics.fmean(row[key] for row in found) for key in ("kl", "top1_agreement"))
        body.append(line(of, found[0]["impl"], statistics.fmean(changes), statistics.stdev(changes) / len(changes) ** 0.5, kl, same))
    return table(["tokens of held-out code", "cache", "perplexity over BF16's", "KL, nats", "same likeliest token"], body)


@block
def perplexity() -> str:
    return losses("fp8attn")


@block
def perplexity_all() -> str:
    return losses(*KEYS, "fp8attn-static")


@block
def drift_operations() -> str:
    """Mean KL divergence of the segments after each kind of operation."""
    by: dict[str, list[float]] = {}
    for row in latest("drift")[1].values():
        by.setdefault(row["operation"] or "none", []).append(row["kl"])
    return ", ".join(f"{statistics.fmean(kls):.4f} after {what}" for what, kls in by.items())


def demos(name: str, impl: str = "fp8") -> list:
    """A value of `fp8attn demo` on each device, CPUs too."""
    return [rows_of(path)[f"demo-{name}", impl]["value"] for path in sorted(RESULTS.glob("*/demo.json"))]


@block
def memory() -> str:
    fp8, bf16 = (demos("bytes_per_token", impl)[0] for impl in ("fp8", "bf16"))
    return f"{fp8:,.0f} bytes a token beside {bf16:,.0f} in BF16, **{fp8 / bf16:.1%}**"


@block
def demo_equal() -> str:
    cells, matched, count = (min(demos(name)) for name in ("needle_cells_equal", "greedy_tokens_matched", "greedy_tokens"))
    return f"{'the same' if cells else 'not the same'} needles and {matched} of {count} greedy tokens alike"


@block
def bits() -> str:
    row = latest("model")[1]["bits_per_byte-all", "stdlib-llama"]
    return f"{row['model']:.2f} bits per byte (xz -9e {row['xz_9e']:.2f})"
