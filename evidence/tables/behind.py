"""Every peer beside fp8attn, and where it is ahead."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.peers import CALLS

from ..rows import Rows, latest, ratio
from .kernels import PREFILL
from .vllm import IMPLS as ENGINES
from .vllm import label
from .writing import block, table

EQUAL = 0.995  # a ratio that is written 1.00
# What is compared: the results file, our implementation, and what it is called.
COMPARED = (
    ("prefill", "fp8attn-q8", "prompts, queries in FP8"),
    ("prefill", "fp8attn", "prompts, 16-bit queries"),
    ("decode", "fp8attn", "decode steps"),
    ("latent", "fp8attn", "decode steps over latents"),
    ("engine", "fp8attn", "mixed steps"),
    ("sdpa", "fp8attn", "`scaled_dot_product_attention`, quantization included"),
    ("video", "fp8attn-call", "video, quantization included"),
    ("vllm", "fp8attn", "engines of vLLM"),
)
SHOWN = 5  # cases of a cell
CEILINGS = ("stream-ceiling",)


def beside(name: str, found: Rows) -> Iterable[str]:
    """The others' implementations of a file, in its order. Of video those that quantize within the call, or do not
    quantize.
    """
    whole = lambda impl: impl.endswith(("-call", "-bf16")) or impl == "torchao"  # noqa: E731
    for impl in dict.fromkeys(impl for _, impl in found if not impl.startswith("fp8attn") and impl not in CEILINGS):
        if name != "video" or whole(impl):
            yield impl


def title(name: str, impl: str) -> str:
    plain = impl.removesuffix("-split")
    call = CALLS.get(plain) or CALLS.get(f"{plain}-paged") or CALLS.get(plain.removesuffix("-call"))
    found = (
        ENGINES.get(impl)
        if name == "vllm"
        else call and call.title + " FP8" * bool(call.levels and "FP8" not in call.title)
    )
    return f"{found or impl}{', two calls' if impl.endswith('-split') else ''}"


def words(name: str, case: str) -> str:
    if name == "vllm":
        group, _, timed = case.partition("-")
        return label(timed) if group == "llama" else f"{label(timed)}, {group.replace('_', ' ')}"
    return PREFILL.get(case) or case.replace("-S", " ").replace("-", " ")


@block("prefill", "decode", "latent", "engine", "sdpa", "video", "vllm")
def behind() -> str:
    """The smallest and the largest ratio of speeds for each peer, and the cases in which it is ahead."""
    body, device = [], ""
    for name, ours, what in COMPARED:
        device, found = latest(name)
        cases = dict.fromkeys(case for case, _ in found)
        for impl in beside(name, found):
            both = {case: (found.get((case, ours)), found.get((case, impl))) for case in cases}
            ratios = {
                case: x
                for case, rows in both.items()
                if all(row and "ms" in row for row in rows) and (x := ratio(*rows))
            }
            if ratios:
                low, high = min(ratios.values()), max(ratios.values())
                ahead = [
                    f"{words(name, case)} ({x:.2f})"
                    for case, x in sorted(ratios.items(), key=lambda item: item[1])
                    if x < EQUAL
                ]
                listed = ahead[:SHOWN] + [f"and {len(ahead) - SHOWN} nearer to 1"] * (len(ahead) > SHOWN)
                body.append([what, title(name, impl), f"{low:.2f} to {high:.2f} ({len(ratios)})", ", ".join(listed)])
    return table([device, "beside", "speed over it (cases)", "it is ahead in"], body)
