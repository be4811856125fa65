"""The tables and numbers of README.md and docs/ that come from results.

    python -m benchmarks.readme            # writes them anew
    python -m benchmarks.readme --check    # exits with 1 if a file is not up to date

The text between `<!-- results: NAME -->` and `<!-- /results -->` is what `BLOCKS[NAME]` gives. A ratio is of rows that one command timed
together (`together`): there is no other way to write one here.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from pathlib import Path

from .fingerprint import ROOT
from .problem import KEYS
from .results import RESULTS

FILES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
BLOCK = re.compile(r"<!-- results: ([\w-]+) -->(\n?).*?<!-- /results -->", re.DOTALL)
Rows = dict[tuple[str, str], dict]
Cell = Callable[[Rows, str], str]  # of a device's rows and a case


# Rows


@cache
def rows_of(path: Path) -> Rows:
    """The rows of a results file by case and implementation."""
    return {(row["case"], row["impl"]): row for row in json.loads(path.read_text())["rows"]}


def devices(name: str) -> dict[str, Rows]:
    """The rows of the GPUs that have a results file, by the title of the GPU."""
    return {path.parent.name.upper(): rows_of(path) for path in sorted(RESULTS.glob(f"*/{name}.json")) if path.parent.name != "cpu"}


def latest(name: str) -> tuple[str, Rows]:
    """The title of one device, and its rows: of several, the last by name."""
    return list(devices(name).items())[-1]


def every(name: str) -> list[dict]:
    """The rows of all GPUs."""
    return [row for here in devices(name).values() for row in here.values()]


def together(a: dict, b: dict) -> bool:
    """Whether two rows were timed in turns."""
    return all(a.get(part) == b.get(part) for part in ("case", "provenance", "timed"))


def ratio(ours: dict | None, theirs: dict | None) -> float | None:
    """How many times as fast one row is as another; None unless they were timed together."""
    return theirs["ms"] / ours["ms"] if ours and theirs and together(ours, theirs) else None


def over(found: Rows, case: str, impl: str, *others: str) -> float | None:
    """`ratio` of a case's row over the fastest of others'."""
    theirs = [found[case, other] for other in others if (case, other) in found]
    return ratio(found.get((case, impl)), min(theirs, key=lambda row: row["ms"], default=None))


def over_bf16(found: Rows, case: str, impl: str) -> float | None:
    """A row of `sdpa` over the best BF16 kernel that it was timed with; `fp8attn` is the graph where there is one."""
    graph = f"{impl}-graph"
    return over(found, case, graph if (case, graph) in found else impl, "fa3-bf16", "cudnn-bf16")


# How things are written


def number(x: float | None, form: str = ".2f") -> str:
    return "" if x is None else format(x, form)


def value(found: Rows, case: str, impl: str, key: str, form: str = ".2f", factor: float = 1) -> str:
    x = found.get((case, impl), {}).get(key)
    return "" if x is None else format(factor * x, form)


def span(xs: Iterable[float | None], form: str = ".2f") -> str:
    """The least and the largest."""
    found = [x for x in xs if x is not None]
    low, high = format(min(found), form), format(max(found), form)
    return low if low == high else f"{low} to {high}"


def tokens(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 else f"{n:,}"


def lengths(found: Iterable[tuple[str, str]], pattern: str) -> dict[int, str]:
    """Cases by the number that a pattern captures, in its order."""
    return dict(sorted({int(match[1]): case for case, _ in found if (match := re.fullmatch(pattern, case))}.items()))


def table(head: Iterable[str], body: Iterable[Iterable[str]]) -> str:
    """A table, without columns that hold nothing."""
    lines = [list(head), *map(list, body)]
    filled = [any(line[column] for line in lines[1:]) for column in range(len(lines[0]))]
    lines = [[cell for cell, there in zip(line, filled, strict=True) if there] for line in lines]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |").replace("|  |", "| |")


def beside(name: str, first: str, lines: Mapping, columns: Mapping[str, Callable]) -> str:
    """A table with a line for each of `lines`, and for each device all the columns; the first one's head has the device's title.

    Args:
        lines: by what names the line, its label.
        columns: by head, the cell of a device's rows and what names the line.
    """
    heads, (begin, *rest) = [first], columns
    for title in devices(name):
        heads += [f"{title}: {begin}", *rest]
    cells = [[cell(here, line) for here in devices(name).values() for cell in columns.values()] for line in lines]
    return table(heads, [[label, *found] for label, found in zip(lines.values(), cells, strict=True)])


# Kernels

PREFILL = {
    "D128-full-S16384": "16k full", "D128-causal-S16384": "16k causal", "D128-causal-S1024": "16 x 1k causal",
    "D128-causal-S4096": "4 x 4k causal", "D128-causal-S8192": "2 x 8k causal", "D128-causal-S65536": "64k causal",
    "gqa-causal-S16384": "16k causal, 32/8 heads", "gqa-causal-S131072": "128k causal, 32/8 heads",
    "chunked-2k-on-128k": "2k on 128k, 32/8 heads", "varlen-mix": "ragged, 32/8 heads", "D64-full-S16384": "16k full, head_dim 64",
    "D64-causal-S16384": "16k causal, head_dim 64", "D256-full-S16384": "16k full, head_dim 256",
    "D256-causal-S16384": "16k causal, head_dim 256",
}  # fmt: skip
SINGLE_LEVEL = ("fa3-fp8", "cudnn-fp8")
PREFILL_IMPLS = (*KEYS, "fp8attn-q8")  # queries in 16 bits, and in FP8


def decode() -> str:
    cases = {case: case.replace("-", ", ") for here in devices("decode").values() for case, _ in here}
    return beside("decode", "batch x context", cases, {
        "GB/s": lambda here, case: value(here, case, "fp8attn", "gbps", ".0f"),
        "over vLLM FP8, paged": lambda here, case: number(over(here, case, "fp8attn", "vllm-fa3-fp8-paged")),
        "of the ceiling": lambda here, case: number(over(here, case, "fp8attn", "stream-ceiling"), ".0%"),
    })  # fmt: skip


def decode_error() -> str:
    ours = max(row["rel_err"] for row in every("decode") if row["impl"] in KEYS)
    theirs = [row["rel_err"] for row in every("decode") if row["impl"].startswith("vllm-fa3-fp8")]
    return f"at most {ours:.1e} off; vLLM's FP8, which rounds Q and the weights, {span(theirs, '.1e')}"


def prefill() -> str:
    def tflops(impl: str) -> Cell:
        return lambda here, case: value(here, case, impl, "tflops", ".0f")

    return beside("prefill", "tokens", PREFILL, {
        "TFLOPS": tflops("fp8attn-q8"),
        "over the best single-level FP8": lambda here, case: number(over(here, case, "fp8attn-q8", *SINGLE_LEVEL)),
        "over vLLM FP8": lambda here, case: number(over(here, case, "fp8attn-q8", "vllm-fa3-fp8")),
        **{"16-bit queries" + (f", {keys.upper()} keys" if impl != "fp8attn" else ""): tflops(impl) for impl, keys in KEYS.items()},
    })  # fmt: skip


def prefill_256() -> str:
    made = [
        f"{number(over(here, case, 'fp8attn-q8', 'fa3-fp8'))} ({mask}, {title})"
        for title, here in devices("prefill").items() for mask in ("full", "causal")
        for case in [f"D256-{mask}-S16384"] if (case, "fp8attn-q8") in here
    ]  # fmt: skip
    return ", ".join(made)


def sdpa() -> str:
    """One table for all devices: kinds of calls by lengths."""
    kinds = {"full": "full", "causal": "causal", "gqa-full": "full, 8 KV heads", "gqa-causal": "causal, 8 KV heads"}
    at = sorted({n for here in devices("sdpa").values() for n in lengths(here, r"(?:gqa-)?(?:full|causal)-S(\d+)")})
    body = [
        [f"{title}, {what}", *(number(over_bf16(here, f"{kind}-S{n}", "fp8attn")) for n in at)]
        for title, here in devices("sdpa").items() for kind, what in kinds.items()
    ]  # fmt: skip
    return table(["over BF16, tokens", *map(tokens, at)], body)


def append() -> str:
    words = {"step": "a decode step's append", "prompt": "a prompt's append", "quantize": "`quantize`"}
    found, lines = {key for here in devices("append").values() for key in here}, {}
    for case in dict.fromkeys(case for here in devices("append").values() for case, _ in here):
        for impl in (*KEYS, *(f"{impl}-rope" for impl in KEYS)):
            if (case, impl) in found:
                kind, *details = sorted(case.split("-"), key=lambda part: part not in words)
                details += impl.replace("fp8attn", "").replace("-e4m3-keys", "-E4M3 keys").split("-")[1:]
                lines[case, impl] = f"{words[kind]}: {', '.join(details)}"
    return beside("append", "", lines, {
        "us": lambda here, line: value(here, *line, "ms", ".1f", 1e3),
        "GB/s": lambda here, line: value(here, *line, "gbps", ".0f"),
        "of the ceiling": lambda here, line: number(over(here, *line, "ceiling"), ".0%"),
    })  # fmt: skip


def portable() -> str:
    found = [row for row in every("slice") if row["impl"] == "fp8attn-triton"]
    gbps, tflops = ([row[unit] for row in found if unit in row] for unit in ("gbps", "tflops"))
    return f"Decode {span(gbps, '.0f')} GB/s, prefill {span(tflops, '.0f')} TFLOPS"


# Accuracy


def prefill_rounding() -> str:
    """128 queries of 4,096 keys and more, by V's mean and implementation."""
    errors: dict[tuple[str, str], list[float]] = {}
    for row in every("accuracy"):
        if (match := re.fullmatch(r"full-(mean\d)-D128-S(\d+)", row["case"])) and int(match[2]) >= 4096:
            errors.setdefault((match[1], row["impl"]), []).append(row["rel_err"])
    q8, plain = (span((100 * error for error in errors["mean0", impl]), ".1f") for impl in ("fp8attn-q8", "fp8attn"))
    most = max(error for (data, impl), found in errors.items() for error in found if data == "mean1" and impl in PREFILL_IMPLS)
    return f"normal V without a mean is {q8}% off ({plain}% with Q in 16 bits, whose rounding then counts), V of mean 1 at most {most:.2%}"


