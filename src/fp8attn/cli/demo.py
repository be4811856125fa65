"""`fp8attn demo`: measures on a CPU what the README reports and needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from transformers import cache_utils

from .. import calibrate
from ..errors import UsageError
from ..evaluation import models
from ..evaluation.caches import MakeCache, cache_factory, decode_greedily, prefill
from ..evaluation.names import title
from ..evaluation.outcomes import cells, same_outcomes, score
from ..evaluation.perplexity import Perplexity, perplexity
from ..evaluation.recall import recall_samples
from ..evaluation.record import write_json
from .plots import needle_maps, save
from .shared import about, ask_all, encode, load, out, output, progress
from .tables import needle_table, perplexity_table, sensitivity_table

PUBLIC = "smollm2"
QUESTIONS = ("What is the capital of France?", "Name three colors.", "What is a hash table? Answer in one sentence.")
PROMPT = "def read_header(self, name, default=None):\n"  # for a model without a chat template
ANSWER = 48  # tokens, at most
CONTEXT, WINDOWS = 2048, 1  # of the first model's perplexity
COMMITTED_CONTEXT, COMMITTED_WINDOWS = 4096, 1  # of the second model's
CALIBRATION = (8, 1024)  # windows, tokens of each, from the end of the text, which is not evaluated
LENGTHS = (512, 1024, 2048, 4096)  # tokens of the needles' prompts


def run(folder: Path, device: str | None) -> dict[str, Any]:
    """Answer, measure, calibrate and retrieve. Print tables, and write `demo.json`, `needle.png` and `scales.safetensors` into `folder`.

    The first model is the public one, the second the committed one. Where one of them is missing, the other is used for both.
    """
    began = time.monotonic()
    write_results, write_plot, write_scales = (output(folder / file) for file in ("demo.json", "needle.png", "scales.safetensors"))
    text = models.read_text()
    committed = None if (path := models.committed_model()) is None else load(str(path), device)
    try:
        first = load(PUBLIC, device)
    except UsageError as missing:
        if committed is None:
            raise
        out.print(f"[yellow]{escape(str(missing))}. The committed model is used instead.")
        first = committed

    name = Path(first[0].config.name_or_path).name
    out.rule(f"1. {name} answers, greedily", align="left")
    answers = _answer(*first)
    matched, counted = _show(first[1], answers)

    out.rule(f"2. {name}: perplexity of Python code through each cache", align="left")
    names = ("bf16", "fp8", "scale-1", *(["transformers-fp8"] if hasattr(cache_utils, "Fp8QuantizedLayer") else []))
    public = _perplexity(*first, text, CONTEXT, WINDOWS, {each: cache_factory(each, first[0]) for each in names})
    if first is not committed:
        out.print(f"8,192 tokens take minutes without a GPU: fp8attn evaluate perplexity --model {PUBLIC} --context 8192 --windows 1")

    model, tokenizer = committed or first
    out.rule(f"3. {Path(model.config.name_or_path).name}: calibrated scales (optional)", align="left")
    count, length = CALIBRATION
    windows = models.windows(models.tokenize(tokenizer, text), length, count, from_end=True)
    with progress("calibrating") as tick:
        scales = calibrate(model, windows.split(1), progress=tick)
    write_scales(scales.save)
    out.print(sensitivity_table(scales))
    caches = {each: cache_factory(each, model) for each in ("bf16", "fp8")}
    static = {"fp8-static": cache_factory("fp8-static", model, scales=scales)}
    chunks = _perplexity(model, tokenizer, text, COMMITTED_CONTEXT, COMMITTED_WINDOWS, caches | static)

    out.rule("4. The same model finds needles in a haystack of Python code", align="left")
    questions = list(recall_samples(tokenizer, text, lengths=LENGTHS, samples=1, seed=2026))
    outcomes = ask_all("asking", model, tokenizer, questions, caches)
    out.print(needle_table(outcomes))
    heading = f"Needle in a haystack: {Path(model.config.name_or_path).name}"
    write_plot(lambda path: save(needle_maps(outcomes, heading=heading), path))

    bf16, fp8, fp8_static = chunks
    results = {
        "model": name,
        "greedy_tokens_equal": matched == counted,
        "greedy_tokens_matched": matched,
        "greedy_tokens": counted,
        **{f"public_ppl_{row.cache}": row.ppl for row in public},
        **{f"public_kl_{row.cache}": row.kl for row in public},
        "bytes_per_token_bf16": bf16.bytes_per_token,
        "bytes_per_token_fp8": fp8.bytes_per_token,
        "ppl_bf16": bf16.ppl,
        "ppl_fp8": fp8.ppl,
        "ppl_fp8_static": fp8_static.ppl,
        "needle_bf16": score(outcomes, "bf16"),
        "needle_fp8": score(outcomes, "fp8"),
        "needle_cells_equal": same_outcomes(outcomes, "bf16", "fp8"),
        "seconds": time.monotonic() - began,
    }
    everything = {**results, "meta": about(first[0]), "perplexity": [*public, *chunks], "needle": cells(outcomes)}
    write_results(lambda path: write_json(path, everything))
    out.print(_summary(results, public))
    out.print(f"{folder}/demo.json, {folder}/needle.png, {folder}/scales.safetensors; {results['seconds']:.0f} s")
    return results


def _answer(model: Any, tokenizer: Any) -> dict[str, list[tuple[str, list[int]]]]:
    """The answers through each cache: (prompt, tokens up to the end of the answer)."""
    chat = bool(tokenizer.chat_template)
    prompts = QUESTIONS if chat else (PROMPT,)
    found: dict[str, list[tuple[str, list[int]]]] = {}
    end = tokenizer.eos_token_id
    with progress("answering") as tick:
        for name in ("bf16", "fp8"):
            found[name] = []
            for prompt in prompts:
                cache, ids = cache_factory(name, model)(), encode(tokenizer, prompt, chat)["input_ids"].to(model.device)
                last = prefill(model, ids, cache)
                new, _ = decode_greedily(model, last, cache, ANSWER, done=lambda ids: bool(ids[0, -1] == end))
                found[name].append((prompt, list(takewhile(lambda token: token != end, new[0].tolist()))))
                tick(sum(len(answers) for answers in found.values()), 2 * len(prompts))
    return found


def _show(tokenizer: Any, answers: dict[str, list[tuple[str, list[int]]]]) -> tuple[int, int]:
    """Print prompts with each cache's answer.

    Returns:
        The number of tokens before the first difference, summed over the answers, and the number of BF16's tokens.
    """
    matched = counted = 0
    for (prompt, ours), (_, theirs) in zip(answers["fp8"], answers["bf16"], strict=True):
        out.print(f"[bold]{escape(prompt.rstrip())}")
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(ours, theirs, strict=False)))
        matched, counted = matched + same, counted + len(theirs)
        for name, ids in (("bf16", theirs), ("fp8", ours)):
            out.print(f"{title(name):>5}: {tokenizer.decode(ids).strip()}", markup=False, highlight=False)
    return matched, counted


def _perplexity(model: Any, tokenizer: Any, text: str, context: int, count: int, caches: Mapping[str, MakeCache]) -> list[Perplexity]:
    """Measure and print the perplexity of the first `count` windows of `context` tokens."""
    tokens = models.windows(models.tokenize(tokenizer, text), context + 1, count)
    with progress(f"{context} tokens through {len(caches)} caches") as tick:
        rows = perplexity(model, tokens, caches, tokenizer=tokenizer, progress=tick)
    out.print(perplexity_table(rows))
    return rows


def _summary(results: dict[str, Any], public: list[Perplexity]) -> Table:
    table = Table(title="A BF16 and an FP8 cache", title_justify="left")
    table.add_column("")
    for column in ("BF16", "FP8", ""):
        table.add_column(column, justify="right")
    bf16, fp8 = public[:2]
    same = "the same prompts" if results["needle_cells_equal"] else "different prompts"
    ratio = results["bytes_per_token_fp8"] / results["bytes_per_token_bf16"]
    equal = f"{results['greedy_tokens_matched']} of {results['greedy_tokens']} equal"
    table.add_row(f"{results['model']}: tokens of answers", "", "", equal)
    table.add_row(f"{results['model']}: perplexity", f"{bf16.ppl:.4f}", f"{fp8.ppl:.4f}", f"{fp8.ppl / bf16.ppl - 1:+.3%}")
    change = results["ppl_fp8"] / results["ppl_bf16"] - 1
    table.add_row("second model: perplexity", *(f"{results[f'ppl_{c}']:.4f}" for c in ("bf16", "fp8")), f"{change:+.3%}")
    table.add_row("needles found", *(f"{results[f'needle_{c}']:.1%}" for c in ("bf16", "fp8")), same)
    table.add_row("cache bytes per token", *(f"{results[f'bytes_per_token_{c}']:.0f}" for c in ("bf16", "fp8")), f"{ratio:.1%}")
    return table
