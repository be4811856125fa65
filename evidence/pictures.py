"""The pictures of the results, beside the numbers.

python -m evidence.pictures [NAME ...]    # of PLOTS; default: all that have results
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from itertools import product

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.peers import CALLS
from benchmarks.problem import KEYS

from .rows import header, latest, lengths, path_of, ratio
from .tables import writing
from .tables.accuracy import STRESS, SYSTEMS
from .tables.kernels import STEP
from .tables.latents import LATENT, NEEDLES

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.constrained_layout.use": True})

COLORS = {impl: call.color for impl, call in CALLS.items()} | {
    "fp8attn": "#0b6e4f", "fp8attn-q8": "#69b578", "fp8attn-e4m3-keys": "#3d9970", "fp8attn-int8-keys": "#3d9970",
    "stream-ceiling": "#cccccc",
}  # fmt: skip
NAMES = {impl: call.title for impl, call in CALLS.items()} | {
    "fp8attn": "fp8attn", "fp8attn-e4m3-keys": "fp8attn, E4M3 keys", "fp8attn-q8": "fp8attn, queries in FP8",
    "stream-ceiling": "the same bytes, without arithmetic",
}  # fmt: skip
BATCHES = {1: "o:", 8: "o--", 66: "o-"}  # how their lines look
BLOCKS = 132  # that run at a time
MEANS = (0.0, 0.3, 1.0)  # of values, in deviations
DECODE = ("B1-S8192", "B1-S131072", "B8-S32768", "B16-S8192", "B64-S8192", "B32-S2048", "B4-S131072")
PERCENT = FuncFormatter(lambda share, _: f"{100 * share:g}%")
THEIRS = ("vllm-fa3-fp8", "fa3-fp8", "cudnn-fp8", "fa3-bf16")
HIGHEST = 12  # percent of perplexity: a taller bar has its number at its end


def finish(name: str, figure: Figure, axes: Axes, title: str, picture: str | None = None) -> None:
    """Title, with what the rows of `name` were measured with, legend (of the labels in `axes`, if it has any) and file:
    beside these rows, and called as they are, or `picture`.
    """
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
    others = ", and others" if header(name).get("mixed") else ""
    figure.text(0.99, 0.99, f"{writing.measured(name)}{others}", ha="right", va="top", fontsize=6.5, color="#777777")
    handles, labels = axes.get_legend_handles_labels()
    if labels:
        rows = -(-sum(len(label) + 8 for label in labels) // 150)
        columns = -(-len(labels) // rows)
        figure.legend(
            handles, labels, fontsize=8, ncols=columns, loc="outside lower center", frameon=False, handlelength=3
        )
    figure.savefig(path_of(name).with_name(f"{picture or name}.png"), dpi=130)
    plt.close(figure)


def plot_vllm() -> None:
    """README's picture: tokens of a second, and the seconds to the first token."""
    device, rows = latest("vllm")
    systems = {"vllm-bf16": "BF16 cache", "vllm-fp8": "vLLM's FP8 cache", "fp8attn": "fp8attn"}
    shades = ("#bbbbbb", "#e07a5f", COLORS["fp8attn"])
    steps = {"16 x 2k": "B16-S2048", "8 x 8k": "B8-S8192", "4 x 32k": "B4-S32768", "1 x 128k": "B1-S131072"}
    prompts = {"8k": "S8192", "32k": "S32768", "128k": "S131072"}
    panels = {
        "Tokens per second of each user\n(users x tokens of context)": (
            {name: f"decode-{case}" for name, case in steps.items()},
            "{:.0f}",
        ),
        "Seconds to the first token\n(tokens of the prompt)": (
            {name: f"prefill-{case}" for name, case in prompts.items()},
            "{:.2f}",
        ),
    }
    figure, grid = plt.subplots(1, 2, figsize=(11, 3.7), width_ratios=[4, 3])
    for axes, (title, (cases, form)) in zip(grid, panels.items(), strict=True):
        for i, ((impl, label), shade) in enumerate(zip(systems.items(), shades, strict=True)):
            times = [rows[f"llama-{case}", impl]["ms"] / 1000 for case in cases.values()]
            heights = [1 / time if "second of" in title else time for time in times]
            bars = axes.bar(np.arange(len(cases)) + 0.28 * (i - 1), heights, 0.26, label=label, color=shade)
            axes.bar_label(bars, [form.format(height) for height in heights], fontsize=9)
        axes.set_xticks(range(len(cases)), cases, fontsize=10)
        axes.set_title(title, loc="left", fontsize=10)
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
    release = header("vllm")["peers"]["vllm"].split()[-1]
    title = f"Llama-3.1-8B's shape in vLLM {release} on one {device}, by what stores the keys and values"
    finish("vllm", figure, grid[0], title)


