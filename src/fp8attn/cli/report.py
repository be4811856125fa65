"""`fp8attn evaluate --report out/`: perplexity and retrieval of any model through its caches, as one HTML page."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..evaluation.needle import save_outcomes
from ..evaluation.page import page, write_page
from ..evaluation.perplexity import perplexity
from ..evaluation.report import accuracy_tables, meta, perplexity_table, write_json
from .shared import ask_all, needle_samples, out, progress, read_windows


def run(
    folder: Path,
    model: Any,
    tokenizer: Any,
    caches: Mapping[str, Callable],
    *,
    name: str | None,
    text: Path | None,
    context: int,
    windows: int,
    decode: int,
    tasks: str,
    lengths: list[int],
    samples: int,
    chunk: int,
) -> None:
    """Write `index.html`, `report.json` and `outcomes.jsonl` into `folder`."""
    tokens = read_windows(tokenizer, name, text, context + 1, windows)
    runs = []
    for what, count in (("prefill in chunks", 0), ("token by token", decode)):
        with progress(what) as tick:
            part = tokens[:1] if count else tokens
            runs.append(perplexity(model, part, caches, chunk=chunk, decode_tokens=count, tokenizer=tokenizer, progress=tick))
        out.print(perplexity_table(runs[-1]))
    questions, total = needle_samples(tasks, tokenizer, name, text, lengths=lengths, samples=samples)
    outcomes = ask_all("questions", model, tokenizer, questions, total, caches, chunk=chunk)
    out.print(*accuracy_tables(outcomes))
    about = meta(model)
    write_page(folder / "index.html", page(about, runs, outcomes))
    write_json(folder / "report.json", {"meta": about, "perplexity": [row for rows in runs for row in rows], "needle": outcomes})
    save_outcomes(folder / "outcomes.jsonl", outcomes)
    out.print(f"{folder}/index.html, {folder}/report.json, {folder}/outcomes.jsonl")