def errors(rows: Iterable[dict], key: str) -> list[tuple[str, str, float]]:
    """Case, implementation and relative error of rows."""
    return [(row["case"], row["impl"], row[key]) for row in rows]


def ours_off(found: Iterable[tuple[str, str, float]]) -> str:
    return f"{max(error for _, impl, error in found if impl in PREFILL_IMPLS):.2%}"


def single_level_off(found: Iterable[tuple[str, str, float]], length: int) -> str:
    """The errors of single-level kernels over so many tokens."""
    return span((error for case, impl, error in found if impl in SINGLE_LEVEL and case.endswith(f"S{length}")), ".0%")


def prefill_error() -> str:
    """On V of mean 1, by both benchmarks that measure it."""
    found = errors(every("prefill"), "rel_err_mean1")
    found += errors((row for row in every("accuracy") if re.match("(causal|full)-mean1", row["case"])), "rel_err")
    short, long = (single_level_off(found, n) for n in (16384, 131072))
    return f"single-level kernels are {short} off at 16k tokens and {long} at 128k, ours at most {ours_off(found)} at any length"


def long_error() -> str:
    """Of single-level kernels over 131,072 tokens, on V of mean 1."""
    title, found = latest("prefill")
    return f"{single_level_off(errors(found.values(), 'rel_err_mean1'), 131072)} off ({title}, values of mean 1)"