def plot_decode() -> None:
    """One group a case, one bar an implementation, our heights written in it."""
    (device, rows), (figure, axes) = latest("decode"), plt.subplots(figsize=(11, 4.2))
    measured = {impl for _, impl in rows}
    impls = [impl for impl in (*KEYS, *STEP, "stream-ceiling") if impl in measured]
    width = 0.85 / len(impls)
    for i, impl in enumerate(impls):
        heights = [rows.get((case, impl), {}).get("gbps", 0) for case in DECODE]
        at = [x + (i - (len(impls) - 1) / 2) * width for x in range(len(DECODE))]
        axes.bar(at, heights, width * 0.94, label=NAMES[impl], color=COLORS[impl])
        if i == 0:
            for x, height in zip(at, heights, strict=True):
                axes.text(
                    x, 0.98 * height, f"{height:.0f}", ha="center", va="top", rotation=90, fontsize=8, color="white"
                )
    axes.set_xticks(range(len(DECODE)), [case.replace("-", ", ") for case in DECODE], fontsize=8)
    axes.set_xlabel("sequences (B) and tokens of each (S)", fontsize=9)
    axes.set_ylabel("GB/s of live K and V")
    finish("decode", figure, axes, f"Decode on an {device} (32 query heads, 8 KV heads of 128): the cache read once")


def plot_accuracy() -> None:
    """Error by length: a row of panels a phase, a column a mean of V."""
    device, rows = latest("accuracy")
    phases = {"causal": "last 64 queries of a prompt", "full": "128 queries of all keys", "decode": "one query"}
    figure, grid = plt.subplots(3, 3, figsize=(12, 10), sharex=True, sharey=True)
    for axes, ((phase, what), mean) in zip(grid.flat, product(phases.items(), (0, 1, 5)), strict=True):
        for impl in (*KEYS, *(["fp8attn-q8"] if phase != "decode" else []), *THEIRS):
            cases = lengths(rows, rf"{phase}-mean{mean}-D128-S(\d+)")
            found = {n: row.get("last", row["rel_err"]) for n, case in cases.items() if (row := rows.get((case, impl)))}
            points = {n: error for n, error in found.items() if n > 1}  # of one key the output is its value
            style = "o:" if impl.endswith("-keys") else "o--" if impl == "vllm-fa3-fp8" else "o-"
            axes.plot(points.keys(), points.values(), style, ms=3, lw=1.4, label=NAMES[impl], color=COLORS[impl])
        axes.set_title(f"{what}, V of mean {mean}", loc="left", fontsize=10)
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.25)
    for axes in grid[:, 0]:
        axes.set_ylabel("relative error")
        axes.yaxis.set_major_formatter(PERCENT)
    for axes in grid[-1]:
        axes.set_xlabel("keys")
    finish("accuracy", figure, grid[0, 0], f"Error against float64 on the same bytes, {device}, head_dim 128")


def draw_maps(
    figure: Figure, grid: Sequence[Axes], rows: Mapping, names: Mapping[str, str], columns: Mapping[str, str]
) -> None:
    """Right answers by depth of the needle: a map a system, a column a case (by its label)."""
    for axes, (impl, name) in zip(grid, names.items(), strict=True):
        cells = np.full((10, len(columns)), np.nan)
        for i, case in enumerate(columns.values()):
            for depth, (score, _) in rows.get((case, impl), {}).get("depths", {}).items():
                cells[int(10 * float(depth)), i] = 100 * score
        image = axes.imshow(
            cells, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto", extent=(-0.5, len(columns) - 0.5, 100, 0)
        )
        axes.set_title(name.replace(", ", "\n"), fontsize=9)
        axes.set_xticks(range(len(columns)), columns, rotation=90, fontsize=7)
    grid[0].set_ylabel("depth of the needle, %")
    figure.colorbar(image, ax=list(grid), label="% right", shrink=0.8)


def plot_needle() -> None:
    """Right answers by depth: a panel a system, a column a length of the prompt or a strength of stress at
    the longest.
    """
    (device, rows) = latest("needle")
    columns = {f"{n // 1024}k": case for n, case in lengths(rows, r"niah_multikey_2-S(\d+)").items()}
    columns |= {f"128k, {name}": case for name, case in STRESS.items() if name != "as trained"}
    names = {impl: name for impl, name in SYSTEMS.items() if (STRESS["as trained"], impl) in rows}
    figure, grid = plt.subplots(1, len(names), figsize=(2.2 * len(names), 4.6), sharey=True)
    draw_maps(figure, grid, rows, names, columns)
    title = f"RULER's needles on an {device}: right answers by length, depth and planted outliers (white: not measured)"
    finish("needle", figure, grid[0], title)


