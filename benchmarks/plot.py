"""The pictures of the README, from results/h100/*.json.

python -m benchmarks.plot
"""

from __future__ import annotations

import json

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from .results import ROOT

FOLDER = ROOT / "results/h100"
COLOURS = {
    "fp8attn": "#0b6e4f", "fp8attn-q8": "#69b578", "stream-ceiling": "#cccccc", "vllm-fa3-fp8": "#e07a5f", "vllm-fa3-fp8-paged": "#b5543d",
    "vllm-fa3-bf16": "#7d8597", "fa3-fp8": "#f2a65a", "cudnn-fp8": "#f6d186", "fa3-bf16": "#7d8597", "cudnn-bf16": "#b8bfca",
}  # fmt: skip


def bars(name: str, unit: str, ylabel: str, title: str, cases: list[str], impls: list[str]) -> None:
    """Grouped bars: one group a case, one bar an implementation."""
    rows = {(row["case"], row["impl"]): row[unit] for row in json.loads((FOLDER / f"{name}.json").read_text())["rows"] if unit in row}
    figure, axes = plt.subplots(figsize=(11, 4.2), layout="constrained")
    width = 0.85 / len(impls)
    for i, impl in enumerate(impls):
        heights = [rows.get((case, impl), 0) for case in cases]
        at = [x + (i - (len(impls) - 1) / 2) * width for x in range(len(cases))]
        axes.bar(at, heights, width * 0.94, label=impl, color=COLOURS[impl])
        if impl == "fp8attn":
            for x, height in zip(at, heights, strict=True):
                axes.text(x, height, f"{height:.0f}", ha="center", va="bottom", fontsize=8, color=COLOURS[impl])
    axes.set_xticks(range(len(cases)), [case.replace("-S", "\nS") for case in cases], fontsize=8)
    axes.set_ylabel(ylabel)
    axes.set_title(title, loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, ncols=len(impls), loc="upper center", bbox_to_anchor=(0.5, -0.14), frameon=False)
    figure.savefig(FOLDER / f"{name}.png", dpi=130)


def main() -> None:
    bars(
        "decode", "gbps", "GB/s of live K and V", "Decode on an H100 (32 query heads, 8 KV heads of 128): the cache read once",
        ["B1-S8192", "B1-S131072", "B8-S32768", "B16-S8192", "B64-S8192", "B32-S2048", "B4-S131072"],
        ["fp8attn", "vllm-fa3-fp8-paged", "vllm-fa3-fp8", "stream-ceiling"],
    )  # fmt: skip
    bars(
        "prefill", "tflops", "TFLOPS", "Prefill on an H100: fp8attn and vLLM accumulate in FP32, fa3-fp8 and cudnn-fp8 do not",
        ["D128-full-S16384", "D128-causal-S16384", "D128-causal-S4096", "D64-causal-S16384", "D256-causal-S16384"],
        ["fp8attn", "fp8attn-q8", "vllm-fa3-fp8", "fa3-fp8", "cudnn-fp8", "fa3-bf16"],
    )  # fmt: skip


if __name__ == "__main__":
    main()