def cast_loss() -> str:
    """What a plain cast to E4M3 costs the public model, at 8,192 tokens."""
    title, found = latest("real_model")
    losses = [row["d_ppl_pct"] for (case, impl), row in found.items() if case.endswith("S8192") and impl.startswith("scale-1-")]
    return f"{span(losses, '.1f')}% of perplexity at 8,192 tokens (SmolLM2, {title})"


def sums() -> dict[str, dict[int, float]]:
    """The errors of `accumulation` by implementation and length."""
    _, here = latest("accumulation")
    cases = lengths(here, r"S(\d+)")
    return {impl: {n: here[case, impl]["rel_err"] for n, case in cases.items()} for impl in dict.fromkeys(impl for _, impl in here)}


def accumulation() -> str:
    body = [[impl, *(f"{error:.1%}" for error in errors.values())] for impl, errors in sums().items()]
    return table([f"{latest('accumulation')[0]}; keys", *(f"{n:,}" for n in next(iter(sums().values())))], body)


def doctor() -> str:
    from fp8attn.accumulation import Accumulation

    found = {f"accumulation of {impl}": Accumulation(errors) for impl, errors in sums().items()}
    lines = [f"{'ok ' if x.levels == 2 else '!  '} {name:{max(map(len, found))}s}  {x}" for name, x in found.items()]
    return "\n".join(["```", *lines, "```"])


