"""README's numbers: the memory of a model that its readers know, and one table. A row of it has one unit and one
arithmetic.
"""

from __future__ import annotations

from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.formats.spec import PageSpec
from fp8attn_tools.plan import CacheShape

from ..rows import Rows, latest
from .public_models import TITLES, task_case
from .writing import at, block, table

LLAMA = CacheShape(full_layers=32, num_kv_heads=8, head_dim=128)  # Llama-3.1-8B
HEAD_DIM = 128
CACHES = ("scale-1-decode", "fp8attn-int8-keys-decode")  # read in 16-bit arithmetic
ANSWERS = ("bf16", "scale-1", "fp8attn-int8-keys")
ENGINES = ("vllm-bf16", "vllm-fp8", "fp8attn")
LONG_STEP = "llama-decode-B1-S131072"


@block()
def memory_of_llama() -> str:
    """Of K and V of 131,072 tokens, as `fp8attn plan` counts them."""
    bf16, fp8 = (LLAMA.nbytes(cache, 131072) / 2**30 for cache in ("bf16", "fp8"))
    return f"For Llama-3.1-8B at 128k tokens they take {bf16:.1f} GiB in BF16, {fp8:.1f} GiB here."


@block("public_models", "tasks", "vllm")
def headline() -> str:
    """BF16, a plain cast to FP8, and fp8attn."""
    public, tasks, engine = (latest(name)[1] for name in ("public_models", "tasks", "vllm"))
    page = PageSpec.of(HEAD_DIM).layout.nbytes / PAGE_SIZE
    body = [
        [
            f"K and V of a token, bytes for each KV head of {HEAD_DIM} channels",
            f"{4 * HEAD_DIM}",
            f"{2 * HEAD_DIM}",
            f"{page:.0f}",
        ]
    ]
    for text, case in perplexities(public).items():
        costs = (public[case, impl]["d_ppl_pct"] for impl in CACHES)
        body.append([f"perplexity above BF16, {text}, 8k tokens, %", "0", *(f"{cost:+.1f}" for cost in costs)])
    model, programs = answers(tasks)
    body.append(
        [
            f"programs of HumanEval that are right, of {programs[0]['samples']}, {model}",
            *(str(row["right"]) for row in programs),
        ]
    )
    times = (engine[LONG_STEP, impl]["ms"] for impl in ENGINES)
    body.append(["decode step in vLLM after 128k tokens, Llama-3.1-8B's shape, ms", *(f"{ms:.1f}" for ms in times)])
    return table([f"{latest('vllm')[0]}", "BF16", "plain cast to FP8", "fp8attn"], body)


@block("public_models", "tasks", "vllm")
def headline_commits() -> str:
    """Of the rows of `headline`, by commit, with the release of Triton."""
    public, tasks, engine = (latest(name)[1] for name in ("public_models", "tasks", "vllm"))
    measured = {
        "perplexity": at("public_models", [public[case, CACHES[-1]] for case in perplexities(public).values()]),
        "HumanEval": at("tasks", answers(tasks)[1][-1:]),
        "vLLM": at("vllm", [engine[LONG_STEP, ENGINES[-1]]]),
    }
    by_commit = {commit: [name for name in measured if measured[name] == commit] for commit in measured.values()}
    return (
        "Commits (and Triton): "
        + "; ".join(f"{', '.join(names)} {commit}" for commit, names in by_commit.items())
        + "."
    )


def perplexities(found: Rows) -> dict[str, str]:
    """The cases of perplexity, by what is read: a model without biases in its keys, and the larger one with biases that
    was measured.
    """
    large = "qwen15b-docs-S8192"
    with_biases = (
        {large: f"{TITLES['qwen15b']}, fp8attn's docs"}
        if (large, "bf16") in found
        else {"qwen-prose-S8192": f"{TITLES['qwen']}, prose"}
    )
    return {"SmolLM2-135M, code": "smollm2-code-S8192"} | {text: case for case, text in with_biases.items()}


def answers(found: Rows) -> tuple[str, list[dict]]:
    """The larger Qwen2.5-Coder that answered HumanEval, and its rows."""
    model = "qwen15b" if (task_case("qwen15b", "humaneval"), "bf16") in found else "qwen"
    return TITLES[model], [found[task_case(model, "humaneval"), impl] for impl in ANSWERS]


@block("public_models")
def measured_models() -> str:
    """The public models that quality was measured on, with their numbers of weights."""
    found = latest("public_models")[1]
    names = [name for model, name in TITLES.items() if any(case.startswith(f"{model}-") for case, _ in found)]
    return ", ".join(names[:-1]) + f" and {names[-1]}"
