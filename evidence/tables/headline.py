"""README's results, and their row in the comparison with other systems."""

from __future__ import annotations

from ..rows import latest, over
from .accuracy import errors, ours_off, single_level_off
from .kernels import SINGLE_LEVEL, STEP, TWO_LEVEL, engine_over, two_level
from .texts import memory
from .writing import block, number, span, table

LONG_STEP = "decode-B1-S131072"


@block
def headline() -> str:
    """Results: of fp8attn, and of the system with which it is compared."""
    title, model = latest("real_model")
    code = {impl: model["smollm2-S8192", impl] for impl in ("fp8attn-int8-keys-prefill", "scale-1-prefill", "transformers-fp8-decode")}
    ours, plain, theirs = (f"{row['d_ppl_pct']:+.1f}%" for row in code.values())
    needle, engine = latest("needle")[1], latest("vllm")[1]
    stressed = "niah_multikey_2-stress3-S131072"
    step, prompt = latest("decode")[1], latest("prefill")[1]
    off = errors(prompt.values(), "rel_err_mean1")
    share = lambda case, impl: f"{100 * needle[case, impl]['accuracy']:.4g}%"  # noqa: E731
    steps_of = ("B1-S131072", "B8-S32768", "B64-S8192")
    steps = [over(step, case, "fp8attn", "vllm-fa3-fp8-paged") for case in steps_of]
    prompts = ("D128-causal-S16384", "D128-causal-S65536", "gqa-causal-S131072")
    best = [over(step, case, "fp8attn", *STEP) for case in steps_of]
    single, double = ([over(prompt, case, "fp8attn", *impls) for case in prompts] for impls in (SINGLE_LEVEL, TWO_LEVEL))
    body = [
        ["bytes of a token", memory().replace("**", ""), "one page of 128 tokens is the smallest unit"],
        ["perplexity of SmolLM2, 8k tokens of code", f"{ours} over BF16", f"a plain cast {plain}; transformers' FP8 cache {theirs}"],
        [
            "RULER's needles at 128k tokens",
            " and BF16 ".join(share("niah_multikey_2-S131072", impl) for impl in ("fp8attn", "bf16")) + " right",
            f"with the strongest planted outliers {share(stressed, 'fp8attn')}, FA3's FP8 {share(stressed, 'fa3-fp8:calibrated')}",
        ],
        [
            "decode step in vLLM at 128k tokens, Llama-3.1-8B's shape",
            f"{number(over(engine, LONG_STEP, 'fp8attn', 'vllm-fp8'))} times vLLM's FP8 cache",
            f"{number(over(engine, LONG_STEP, 'fp8attn', 'vllm-bf16'))} times its BF16",
        ],
        [
            "decode, 8k to 128k tokens, in 16-bit arithmetic",
            f"{span(steps)} times vLLM's paged FP8",
            f"{span(best)} times the fastest of four FP8 kernels",
        ],
        [
            "a prompt's chunk of 2k or 8k tokens beside 32 to 256 decode steps",
            f"{engine_over('vllm-fa3-fp8', 'vllm-fa3-fp8-split')} times vLLM's FP8 kernel, in one call or two",
            f"{engine_over('flashinfer')} times FlashInfer's, {engine_over('hpc-ops')} times HPC-Ops'",
        ],
        [
            "causal prefill, 16k to 128k tokens, head_dim 128",
            f"{span(single)} times the best single-level FP8",
            f"{span(double)} times {two_level()}",
        ],
        [
            "error of prefill, V of mean 1",
            f"at most {ours_off(off)}, 1k to 128k tokens",
            f"single-level FP8 {single_level_off(off, 131072)} at 128k",
        ],
    ]
    return table(["", f"fp8attn ({title})", ""], body)


@block
def smollm2_beside() -> str:
    """Cells of a row, of the same text: fp8attn, transformers' cache and a plain cast, which is FP8 with scales of one."""
    found = latest("real_model")[1]
    impls = ("fp8attn-int8-keys-prefill", "transformers-fp8-decode", "scale-1-prefill")
    ours, theirs, plain = (f"{found['smollm2-S8192', impl]['d_ppl_pct']:+.1f}%" for impl in impls)
    return f"{ours} | {theirs} | {plain} (a plain cast)"