STORED = {  # of `real_model`
    "fp8attn-int8-keys": "INT8 keys, rotated", "fp8attn-e4m3-keys": "E4M3 keys, rotated", "fp8attn-e4m3-plain": "E4M3 keys, not rotated",
    "scale-1": "a plain cast to E4M3", "transformers-fp8": "transformers' FP8 cache",
}  # fmt: skip
TEXTS = {
    "smollm2-S2048": "code, 2k", "smollm2-S8192": "code, 8k", "smollm2-prose-S8192": "English prose, 8k", "stdlib-S4096": "our model, 4k",
    "stdlib-S131072": "our model, 128k",
}  # fmt: skip


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


def agreement() -> str:
    """How far the log-probabilities of the same tokens are apart when they are prefilled and when they are decoded."""
    (title, found), named = latest("agreement"), {"bf16": "BF16 (FlashAttention-3)"} | STORED
    head = [title, "stored", "mean difference of log p", "largest", "KL, 1e-3 nats", "same likeliest token"]
    body = [
        [TEXTS[case], named[impl], f"{row['dlogp_mean']:.3f}", f"{row['dlogp_max']:.2f}", f"{1e3 * row['kl']:.2f}", f"{row['top1']:.1%}"]
        for (case, impl), row in found.items()
    ]
    return table(head, body)


def speculative() -> str:
    """Prompts whose tokens equal plain greedy decoding's."""
    (title, found), impls = latest("speculative"), ("bf16", *KEYS)
    cell = lambda row: "" if row is None else f"{row['equal']} of {row['prompts']}"  # noqa: E731
    cases = dict.fromkeys(case for case, _ in found)
    return table([title, *impls], [[case.replace("-", ", ", 1), *(cell(found.get((case, impl))) for impl in impls)] for case in cases])


def smollm2_loss() -> str:
    """What INT8 keys cost the public model through prefill, at 8,192 tokens."""
    title, found = latest("real_model")
    code, prose = (found[case, "fp8attn-int8-keys-prefill"]["d_ppl_pct"] for case in ("smollm2-S8192", "smollm2-prose-S8192"))
    return f"{code:+.1f}% on code and {prose:+.1f}% on English prose ({title})"


def headline() -> str:
    """Six results: ours, and what it is beside."""
    title, model = latest("real_model")
    code = {impl: model["smollm2-S8192", impl] for impl in ("fp8attn-int8-keys-prefill", "scale-1-prefill", "transformers-fp8-decode")}
    ours, plain, theirs = (f"{row['d_ppl_pct']:+.1f}%" for row in code.values())
    needle = latest("needle")[1]
    stressed = "niah_multikey_2-stress3-S131072"
    step, prompt = latest("decode")[1], latest("prefill")[1]
    off = errors(prompt.values(), "rel_err_mean1")
    share = lambda case, impl: f"{100 * needle[case, impl]['accuracy']:.4g}%"  # noqa: E731
    steps = [ratio(step[case, "fp8attn"], step.get((case, "vllm-fa3-fp8-paged"))) for case in ("B1-S131072", "B8-S32768", "B64-S8192")]
    prompts = ("D128-causal-S16384", "D128-causal-S65536", "gqa-causal-S131072")
    single, double = ([over(prompt, case, "fp8attn", *impls) for case in prompts] for impls in (SINGLE_LEVEL, ("vllm-fa3-fp8",)))
    body = [
        ["bytes of a token", memory().replace("**", ""), "one page of 128 tokens is the smallest unit"],
        ["perplexity of SmolLM2, 8k tokens of code", f"{ours} over BF16", f"a plain cast {plain}; transformers' FP8 cache {theirs}"],
        [
            "RULER's needles at 128k tokens",
            " and BF16 ".join(share("niah_multikey_2-S131072", impl) for impl in ("fp8attn", "bf16")) + " right",
            f"with the strongest planted outliers {share(stressed, 'fp8attn')}, FA3's FP8 {share(stressed, 'fa3-fp8:calibrated')}",
        ],
        ["decode, 8k to 128k tokens", f"{span(steps)} times vLLM's paged FP8", "in 16-bit arithmetic"],
        [
            "causal prefill, 16k to 128k tokens, head_dim 128",
            f"{span(single)} times the best single-level FP8",
            f"{span(double)} times vLLM's two-level FP8",
        ],
        [
            "error of prefill, V of mean 1",
            f"at most {ours_off(off)}, 1k to 128k tokens",
            f"single-level FP8 {single_level_off(off, 131072)} at 128k",
        ],
    ]
    return table(["", f"fp8attn ({title})", ""], body)


