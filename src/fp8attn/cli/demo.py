"""`fp8attn demo`: the claims of the README that a machine without a GPU can check."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.table import Table

from .. import calibrate
from ..evaluation import models
from ..evaluation.caches import cache_factory, greedy
from ..evaluation.needle import cells, same_outcomes, score
from ..evaluation.perplexity import perplexity
from ..evaluation.plots import needle_maps, save
from ..evaluation.recall import recall_samples
from ..evaluation.report import meta, needle_table, perplexity_table, sensitivity_table, title, write_json
from .shared import ask_all, load, out, output, progress

CALIBRATION = (8, 1024)  # windows, tokens of each: from the text's end, where the measurements do not come
CONTEXT, WINDOWS = 4096, 2  # of the perplexity
DECODE = 1024, 128  # context, tokens decoded
LENGTHS = (512, 1024, 2048, 4096)  # of the needles' prompts
PROMPT = "def read_header(self, name, default=None):\n"


def run(folder: Path, device: str | None) -> dict[str, Any]:
    """Calibrate, generate, measure; print tables, write `demo.json`, `needle.png` and `scales.safetensors` into `folder`."""
    began = time.monotonic()
    write_results, write_plot, write_scales = (output(folder / file) for file in ("demo.json", "needle.png", "scales.safetensors"))
    model, tokenizer = load(None, device)
    text = models.read_text()
    tokens = models.tokenize(tokenizer, text)

    out.rule("1. Calibrate static scales (optional: the FP8 cache finds its own)", align="left")
    count, length = CALIBRATION
    with progress("calibrating") as tick:
        scales = calibrate(model, models.windows(tokens, length, count, from_end=True).split(1), progress=tick)
    write_scales(scales.save)
    out.print(sensitivity_table(scales))
    caches = {name: cache_factory(name, model.config) for name in ("bf16", "fp8")}
    static = {"fp8-static": cache_factory("fp8-static", model.config, scales=scales)}

    out.rule("2. Generate, greedily", align="left")
    prompt = models.tokenize(tokenizer, PROMPT)[None].to(model.device)
    written = {name: greedy(model, prompt, make(), 64)[0].tolist() for name, make in caches.items()}
    for name, ids in written.items():
        out.print(f"[bold]{title(name)}[/bold]")
        out.print(PROMPT + tokenizer.decode(ids), markup=False, highlight=False)
    pairs = zip(written["bf16"], written["fp8"], strict=True)
    matched = next((at for at, (a, b) in enumerate(pairs) if a != b), len(written["bf16"]))

    out.rule("3. Perplexity of held-out code, every K and V read through the cache", align="left")
    with progress("prefill in chunks") as tick:
        parts = models.windows(tokens, CONTEXT + 1, WINDOWS)
        chunks = perplexity(model, parts, caches | static, tokenizer=tokenizer, progress=tick)
    with progress("token by token") as tick:
        context, count = DECODE
        decoded = perplexity(model, parts[:1, : context + 1], caches, decode_tokens=count, tokenizer=tokenizer, progress=tick)
    out.print(perplexity_table(chunks))
    out.print(perplexity_table(decoded))

    out.rule("4. Needles in haystacks of held-out code", align="left")
    questions = list(recall_samples(tokenizer, text, lengths=LENGTHS, samples=1, seed=2026))
    outcomes = ask_all("asking", model, tokenizer, questions, caches)
    out.print(needle_table(outcomes))
    heading = f"Needle in a haystack: {Path(model.config._name_or_path).name}"
    write_plot(lambda path: save(needle_maps(outcomes, heading=heading), path))

    bf16, fp8 = chunks[:2]
    results = {
        "bytes_per_token_bf16": bf16.bytes_per_token,
        "bytes_per_token_fp8": fp8.bytes_per_token,
        "ppl_bf16": bf16.ppl,
        "ppl_fp8": fp8.ppl,
        "ppl_fp8_static": chunks[2].ppl,
        "needle_bf16": score(outcomes, "bf16"),
        "needle_fp8": score(outcomes, "fp8"),
        "needle_cells_equal": same_outcomes(outcomes, "bf16", "fp8"),
        "greedy_tokens_equal": matched == len(written["bf16"]),
        "greedy_tokens_matched": matched,
        "greedy_tokens": len(written["bf16"]),
        "seconds": time.monotonic() - began,
    }
    everything = {**results, "meta": meta(model), "perplexity": [*chunks, *decoded], "needle": cells(outcomes)}
    write_results(lambda path: write_json(path, everything))
    out.print(_summary(results))
    out.print(f"{folder}/demo.json, {folder}/needle.png, {folder}/scales.safetensors; {results['seconds']:.0f} s")
    return results


def _summary(results: dict[str, Any]) -> Table:
    table = Table(title=f"BF16 and FP8 cache side by side, contexts up to {CONTEXT} tokens", title_justify="left")
    for column, side in (("", "left"), ("BF16", "right"), ("FP8", "right"), ("", "right")):
        table.add_column(column, justify=side)
    ratio = results["bytes_per_token_fp8"] / results["bytes_per_token_bf16"]
    change = results["ppl_fp8"] / results["ppl_bf16"] - 1
    same = "the same prompts" if results["needle_cells_equal"] else "different prompts"
    table.add_row("cache bytes per token", *(f"{results[f'bytes_per_token_{c}']:.0f}" for c in ("bf16", "fp8")), f"{ratio:.1%}")
    table.add_row("perplexity", *(f"{results[f'ppl_{c}']:.4f}" for c in ("bf16", "fp8")), f"{change:+.3%}")
    table.add_row("needles found", *(f"{results[f'needle_{c}']:.1%}" for c in ("bf16", "fp8")), same)
    table.add_row("greedy tokens equal", "", f"{results['greedy_tokens_matched']}", f"of {results['greedy_tokens']}")
    return table
