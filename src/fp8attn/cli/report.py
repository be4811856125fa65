"""`fp8attn evaluate --report out/`: perplexity and retrieval of any model through its caches, as one HTML page."""

from __future__ import annotations

from pathlib import Path

from ..evaluation.needle import save_outcomes
from ..evaluation.page import page, write_page
from ..evaluation.perplexity import perplexity
from ..evaluation.report import accuracy_tables, meta, perplexity_table, write_json
from .shared import ask_all, load, makers, needle_samples, out, output, progress, read_windows


def run(
    folder: Path,
    name: str | None,
    *,
    device: str | None,
    stress: int,
    cache: str,
    scales: Path | None,
    text: Path | None,
    context: int,
    windows: int,
    decode: int,
    tasks: str,
    lengths: list[int],
    samples: int,
    chunk: int,
) -> None:
    """Evaluate the model `name`; write `index.html`, `report.json` and `outcomes.jsonl` into `folder`."""
    if decode > context:
        raise ValueError(f"--decode {decode} must not exceed --context {context}")
    write_html, write_report, write_outcomes = (output(folder / file) for file in ("index.html", "report.json", "outcomes.jsonl"))
    model, tokenizer = load(name, device, stress)
    caches = makers(cache, model, scales)
    tokens = read_windows(tokenizer, name, text, context + 1, windows)
    questions = needle_samples(tasks, tokenizer, name, text, lengths=lengths, samples=samples)
    runs = []
    for what, count in (("prefill in chunks", 0), ("token by token", decode)):
        with progress(what) as tick:
            part = tokens[:1] if count else tokens
            runs.append(perplexity(model, part, caches, chunk=chunk, decode_tokens=count, tokenizer=tokenizer, progress=tick))
        out.print(perplexity_table(runs[-1]))
    outcomes = ask_all("questions", model, tokenizer, questions, caches, chunk=chunk)
    out.print(*accuracy_tables(outcomes))
    about = meta(model)
    write_outcomes(lambda path: save_outcomes(path, outcomes))
    rows = [row for run in runs for row in run]
    write_report(lambda path: write_json(path, {"meta": about, "perplexity": rows, "needle": outcomes}))
    write_html(lambda path: write_page(path, page(about, runs, outcomes)))
    out.print(f"{folder}/index.html, {folder}/report.json, {folder}/outcomes.jsonl")