def plot_accumulation() -> None:
    """Error by length: a row of panels for prompts, steps and steps over latents, a column a mean, a line a batch."""
    device, rows = latest("accumulation")
    kinds = {"prompt": "prompts", "step": "decode steps", "latent": "decode steps over latents"}
    figure, grid = plt.subplots(3, 3, figsize=(12, 10), sharex=True, sharey=True)
    for axes, ((kind, title), mean) in zip(grid.flat, product(kinds.items(), MEANS), strict=True):
        impls = dict.fromkeys(impl for case, impl in rows if case.startswith(f"{kind}-"))
        sizes = dict(zip(impls, np.linspace(9, 3, len(impls)), strict=True))  # so that points that agree are all seen
        for impl, batch in product(impls, ("",) if kind == "prompt" else BATCHES):
            cases = lengths(rows, rf"{kind}-{f'B{batch}-' if batch else ''}S(\d+)")
            found = {n: row[f"rel_err_{mean:g}"] for n, case in cases.items() if (row := rows.get((case, impl)))}
            label = NAMES.get(impl, impl) if not batch or batch == max(BATCHES) else None
            style = {"ms": sizes[impl], "lw": 1.4, "color": COLORS[impl], "label": label}
            axes.plot(found.keys(), found.values(), BATCHES.get(batch, "o-"), **style)
        axes.set_title(f"{title}, values of mean {mean:g}", loc="left", fontsize=10)
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.25)
    for axes in grid[:, 0]:
        axes.set_ylabel("relative error")
        axes.yaxis.set_major_formatter(PERCENT)
        axes.legend(fontsize=7, loc="upper left", frameon=False)
    for axes in grid[-1]:
        axes.set_xlabel("tokens of a sequence")
    lines = [grid[1, 1].plot([], [], style, ms=3, color="#555555")[0] for style in BATCHES.values()]
    titles = [f"batch of {batch}" for batch in BATCHES]
    grid[1, 1].legend(lines, titles, fontsize=7, loc="upper left", frameon=False, handlelength=4)
    title = f"What sums lose on an {device}: error against float64 on the same bytes, by length, batch and mean"
    finish("accumulation", figure, figure.add_axes((0, 0, 0, 0), visible=False), title)


def plot_sums() -> None:
    """Error by how many keys one block of a GPU sums, of prompts (`accumulation`) and of steps over latents (`latent`):
    a panel a mean of values.
    """
    device, steps = latest("latent")
    _, prompts = latest("accumulation")
    styles = {  # label, marker, filling
        "vllm-flashmla-fp8": ("vLLM's FlashMLA, FP8, steps of 1 to 256 sequences", "o", "full"),
        "fa3-fp8": ("FA3, FP8, prompts", "s", "full"),
        "cudnn-fp8": ("cuDNN, FP8, prompts", "D", "full"),
        "flashinfer": ("FlashInfer, FP8, prompts", "^", "full"),
        "vllm-fa3-fp8": ("vLLM's FA3, FP8, prompts (two-level)", "s", "none"),
        "flashmla-bf16": ("FlashMLA, BF16, steps", "o", "full"),
        "fp8attn": ("fp8attn, steps and prompts", "o", "full"),
    }
    figure, grid = plt.subplots(1, len(MEANS), figsize=(12, 4.3), sharex=True, sharey=True)
    for axes, mean in zip(grid, MEANS, strict=True):
        key = "rel_err" if mean == 1 else f"rel_err_{mean:g}"
        for impl, (label, marker, filling) in styles.items():
            points = [(summed(case), row[key]) for (case, name), row in steps.items() if name == impl and summed(case)]
            cases = {case: n for n, case in lengths(prompts, r"prompt-S(\d+)").items() if (case, impl) in prompts}
            points += [(n, prompts[case, impl][f"rel_err_{mean:g}"]) for case, n in cases.items()]
            axes.plot(
                *np.transpose(points or [[], []]), marker, ms=4, fillstyle=filling, label=label, color=COLORS[impl]
            )
        axes.set_title(f"values of mean {mean:g} (in deviations)", loc="left", fontsize=10)
        axes.set(xscale="log", yscale="log")
        axes.grid(alpha=0.25)
        axes.set_xlabel("keys that one block sums", fontsize=9)
    grid[0].set_ylabel("relative error")
    grid[0].yaxis.set_major_formatter(PERCENT)
    title = f"Sums in 8 bits and in BF16 on an {device}: error against float64 on the same bytes"
    finish("latent", figure, grid[0], title, picture="sums")


