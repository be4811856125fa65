"""README's results."""

from __future__ import annotations

from ..rows import latest, over
from .accuracy import errors, ours_off, single_level_off
from .kernels import SINGLE_LEVEL, STEP, TWO_LEVEL, engine_over, two_level
from .texts import memory
from .writing import at, block, number, span, table

LONG_STEP = "llama-decode-B1-S131072"


@block("public_models", "tasks", "needle", "vllm", "decode", "prefill", "engine", "demo")
def headline() -> str:
    """Results: of fp8attn, and of the system with which it is compared."""
    title, public = latest("public_models")
    tasks = latest("tasks")[1]
    impls = ("fp8attn-int8-keys-prefill", "scale-1-prefill", "llama-cpp-q8-0", "vllm-int8-per-token-head")
    plain, biased = ([public[case, impl] for impl in impls] for case in ("smollm2-code-S8192", "qwen-prose-S8192"))
    without, biases = ([f"{row['d_ppl_pct']:+.1f}%" for row in rows] for rows in (plain, biased))
    programs = [tasks["humaneval", impl] for impl in ("fp8attn-int8-keys", "bf16", "transformers-fp8")]
    needle, engine = latest("needle")[1], latest("vllm")[1]
    stressed = "niah_multikey_2-stress3-S131072"
    step, prompt = latest("decode")[1], latest("prefill")[1]
    off = errors(prompt.values(), "rel_err_mean1")
    needles = [needle[case, impl] for case, impl in (("niah_multikey_2-S131072", "fp8attn"), ("niah_multikey_2-S131072", "bf16"))]
    needles += [needle[stressed, impl] for impl in ("fp8attn", "fa3-fp8:calibrated")]
    right = [f"{100 * row['accuracy']:.4g}%" for row in needles]
    steps_of = ("B1-S131072", "B8-S32768", "B64-S8192")
    steps = [over(step, case, "fp8attn", "vllm-fa3-fp8-paged") for case in steps_of]
    prompts = ("D128-causal-S16384", "D128-causal-S65536", "gqa-causal-S131072")
    best = [over(step, case, "fp8attn", *STEP) for case in steps_of]
    single, double = ([over(prompt, case, "fp8attn", *impls) for case in prompts] for impls in (SINGLE_LEVEL, TWO_LEVEL))
    body = [
        [
            "memory of K and V, our model",
            memory().replace("**", ""),
            "the smallest unit is a page of 128 tokens",
            at("demo", latest("demo")[1].values()),
        ],
        [
            "perplexity over BF16's: SmolLM2, 8k tokens of code",
            without[0],
            f"a plain cast {without[1]}; by their definitions: llama.cpp's `q8_0` {without[2]}, vLLM's `int8_per_token_head` {without[3]}",
            at("public_models", plain),
        ],
        [
            "the same: Qwen2.5-Coder-0.5B, whose keys have biases, 8k tokens of prose",
            biases[0],
            f"a plain cast {biases[1]}; `q8_0` {biases[2]}, `int8_per_token_head` {biases[3]}",
            at("public_models", biased),
        ],
        [
            "right answers in HumanEval, the same model",
            f"{programs[0]['right']} of {programs[0]['samples']}; BF16 {programs[1]['right']}",
            f"transformers' FP8 cache {programs[2]['right']}",
            at("tasks", programs),
        ],
        [
            "right answers to RULER's needles at 128k tokens",
            f"{right[0]}; BF16 {right[1]}",
            f"with the strongest planted outliers {right[2]}; FA3's FP8 {right[3]}",
            at("needle", needles),
        ],
        [
            "speed of a decode step in vLLM: 128k tokens, Llama-3.1-8B's shape",
            f"{number(over(engine, LONG_STEP, 'fp8attn', 'vllm-fp8'))} times that of vLLM's FP8 cache",
            f"{number(over(engine, LONG_STEP, 'fp8attn', 'vllm-bf16'))} times that of its BF16 cache",
            at("vllm", [engine[LONG_STEP, "fp8attn"]]),
        ],
        [
            "speed of attention in decode steps: 8k to 128k tokens, 16-bit arithmetic",
            f"{span(steps)} times that of vLLM's FP8 kernel for pages",
            f"{span(best)} times that of the fastest of four FP8 kernels",
            at("decode", step.values()),
        ],
        [
            "speed of attention in mixed steps: 2k or 8k tokens of a prompt, and 32 to 256 decode steps",
            f"{engine_over('vllm-fa3-fp8', 'vllm-fa3-fp8-split')} times that of vLLM's FP8 kernel",
            f"{engine_over('flashinfer')} times FlashInfer's, {engine_over('hpc-ops')} times HPC-Ops'",
            at("engine", latest("engine")[1].values()),
        ],
        [
            "speed of attention in causal prompts: 16k to 128k tokens, head_dim 128",
            f"{span(single)} times that of the best single-level FP8 kernel",
            f"{span(double)} times that of {two_level()}",
            at("prefill", prompt.values()),
        ],
        [
            "relative error of the output in prompts of 1k to 128k tokens, values of mean 1",
            f"at most {ours_off(off)}",
            f"single-level FP8 {single_level_off(off, 131072)} at 128k",
            at("prefill", prompt.values()),
        ],
    ]
    return table(["", f"fp8attn ({title})", "", "commit (Triton)"], body)
