"""Every peer beside fp8attn, and where it is faster or more exact."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.peers import CALLS

from ..rows import Rows, latest
from .kernels import PREFILL
from .vllm import IMPLS as ENGINES
from .vllm import label
from .writing import block, span, table

EQUAL = 0.995  # a ratio that is written 1.00
# What is compared: the results file, our implementation, the key of its time, and what it is called.
COMPARED = (
    ("prefill", "fp8attn-q8", "ms", "prompts, queries in FP8"),
    ("prefill", "fp8attn", "ms", "prompts, 16-bit queries"),
    ("decode", "fp8attn", "ms", "decode steps"),
    ("latent", "fp8attn", "ms", "decode steps over latents"),
    ("wide", "fp8attn-latents", "ms", "head_dim 512, keys that follow from values"),
    ("wide", "fp8attn", "ms", "head_dim 512, K and V"),
    ("latent_vllm", "fp8attn", "attention_ms", "attention over latents in steps of vLLM"),
    ("engine", "fp8attn", "ms", "mixed steps"),
    ("sdpa", "fp8attn", "ms", "`scaled_dot_product_attention`, quantization included"),
    ("video", "fp8attn-call", "ms", "video, quantization included"),
    ("vllm", "fp8attn", "ms", "engines of vLLM"),
)
# What errors are compared of: the results file, our implementation, the key, and what it is called.
ERRORS = (
    ("prefill", "fp8attn", "rel_err", "prompts, values of mean 0"),
    ("prefill", "fp8attn", "rel_err_mean1", "prompts, values of mean 1"),
    ("decode", "fp8attn", "rel_err", "decode steps"),
    ("latent", "fp8attn", "rel_err_0", "decode steps over latents of mean 0"),
    ("latent", "fp8attn", "rel_err", "decode steps over latents of mean 1"),
    ("wide", "fp8attn-latents", "rel_err", "head_dim 512, keys that follow from values"),
    ("wide", "fp8attn", "rel_err", "head_dim 512, K and V"),
    ("video", "fp8attn-call", "noise", "video, values of mean 0, beside exact attention over the inputs"),
    ("video", "fp8attn-call", "noise_mean1", "video, values of mean 1, beside exact attention over the inputs"),
)
TIMED = tuple(dict.fromkeys(name for name, *_ in COMPARED))
LEAST = 1.1  # a peer whose error is not so many times smaller is as exact
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
        if name.endswith("vllm")
        else call and call.title + " FP8" * bool(call.levels and "8" not in call.title)
    )
    return f"{found or impl}{', two calls' if impl.endswith('-split') else ''}"


def words(name: str, case: str) -> str:
    if name == "vllm":
        group, _, timed = case.partition("-")
        return label(timed) if group == "llama" else f"{label(timed)}, {group.replace('_', ' ')}"
    return PREFILL.get(case) or case.replace("-S", " ").replace("-", " ")


def rows_of(name: str, ours: str, key: str) -> Iterable[tuple[str, dict[str, tuple[dict, dict]]]]:
    """The others of a file, and by case our row and theirs, both with the key."""
    found = latest(name)[1]
    for impl in beside(name, found):
        both = {case: (found.get((case, ours)), found.get((case, impl))) for case in dict.fromkeys(c for c, _ in found)}
        if cases := {case: rows for case, rows in both.items() if all(row and key in row for row in rows)}:
            yield impl, cases


def ratios_of(name: str, ours: str, key: str) -> dict[str, dict[str, float]]:
    """The speed of ours over each other's in a file, by its title and by case."""
    return {
        title(name, impl): {case: theirs[key] / own[key] for case, (own, theirs) in cases.items()}
        for impl, cases in rows_of(name, ours, key)
    }


@block(*TIMED)
def behind() -> str:
    """The smallest and the largest ratio of speeds for each peer, and in how many cases it is ahead."""
    body = [
        [what, peer, f"{min(found.values()):.2f} to {max(found.values()):.2f}", f"{len(ahead)} of {len(found)}"]
        for name, ours, key, what in COMPARED
        for peer, found in ratios_of(name, ours, key).items()
        for ahead in [[x for x in found.values() if x < EQUAL]]
    ]
    return table([latest("prefill")[0], "beside", "speed over it", "cases in which it is ahead"], body)


@block(*TIMED)
def ahead() -> str:
    """Every case in which a peer is ahead, with the speed over it; the worst case of a file first."""
    body = []
    for name, ours, key, what in COMPARED:
        cases: dict[str, dict[str, float]] = {}
        for peer, found in ratios_of(name, ours, key).items():
            for case in (case for case, x in found.items() if x < EQUAL):
                cases.setdefault(case, {})[peer] = found[case]
        for case, found in sorted(cases.items(), key=lambda item: min(item[1].values())):
            body.append([what, words(name, case), ", ".join(f"{peer} {x:.2f}" for peer, x in found.items())])
    return table([latest("prefill")[0], "case", "speed over those that are ahead"], body)


@block(*dict.fromkeys(name for name, *_ in ERRORS))
def more_exact() -> str:
    """The peers that are more exact in some case, with the errors of both."""
    body = []
    for name, ours, key, what in ERRORS:
        for impl, cases in rows_of(name, ours, key):
            errors = [[row[key] for row in rows] for rows in zip(*cases.values(), strict=True)]
            ahead = [case for case, (own, theirs) in cases.items() if theirs[key] * LEAST < own[key]]
            if ahead:
                spans = [span(each, ".2%") for each in errors]
                body.append([what, title(name, impl), *spans, f"{len(ahead)} of {len(cases)}"])
    return table([latest("prefill")[0], "beside", "error of fp8attn", "its error", "it is more exact in (cases)"], body)