def perplexity(*impls: str) -> str:
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


def drift_operations() -> str:
    """Mean KL divergence of the segments after each kind of operation."""
    by: dict[str, list[float]] = {}
    for row in latest("drift")[1].values():
        by.setdefault(row["operation"] or "none", []).append(row["kl"])
    return ", ".join(f"{statistics.fmean(kls):.4f} after {what}" for what, kls in by.items())


def demos(name: str, impl: str = "fp8") -> list:
    """A value of `fp8attn demo` on each device, CPUs too."""
    return [rows_of(path)[f"demo-{name}", impl]["value"] for path in sorted(RESULTS.glob("*/demo.json"))]


def memory() -> str:
    fp8, bf16 = (demos("bytes_per_token", impl)[0] for impl in ("fp8", "bf16"))
    return f"{fp8:,.0f} bytes a token beside {bf16:,.0f} in BF16, **{fp8 / bf16:.1%}**"


def demo_equal() -> str:
    cells, matched, count = (min(demos(name)) for name in ("needle_cells_equal", "greedy_tokens_matched", "greedy_tokens"))
    return f"{'the same' if cells else 'not the same'} needles and {matched} of {count} greedy tokens alike"


def bits() -> str:
    row = latest("model")[1]["bits_per_byte-all", "stdlib-llama"]
    return f"{row['model']:.2f} bits per byte (xz -9e {row['xz_9e']:.2f})"


# Retrieval

SYSTEMS = {
    "bf16": "bf16", "fp8attn": "fp8attn", "fp8attn-e4m3-keys": "fp8attn, E4M3 keys",
    "fa3-fp8": "FA3 FP8, scales of one", "fa3-fp8:calibrated": "FA3 FP8, calibrated", "fa3-fp8:means": "FA3 FP8, scales of one, means off",
    "fa3-fp8:calibrated+means": "FA3 FP8, calibrated, means off", "vllm-fa3-fp8": "vLLM's FA3, scales of one",
    "vllm-fa3-fp8:calibrated": "vLLM's FA3, calibrated",
}  # fmt: skip
PAIR = {name: name for name in ("bf16", "fp8attn")}
NOT_ASKED = "Not asked since keys are rotated."
STRESS = {"as trained": "niah_multikey_2-S131072"} | {f"stress {n}": f"niah_multikey_2-stress{n}-S131072" for n in (1, 2, 3)}


def right(cases: Mapping[str, str], impls: Mapping[str, str], head: str, *, paired: bool = False) -> str:
    """Right answers: a line for each implementation, a column for each case.

    Args:
        cases, impls: by head and by name: a case, and a label.
        paired: a line more says of how many samples one alone of BF16 and `fp8attn` is right, and McNemar's p.
    """
    found = latest("needle")[1]
    if not cases:
        return NOT_ASKED
    body = [[label, *(answers(found.get((case, impl))) for case in cases.values())] for impl, label in impls.items()]
    if paired:
        ours = [found[case, "fp8attn"] for case in cases.values()]
        body.append(["lost, won (p)", *(f"{row['lost']}, {row['won']} ({row['p']:.2g})" for row in ours)])
    return table([f"{head}, % right (samples)", *cases], body)


def answers(row: dict | None) -> str:
    return "" if row is None else f"{100 * row['accuracy']:.4g} ({row['samples']})"


def needle_lengths(task: str) -> dict[str, str]:
    """The cases of a task that `fp8attn` has answered, by length."""
    found = latest("needle")[1]
    return {f"{n:,}": case for n, case in lengths(found, rf"{task}-S(\d+)").items() if (case, "fp8attn") in found}


def other_tasks() -> str:
    found = latest("needle")[1]
    body = [
        [f"`{task}`, {n}", *(answers(found.get((case, impl))) for impl in PAIR)]
        for task in ("niah_single_1", "niah_multikey_3") for n, case in needle_lengths(task).items()
    ]  # fmt: skip
    return table(["% right (samples)", *PAIR], body) if body else NOT_ASKED


# Models and the host


