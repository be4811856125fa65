"""What 8 bits cost models that read text: perplexity, divergence, tokens, memory."""

from __future__ import annotations

from ..rows import latest
from .writing import block, table

STORED = {  # of `real_model`
    "fp8attn-int8-keys": "INT8 keys, rotated", "fp8attn-e4m3-keys": "E4M3 keys, rotated",
    "fp8attn-e4m3-plain": "E4M3 keys, not rotated",
    "scale-1": "a plain cast to E4M3", "transformers-fp8": "transformers' FP8 cache",
}  # fmt: skip
TEXTS = {
    "smollm2-S2048": "code, 2k", "smollm2-S8192": "code, 8k", "smollm2-prose-S8192": "English prose, 8k",
    "stdlib-S4096": "our model, 4k",
    "stdlib-S131072": "our model, 128k",
}  # fmt: skip


def cost(row: dict | None) -> str:
    """Perplexity beside BF16 and divergence beyond BF16's own. Nothing: it was not measured, or a scale did not fit."""
    if row is None or row["d_ppl_pct"] is None:
        return ""
    return f"{row['d_ppl_pct']:+.2f} ± {row['d_ppl_se']:.2f}%, {1e3 * row['kl_excess']:.1f}"


@block("real_model")
def real_model() -> str:
    """Perplexity beside BF16 and divergence beyond BF16's own, by what is stored and how it is read."""
    title, found = latest("real_model")
    cases = [case for case in TEXTS if (case, "bf16") in found]

    body = [
        [stored, how, *(cost(found.get((case, f"{name}-{how}"))) for case in cases)]
        for name, stored in STORED.items() for how in ("prefill", "decode")
    ]  # fmt: skip
    return table(["stored", f"read ({title})", *(TEXTS[case] for case in cases)], body)


def demo(name: str, impl: str = "fp8") -> float:
    """A value of `fp8attn demo`."""
    return latest("demo")[1][f"demo-{name}", impl]["value"]


@block("demo")
def memory() -> str:
    fp8, bf16 = (demo("bytes_per_token", impl) for impl in ("fp8", "bf16"))
    return f"{fp8:,.0f} bytes a token beside {bf16:,.0f} in BF16, **{fp8 / bf16:.1%}**"


@block("demo")
def demo_equal() -> str:
    cells, matched, count = (demo(name) for name in ("needle_cells_equal", "greedy_tokens_matched", "greedy_tokens"))
    return f"{'the same' if cells else 'not the same'} needles and {matched} of {count} greedy tokens alike"
