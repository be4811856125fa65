"""The pictures of the results, beside the numbers.

python -m evidence.pictures [NAME ...]    # of PLOTS, for each device; default: all that have results
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from itertools import product

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.peers import CALLS
from benchmarks.problem import KEYS
from fp8attn_tools.cli.plots import thousands

from .results import RESULTS
from .rows import Rows, over, over_bf16, rows_of
from .tables.kernels import BF16, ENGINE, FP8, PREFILL, STEP, step_of
from .tables.texts import STORED, TEXTS

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})

FOLDER = RESULTS / "h200"  # of the device whose results are drawn; `main` sets it
COLORS = {impl: call.color for impl, call in CALLS.items()} | {
    "fp8attn": "#0b6e4f", "fp8attn-q8": "#69b578", "fp8attn-e4m3-keys": "#3d9970", "fp8attn-int8-keys": "#3d9970",
    "stream-ceiling": "#cccccc", "fp8attn-rope": "#a9d6b0", "vllm-fa3-fp8-split": "#b5543d", "vllm-fa3-bf16-split": "#b8bfca",
}  # fmt: skip
DECODE = ("B1-S8192", "B1-S131072", "B8-S32768", "B16-S8192", "B64-S8192", "B32-S2048", "B4-S131072")
THEIRS = ("vllm-fa3-fp8", "fa3-fp8", "cudnn-fp8", "fa3-bf16")


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
        bars(axes, "prefill", "tflops", half, (*KEYS, "fp8attn-q8", *measured("prefill", [*FP8, *BF16])))
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


PLOTS = {
    "decode": plot_decode, "prefill": plot_prefill, "accuracy": plot_accuracy, "sdpa": plot_sdpa, "real_model": plot_real_model,
    "engine": plot_engine,
}  # fmt: skip


def main() -> None:
    global FOLDER
    for FOLDER in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        for name in sys.argv[1:] or PLOTS:
            if (FOLDER / f"{name}.json").exists():
                PLOTS[name]()


if __name__ == "__main__":
    main()