def llama_decode() -> str:
    body = []
    for title, here in devices("llama_decode").items():
        for batch, length in ((1, 2048), (1, 131072), (8, 8192), (32, 2048)):
            line = here[f"line-B{batch}", "fp8attn"]
            times = [value(here, f"step-B{batch}-S{length}", impl, "ms", ".1f") for impl in (line["beside"], "vllm-fp8", "fp8attn")]
            body.append([title, str(batch), f"{length:,}", *times, number(line["slope_ratio"], ".0%")])
    head = ["", "batch", "context", "BF16, ms", "vLLM FP8, ms", "fp8attn, ms", "growth with the context, of BF16's"]
    return table(head, body)


def fits() -> str:
    made = []
    for title, here in devices("llama_decode").items():
        begin = max(row["break_even"] for row in here.values() if row.get("break_even"))
        made.append(f"from {begin:,} tokens on, and {value(here, 'fits-S8192', 'fp8attn', 'over_bf16')} times the tokens fit ({title})")
    return ", ".join(made)


def llama_prefill() -> str:
    at = lengths([key for here in devices("llama_prefill").values() for key in here], r"S(\d+)")
    body = [[title, *(value(here, case, "fp8attn", "speedup") for case in at.values())] for title, here in devices("llama_prefill").items()]
    return table(["over BF16, tokens", *map(tokens, at)], body)


def wan() -> str:
    body = []
    for title, here in devices("wan").items():
        for size in ("720p", "1080p"):
            row = here[f"stack-{size}", "fp8attn"]
            blocks = f"{size}, {row['layers']} blocks, {row['bf16_layers']} of them in BF16"
            body.append([title, blocks, f"{row['tokens']:,}", number(row["speedup"])])
    return table(["", "Wan2.1-14B-shaped blocks, 81 frames", "tokens", "over BF16"], body)


def overhead() -> str:
    def cell(us: float | None) -> str:
        return "" if us is None else f"{us:.1f} us" if us < 1000 else f"{us / 1000:.1f} ms"

    found = devices("overhead")
    keys = dict.fromkeys(key for here in found.values() for key in here)
    return table(["call", "by", *found], [[*key, *(cell(here.get(key, {}).get("us")) for here in found.values())] for key in keys])


def sanitizer() -> str:
    body, (title, here) = [], latest("sanitize")
    for (case, impl), row in here.items():
        found = str(row.get("errors", "")) + (f" ({row['dispatch']} in Triton's dispatch)" if row.get("dispatch") else "")
        body.append([*case.split("-", 1), "" if impl == "fp8attn" else impl, "yes" if row["finished"] else "no", found])
    return table([f"tool ({title})", "kernel", "", "finished", "errors"], body)


BLOCKS: dict[str, Callable[[], str]] = {
    **{
        made.__name__.replace("_", "-"): made
        for made in (
            accumulation, agreement, append, bits, decode, decode_error, demo_equal, doctor, drift_operations, fits, headline,
            llama_decode, long_error, cast_loss,
            llama_prefill, memory, other_tasks, overhead, portable, prefill, prefill_256, prefill_error, prefill_rounding,
            real_model, sanitizer, sdpa, smollm2_loss, speculative, wan,
        )
    },
    "perplexity": lambda: perplexity("fp8attn"),
    "perplexity-all": lambda: perplexity(*KEYS, "fp8attn-static"),
    "retrieval-lengths": lambda: right(needle_lengths("niah_multikey_2"), PAIR, "`niah_multikey_2`", paired=True),
    "retrieval": lambda: right(STRESS, SYSTEMS, "131,072 tokens"),
    "chains": lambda: right(needle_lengths("ruler_vt"), PAIR, "`ruler_vt`, whole chains", paired=True),
}  # fmt: skip


def filled(text: str) -> str:
    """A file's text with what belongs between its markers. Markers on lines of their own hold lines."""

    def fill(match: re.Match) -> str:
        made, line = BLOCKS[match[1]](), match[2]
        gap = "\n" if line and made.startswith("|") else ""  # Markdown's tables begin and end with an empty line
        return f"<!-- results: {match[1]} -->{line}{gap}{made}{gap}{line}<!-- /results -->"

    return BLOCK.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = [path for path in FILES if filled(path.read_text()) != path.read_text()]
    for path in old:
        if args.check:
            print(f"{path.relative_to(ROOT)} is not what results say: run python -m benchmarks.readme")
        else:
            path.write_text(filled(path.read_text()))
    sys.exit(bool(old) and args.check)


if __name__ == "__main__":
    main()
