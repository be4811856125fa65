"""The pictures of the results, beside the numbers.

python -m evidence.pictures [NAME ...]    # of PLOTS, for each device; default: all that have results
"""

from __future__ import annotations

import math
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.problem import KEYS
from fp8attn_tools.cli.plots import needle_maps, thousands
from fp8attn_tools.evaluation.outcomes import load_outcomes
from fp8attn_tools.evaluation.stress import STRENGTHS

from .lines import batches, line
from .results import RESULTS
from .rows import Rows, over, over_bf16, rows_of
from .tables.kernels import ENGINE, PEERS, PREFILL, STEP, step_of
from .tables.texts import STORED, TEXTS

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})

FOLDER = RESULTS / "h100"  # of the device whose results are drawn; `main` sets it
COLORS = {
    "fp8attn": "#0b6e4f", "fp8attn-q8": "#69b578", "fp8attn-e4m3-keys": "#3d9970", "fp8attn-int8-keys": "#3d9970",
    "stream-ceiling": "#cccccc", "vllm-fa3-fp8": "#e07a5f", "vllm-fa3-fp8-paged": "#b5543d", "vllm-fp8": "#e07a5f", "fa3-fp8": "#f2a65a",
    "cudnn-fp8": "#f6d186", "flashinfer": "#6c91bf", "hpc-ops": "#3d5a80", "sage": "#b392ac", "fa3-bf16": "#7d8597",
    "bf16-fa3": "#7d8597", "vllm-fa3-bf16": "#7d8597", "cudnn-bf16": "#b8bfca", "bf16-sdpa": "#b8bfca", "fp8attn-rope": "#a9d6b0",
    "fp8attn-default": "#a9d6b0", "torchao": "#f2a65a", "bf16": "#444444", "fp8attn-static": "#69b578", "vllm-fa3-fp8-split": "#b5543d",
    "vllm-fa3-bf16-split": "#b8bfca",
}  # fmt: skip
HATCHES = {"": "", "calibrated": "//", "means": "..", "calibrated+means": "xx"}  # of a kernel with options
DECODE = ("B1-S8192", "B1-S131072", "B8-S32768", "B16-S8192", "B64-S8192", "B32-S2048", "B4-S131072")
THEIRS = ("vllm-fa3-fp8", "fa3-fp8", "cudnn-fp8", "fa3-bf16")
_, OTHER_KEYS = KEYS
SMOOTHED = 21  # segments of a decode whose mean is drawn


def read(name: str) -> Rows:
    return rows_of(FOLDER / f"{name}.json")


def device() -> str:
    return FOLDER.name.upper()


# Parts of pictures


def bars(axes: Axes, name: str, unit: str, cases: Sequence[str], impls: Sequence[str]) -> None:
    """Grouped bars: one group a case, one bar an implementation, the first one's heights written in it."""
    rows, width = read(name), 0.85 / len(impls)
    for i, impl in enumerate(impls):
        heights = [rows.get((case, impl), {}).get(unit, 0) for case in cases]
        at = [x + (i - (len(impls) - 1) / 2) * width for x in range(len(cases))]
        axes.bar(at, heights, width * 0.94, label=impl, color=COLORS[impl])
        if i == 0:
            for x, height in zip(at, heights, strict=True):
                axes.text(x, 0.98 * height, f"{height:.0f}", ha="center", va="top", rotation=90, fontsize=8, color="white")
    axes.set_xticks(range(len(cases)), [case.replace("-S", "\nS") for case in cases], fontsize=8)


def series(rows: Rows, case: str, impl: str, value: Callable[[dict], float]) -> dict[int, float]:
    """Values by the number that the pattern `case` captures, in its order."""
    found = {int(match[1]): value(row) for (name, which), row in rows.items() if which == impl and (match := re.fullmatch(case, name))}
    return dict(sorted(found.items()))


def draw(axes: Axes, impl: str, points: dict[int, float], style: str = "o-", **look) -> None:
    axes.plot(points.keys(), points.values(), style, **{"ms": 3.5, "lw": 1.6, "label": impl, "color": COLORS[impl]} | look)


def by_length(axes: Axes, lengths: dict[int, str], of: str) -> None:
    """Speed over the best BF16 kernel or attention by tokens, whose labels `lengths` are."""
    axes.axhline(1, color=COLORS["fa3-bf16"], lw=1, label=f"best BF16 {of}", zorder=1.9)
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(lengths), list(lengths.values()), fontsize=8)
    axes.minorticks_off()
    axes.set(xlabel="tokens")
    axes.grid(alpha=0.25)