def summed(case: str) -> float | None:
    """The keys of a sequence that one of `BLOCKS` blocks sums, in a case of `latent`; a block has 64 rows of queries.
    None: lengths differ.
    """
    if not (match := re.fullmatch(r"H(\d+)-B(\d+)-S(\d+)(?:-q(\d+))?", case)):
        return None
    heads, batch, tokens, queries = (int(x or 1) for x in match.groups())
    return tokens * min(1, batch * -(-heads * queries // 64) / BLOCKS)


def plot_latent() -> None:
    """Speed over vLLM's kernel by case, and errors by the mean of latents, a column a case."""
    device, rows = latest("latent")
    peer = "vllm-flashmla-fp8"
    cases = [case for case, impl in rows if impl == peer]
    figure, (speed, off) = plt.subplots(2, 1, figsize=(12, 7), sharex=True)
    for i, (impl, label) in enumerate(LATENT.items()):
        at = np.arange(len(cases)) + 0.28 * (i - 1)
        here = [rows.get((case, impl)) for case in cases]
        times = [ratio(row, rows[case, peer]) or 0 for row, case in zip(here, cases, strict=True)]
        bars = speed.bar(at, times, 0.26, label=label, color=COLORS[impl])
        if impl == "fp8attn":
            style = {"fontsize": 7, "rotation": 90, "padding": -20, "color": "white"}
            speed.bar_label(bars, [f"{time:.2f}" for time in times], **style)
        for mean, marker in zip(MEANS, ("v", "s", "o"), strict=True):
            key = "rel_err" if mean == 1 else f"rel_err_{mean:g}"
            errors = [row[key] if row else np.nan for row in here]
            off.plot(at, errors, marker, ms=4, color=COLORS[impl], alpha=0.9 if mean == 1 else 0.5)
    for mean, marker in zip(MEANS, ("v", "s", "o"), strict=True):
        off.plot([], [], marker, ms=4, color="#555555", label=f"latents of mean {mean:g}")
    speed.set_ylabel("times as fast as vLLM's FP8")
    off.set_ylabel("relative error")
    off.set_yscale("log")
    off.yaxis.set_major_formatter(PERCENT)
    off.grid(alpha=0.25, axis="y")
    off.legend(fontsize=8, frameon=False, ncols=3)
    off.set_xticks(range(len(cases)), cases, fontsize=7, rotation=60, ha="right")
    off.set_xlabel("heads (H), sequences (B), tokens of each (S), query tokens of each (q)", fontsize=9)
    finish("latent", figure, speed, f"A decode step over latents on an {device} (512 + 64 channels)")


def plot_latent_needle() -> None:
    """Right answers at 128k tokens by depth, a map a kernel; below, perplexity over BF16's, a group of bars a case."""
    device, rows = latest("latent_needle")
    cases = list(dict.fromkeys(case for case, _ in rows))
    columns = {case.removesuffix("-S131072"): case for case in cases if case.endswith("-S131072")}
    figure = plt.figure(figsize=(11, 7.5))
    *maps, below = figure.subplot_mosaic("abc;ddd", height_ratios=(1, 1.2)).values()
    draw_maps(figure, maps, rows, NEEDLES, columns)
    for i, impl in enumerate(impl for impl in NEEDLES if impl != "bf16"):
        costs = [rows.get((case, impl), {}).get("d_ppl_pct", np.nan) for case in cases]
        at, heights = np.arange(len(cases)) + 0.4 * (i - 0.5), np.minimum(costs, HIGHEST)
        bars = below.bar(at, heights, 0.38, label=NEEDLES[impl], color=COLORS[impl])
        below.bar_label(bars, [f"{cost:,.0f}" if cost > HIGHEST else "" for cost in costs], fontsize=8)
    below.axhline(0, color="#555555", lw=0.8)
    below.set_xticks(range(len(cases)), cases, rotation=60, ha="right", fontsize=7)
    below.set_xlabel("planted mean of latents, sequences (B), tokens of the prompt (S)", fontsize=9)
    below.set_ylabel("perplexity over BF16's, %")
    below.grid(alpha=0.25, axis="y")
    title = f"Latents on an {device}: needles after 128k tokens (white: not asked), perplexity after a prompt"
    finish("latent_needle", figure, below, title)


PLOTS = {
    "sums": plot_sums,
    "accumulation": plot_accumulation,
    "latent": plot_latent,
    "latent_needle": plot_latent_needle,
    "vllm": plot_vllm,
    "needle": plot_needle,
    "decode": plot_decode,
    "accuracy": plot_accuracy,
}


def measured(name: str) -> bool:
    """Whether there are rows for a picture. Those of `accumulation` had one mean and no batches before."""
    found = latest("latent" if name == "sums" else name)[1]
    return any(case.startswith("latent-") for case, _ in found) if name == "accumulation" else bool(found)


def main() -> None:
    for name in sys.argv[1:] or PLOTS:
        if measured(name):
            PLOTS[name]()


if __name__ == "__main__":
    main()