def finish(name: str, figure: Figure, axes: Axes | None = None, title: str = "", size: int = 11) -> None:
    """Title, legend (of the labels in `axes`) and file."""
    if title:
        figure.suptitle(title, x=0.01, ha="left", fontsize=size)
    if axes is not None:
        handles, labels = axes.get_legend_handles_labels()
        rows = -(-sum(len(label) + 8 for label in labels) // 150)
        columns = -(-len(labels) // rows)
        figure.legend(handles, labels, fontsize=8, ncols=columns, loc="outside lower center", frameon=False, handlelength=3)
    figure.savefig(FOLDER / f"{name}.png", dpi=130)
    plt.close(figure)


# Pictures


def plot_decode() -> None:
    figure, axes = plt.subplots(figsize=(11, 4.2))
    bars(axes, "decode", "gbps", DECODE, (*KEYS, *measured("decode", STEP), "stream-ceiling"))
    axes.set_ylabel("GB/s of live K and V")
    finish("decode", figure, axes, f"Decode on an {device()} (32 query heads, 8 KV heads of 128): the cache read once")


def plot_real_model() -> None:
    """What is read through prefill; transformers' cache, which attends to a prompt before it rounds, through decode."""
    rows, cases = read("real_model"), ("smollm2-S2048", "smollm2-S8192", "smollm2-prose-S8192")
    figure, axes = plt.subplots(figsize=(11, 4.2))
    for i, (name, stored) in enumerate(STORED.items()):
        impl = f"{name}-{'decode' if name == 'transformers-fp8' else 'prefill'}"
        found = [rows[case, impl] for case in cases]
        at = [x + 0.16 * (i - (len(STORED) - 1) / 2) for x in range(len(cases))]
        axes.bar(at, [row["d_ppl_pct"] for row in found], 0.15, yerr=[row["d_ppl_se"] for row in found], label=stored, capsize=2)
    axes.set_xticks(range(len(cases)), [TEXTS[case] for case in cases])
    axes.set_ylabel("perplexity over BF16's, %")
    axes.grid(alpha=0.25, axis="y")
    finish("real_model", figure, axes, f"SmolLM2-135M-Instruct on an {device()}: what storing keys and values in 8 bits costs")


def measured(name: str, impls: Sequence[str]) -> list[str]:
    """Those of `impls` that have rows."""
    found = {impl for _, impl in read(name)}
    return [impl for impl in impls if impl in found]


def plot_engine() -> None:
    """A step's time over ours, by what is beside the chunk."""
    rows, impls = read("engine"), list(ENGINE)
    cases = list(dict.fromkeys(case for case, _ in rows))
    figure, axes = plt.subplots(figsize=(11, 4.2))
    for i, impl in enumerate(impls := measured("engine", impls)):
        found = [over(rows, case, "fp8attn", impl) or 0 for case in cases]
        at = [x + (i - (len(impls) - 1) / 2) * 0.85 / len(impls) for x in range(len(cases))]
        axes.bar(at, found, 0.8 / len(impls), label=ENGINE[impl], color=COLORS[impl])
    axes.axhline(1, color=COLORS["fp8attn"], lw=1.6, label="fp8attn")
    axes.set_xticks(range(len(cases)), [step_of(case).replace(", ", "\n").replace(" on ", "\non ") for case in cases], fontsize=8)
    axes.set_ylabel("time over fp8attn's")
    finish(
        "engine", figure, axes, f"An engine's step on an {device()}: a chunk of a prompt beside decode steps (32 query heads, 8 KV heads)"
    )


def plot_prefill() -> None:
    found = {case for case, _ in read("prefill")}
    cases = [case for case in PREFILL if case in found]
    figure, both = plt.subplots(2, figsize=(12, 7), sharey=True)
    for axes, half in zip(both, (cases[:8], cases[8:]), strict=True):
        bars(axes, "prefill", "tflops", half, (*KEYS, "fp8attn-q8", *measured("prefill", PEERS)))
        axes.set_ylabel("TFLOPS")
    finish(
        "prefill",
        figure,
        axes,
        f"Prefill on an {device()}: fa3-fp8, cudnn-fp8 and flashinfer sum in the tensor core, the others in two levels (accuracy.png)",
    )


def plot_accuracy() -> None:
    """Error by length: a row of panels a phase, a column a mean of V."""
    rows = read("accuracy")
    phases = {"causal": "last 64 queries of a prompt", "full": "128 queries of all keys", "decode": "one query"}
    figure, grid = plt.subplots(3, 3, figsize=(12, 10), sharex=True, sharey=True)
    for axes, ((phase, what), mean) in zip(grid.flat, product(phases.items(), (0, 1, 5)), strict=True):
        for impl in (*KEYS, *(["fp8attn-q8"] if phase != "decode" else []), *THEIRS):
            points = series(rows, rf"{phase}-mean{mean}-D128-S(\d+)", impl, lambda row: row.get("last", row["rel_err"]))
            style = "o:" if impl.endswith("-keys") else "o--" if impl == "vllm-fa3-fp8" else "o-"
            draw(axes, impl, {n: error for n, error in points.items() if error > 0}, style, ms=3, lw=1.4)  # of one key nothing is wrong
        axes.set_title(f"{what}, V of mean {mean}", loc="left", fontsize=10)
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.25)
    for axes in grid[:, 0]:
        axes.set_ylabel("relative error")
    for axes in grid[-1]:
        axes.set_xlabel("keys")
    finish("accuracy", figure, grid[0, 0], f"Error against float64 on the same bytes, {device()}, head_dim 128")


def plot_llama_decode() -> None:
    """Milliseconds a step by context: a panel a batch."""
    rows = read("llama_decode")
    found = batches(rows)
    figure, panels = plt.subplots(1, len(found), figsize=(12, 4.2), squeeze=False)
    for axes, batch in zip(panels[0], found, strict=True):
        highest = 0.0
        for impl in ("bf16-sdpa", "bf16-fa3", "vllm-fp8", "fp8attn"):
            points = series(rows, rf"step-B{batch}-S(\d+)", impl, lambda row: row["ms"])
            draw(axes, impl, {n / 1024: ms for n, ms in points.items()})
            if impl != "bf16-sdpa":  # which leaves the picture
                highest = max([highest, *points.values()])
        ours = line(rows, batch)
        note = f": slope {ours.slope_ratio:.0%} of {ours.beside}'s" if ours else ""
        axes.set_title(f"batch {batch}{note}", loc="left", fontsize=10)
        axes.set(xlabel="context, multiples of 1,024 tokens", xlim=(0, None), ylim=(0, 1.1 * highest))
    panels[0, 0].set_ylabel("ms a decode step")
    title = f"A decode step of a Llama-3.1-8B-shaped model on an {device()}, CUDA graphs (bf16-sdpa repeats K and V for every query head)"
    finish("llama_decode", figure, panels[0, 0], title)


def plot_sdpa() -> None:
    """One attention layer, quantization included, over the best BF16 kernel that it was timed with, by length."""
    rows = read("sdpa")
    figure, panels = plt.subplots(1, 4, figsize=(14, 4.2), sharey=True)
    titles = {"full": "full", "causal": "causal", "gqa-full": "full, 8 KV heads", "gqa-causal": "causal, 8 KV heads"}
    lengths = sorted({int(match[1]) for case, _ in rows if (match := re.fullmatch(r"[a-z-]+-S(\d+)", case))})
    for axes, (kind, title) in zip(panels, titles.items(), strict=True):
        by_length(axes, {n: thousands(n) for n in lengths}, "kernel")
        for impl in (*KEYS, "fp8attn-rope", "torchao"):
            draw(axes, impl, {n: ratio for n in lengths if (ratio := over_bf16(rows, f"{kind}-S{n}", impl)) is not None})
        axes.set_title(title, loc="left", fontsize=10)
    panels[0].set_ylabel("speed over the best BF16 kernel")
    graphs = "CUDA graphs; from 64k tokens on, calls"
    finish("sdpa", figure, panels[0], f"scaled_dot_product_attention on an {device()}, 32 heads of 128, quantization included ({graphs})")


def plot_llama_prefill() -> None:
    """A whole prompt's time over that with the best BF16 attention, by length."""
    rows = read("llama_prefill")
    figure, axes = plt.subplots(figsize=(8, 4.2))
    layers = series(rows, r"S(\d+)", "fp8attn", lambda row: row["layers"])
    by_length(axes, {n: f"{thousands(n)}\n{count} layers" for n, count in layers.items()}, "attention")
    for impl, style in (("fp8attn-default", "o--"), ("fp8attn", "o-")):
        points = series(rows, r"S(\d+)", impl, lambda row: row["speedup"])
        draw(axes, impl, points, style, ms=4)
    for n, speedup in points.items():
        axes.annotate(f"{speedup:.2f}", (n, speedup), (-4, 5), textcoords="offset points", ha="right", fontsize=8, color=COLORS["fp8attn"])
    axes.margins(x=0.08, y=0.12)
    axes.set_ylabel("speed over the best BF16 attention")
    finish("llama_prefill", figure, axes, f"Prefill of a Llama-3.1-8B-shaped model on an {device()}, everything in it")


def plot_wan() -> None:
    """Seconds of a block and of a stack of blocks, with each attention."""
    rows = read("wan")
    figure, panels = plt.subplots(1, 4, figsize=(11, 3.8))
    for axes, case in zip(panels, ("block-720p", "stack-720p", "block-1080p", "stack-1080p"), strict=True):
        found = {impl: rows[case, impl] for impl in ("fp8attn", "fa3-bf16", "cudnn-bf16") if (case, impl) in rows}
        for x, (impl, row) in enumerate(found.items()):
            axes.bar(x, row["ms"] / 1e3, 0.8, label=impl, color=COLORS[impl])
            axes.text(x, row["ms"] / 1e3, f"{row['ms'] / 1e3:.3g}", ha="center", va="bottom", fontsize=8)
        ours = found["fp8attn"]
        what = f"{ours['layers']} blocks, {ours['bf16_layers']} in BF16" if "layers" in ours else "one block"
        axes.set_title(f"{case.split('-')[1]}, {what}: {ours['speedup']:.2f}x", loc="left", fontsize=9)
        axes.set_xticks([])
    panels[0].set_ylabel("seconds")
    finish("wan", figure, panels[0], f"Wan2.1-14B-shaped transformer blocks on an {device()}, 81 frames")


def plot_needle() -> None:
    """Right answers by what is planted, where most systems were asked; heat maps of those asked at all lengths that `fp8attn` was."""
    task, rows = "niah_multikey_2", read("needle")
    asked = Counter(int(match[1]) for case, _ in rows if (match := re.fullmatch(rf"{task}-S(\d+)", case)))
    length = max(asked, key=lambda n: (asked[n], n))
    panels = []
    for n, strength in enumerate(STRENGTHS):
        case = f"{task}-stress{n}-S{length}" if n else f"{task}-S{length}"
        what = f"V {strength.offset:g} σ off zero, outlier channels × {strength.outlier:g}" if strength.offset else "as trained"
        if here := [row for (name, impl), row in rows.items() if name == case and impl.partition(":")[0] in COLORS]:
            panels.append((what, here))
    lines = -(-len(panels) // 2)
    figure, grid = plt.subplots(lines, 2, figsize=(12, 2.9 * lines), squeeze=False, sharey=True)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    for axes, (what, here) in zip(grid.flat, panels, strict=False):
        for at, row in enumerate(here):
            impl, share, (low, high) = row["impl"], row["accuracy"], row["interval"]
            kernel, _, options = impl.partition(":")
            axes.bar(at, share, 0.85, color=COLORS[kernel], hatch=HATCHES[options], edgecolor="white", lw=0)
            axes.errorbar(at, share, [[max(0, share - low)], [max(0, high - share)]], color="#333333", lw=1, capsize=2)
            axes.text(at, 1.05, f"{share:.1%}", ha="center", fontsize=8)
            words = impl.replace("fp8attn-", "fp8attn\n").replace("-fa3-fp8", "\nfa3-fp8").replace(":", "\n").replace("+", "\n")
            axes.text(at, -0.05, f"{words}\n({row['samples']})", ha="center", va="top", fontsize=7.5)
        axes.set_title(what, loc="left", fontsize=9)
        axes.set(xlim=(-0.6, max(len(here), 6) - 0.4), ylim=(0, 1.15), xticks=[], yticks=[0, 0.25, 0.5, 0.75, 1])
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        axes.spines["bottom"].set_visible(False)
    figure.suptitle(f"RULER {task} at {thousands(length)}: right answers, 95% intervals, (samples)", fontsize=11)
    finish("retrieval", figure)
    ours = {n for n in asked if (f"{task}-S{n}", "fp8attn") in rows}
    impls = [impl for impl in dict.fromkeys(impl for _, impl in rows) if all((f"{task}-S{n}", impl) in rows for n in ours)]
    outcomes = load_outcomes(FOLDER / "needle.jsonl.xz")
    outcomes = [outcome for outcome in outcomes if outcome.task == task and outcome.cache in impls and outcome.length in ours]
    outcomes.sort(key=lambda outcome: impls.index(outcome.cache))
    finish("retrieval_maps", needle_maps(outcomes, heading=f"RULER {task}: right answers by length and depth"))


def plot_drift() -> None:
    """How far predictions through our caches are from BF16's: by position of a prompt (above), and over a long decode (below)."""
    rows, long = read("perplexity"), read("drift")
    figure, ((change, kl), (long_change, long_kl)) = plt.subplots(2, 2, figsize=(11, 6.4), sharex="row", sharey="col")
    context = max(int(case.split("-S")[1]) for case, _ in rows if case.startswith("chunks"))
    base = rows[f"chunks-S{context}", "bf16"]["positions"]
    for impl, aside in ((OTHER_KEYS, 0.94), ("fp8attn-static", 1.06), ("fp8attn", 1.0)):
        if (row := rows.get((f"chunks-S{context}", impl))) is None:
            continue
        look = {"color": COLORS[impl], "label": impl, "marker": "o", "ms": 3.5, "ls": ":" if impl == "fp8attn-static" else "-", "lw": 1.4}
        parts, at = row["positions"], [aside * (part["start"] + part["stop"]) / 2 for part in base]
        differences = [percent(part["nll"] - before["nll"]) for part, before in zip(parts, base, strict=True)]
        change.errorbar(at, differences, [percent(part["standard_error"]) for part in parts], elinewidth=0.8, **look)
        kl.plot(at, [part["kl"] for part in parts], **look)
    for impl in dict.fromkeys(impl for _, impl in long):
        segments = [row for (_, which), row in long.items() if which == impl]
        at = [(row["start"] + row["stop"]) / 2 for row in segments]
        changes = [percent(row["nll"] - row["baseline_nll"]) for row in segments]
        for axes, values in ((long_change, changes), (long_kl, [row["kl"] for row in segments])):
            axes.plot(at, values, ".", ms=5, alpha=0.35, color=COLORS[impl], markeredgewidth=0)
            means = [statistics.fmean(values[n : n + SMOOTHED]) for n in range(len(values) - SMOOTHED + 1)]
            axes.plot(at[SMOOTHED // 2 :][: len(means)], means, lw=1.8, color=COLORS[impl], label=impl)
    first, last = segments[0], segments[-1]  # alike for all
    decoded = f"{last['stop'] - first['start']:,} tokens decoded, {first['sequences']} sequences"
    for axes in (change, kl):
        axes.set_xscale("log", base=4)
        axes.xaxis.set_major_formatter(lambda n, _: thousands(int(n)))
        axes.set_xlim(90, context)
        axes.set_title(f"a prompt of {context:,} tokens, prefilled", loc="left", fontsize=10)
    for axes in (long_change, long_kl):
        axes.xaxis.set_major_formatter(lambda n, _: f"{n:,.0f}")
        axes.set_title(decoded, loc="left", fontsize=10)
    for axes in (change, long_change):
        axes.axhline(0, color=COLORS["bf16-sdpa"], lw=1)
        axes.set_ylabel("perplexity over BF16's, %")
    for axes in (kl, long_kl):
        axes.set(ylabel="KL divergence from BF16, nats", ylim=(0, None))
    for axes in (change, kl, long_change, long_kl):
        axes.set_xlabel("tokens before the predicted one")
        axes.grid(alpha=0.25)
    dots = f"{first['stop'] - first['start']} tokens of each sequence, after which pages are copied, reordered or truncated"
    title = f"Held-out code on an {device()}. Bars: a standard error. Dots: {dots}; lines: mean of {SMOOTHED} dots"
    finish("drift", figure, kl, title, 9)


def percent(difference: float) -> float:
    """A small difference of mean losses as a percentage of the perplexity."""
    return 100 * math.expm1(difference)


PLOTS = {
    "decode": plot_decode, "prefill": plot_prefill, "accuracy": plot_accuracy, "llama_decode": plot_llama_decode,
    "llama_prefill": plot_llama_prefill, "sdpa": plot_sdpa, "wan": plot_wan, "needle": plot_needle, "drift": plot_drift,
    "real_model": plot_real_model, "engine": plot_engine,
}  # fmt: skip
NEEDS = {"drift": ("drift", "perplexity")}  # results of other names


def main() -> None:
    global FOLDER
    for FOLDER in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for name in sys.argv[1:] or PLOTS:
            if all((FOLDER / f"{file}.json").exists() for file in NEEDS.get(name, (name,))):
                PLOTS[name]()


if __name__ == "__main__":
    main()
