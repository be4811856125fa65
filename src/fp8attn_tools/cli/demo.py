"""`fp8attn demo`: what an 8-bit cache saves and what it costs, measured in a minute or two without a GPU."""

from __future__ import annotations

import time
from itertools import takewhile
from pathlib import Path
from typing import Any

from rich.markup import escape

from fp8attn.errors import UsageError

from ..evaluation import models
from ..evaluation.caches import decode_greedily, prefill
from ..evaluation.names import title
from ..evaluation.outcomes import cells, same_outcomes, score
from ..evaluation.perplexity import Perplexity, perplexity
from ..evaluation.recall import recall_samples
from ..evaluation.record import write_json
from .plots import needle_maps, save
from .shared import about, ask_all, encode, load, makers, out, output, progress
from .tables import needle_table, perplexity_table

PUBLIC = "smollm2"
QUESTION = "What is a hash table? Answer in one sentence."
PROMPT = "def read_header(self, name, default=None):\n"  # for a model without a chat template
ANSWER = 48  # tokens, at most
CONTEXT = 1024  # tokens, of the perplexity
CACHES = ("bf16", "fp8", "scale-1")
LENGTHS = (512, 1024, 2048)  # tokens of the needles' prompts


def run(folder: Path, device: str | None, model: str = PUBLIC) -> dict[str, Any]:
    """Answer, measure and retrieve. Print tables, and write `demo.json` and `needle.png` into `folder`.

    `model` answers and is measured. The committed model finds the needles, because it is trained for that. If one of
    them is missing, the other does both.
    """
    began = time.monotonic()
    write_results, write_plot = (output(folder / file) for file in ("demo.json", "needle.png"))
    text, committed = models.read_text(), models.committed_model()
    try:
        loaded, tokenizer = load(model, device)
    except UsageError as missing:
        if committed is None:
            raise
        out.print(f"[yellow]{escape(str(missing))}. The model of this repository is measured instead.")
        loaded, tokenizer = load(str(committed), device)
    name = _name(loaded)

    out.rule(f"1. {name} answers, greedily", align="left")
    matched, counted = _show(tokenizer, *_answer(loaded, tokenizer))
    out.print(f"{matched} of {counted} tokens of the answer are as in BF16")

    out.rule(f"2. {name} predicts Python code through each cache", align="left")
    tokens = models.windows(models.tokenize(tokenizer, text), CONTEXT + 1, 1)
    with progress(f"{CONTEXT} tokens through {len(CACHES)} caches") as tick:
        rows = perplexity(loaded, tokens, makers(dict.fromkeys(CACHES), loaded), tokenizer=tokenizer, progress=tick)
    out.print(perplexity_table(rows))

    finder, words = (
        (loaded, tokenizer)
        if committed is None or str(committed) == loaded.config.name_or_path
        else load(str(committed), device)
    )
    out.rule(f"3. {_name(finder)} finds needles in a haystack of Python code", align="left")
    questions = list(recall_samples(words, text, lengths=LENGTHS, samples=1, seed=2026))
    outcomes = ask_all("asking", finder, words, questions, makers(dict.fromkeys(("bf16", "fp8")), finder))
    out.print(needle_table(outcomes))
    write_plot(lambda path: save(needle_maps(outcomes, heading=f"Needle in a haystack: {_name(finder)}"), path))

    results = {
        "model": name,
        "greedy_tokens_equal": matched == counted,
        "greedy_tokens_matched": matched,
        "greedy_tokens": counted,
        **{f"ppl_{row.cache}": row.ppl for row in rows},
        **{f"kl_{row.cache}": row.kl for row in rows},
        **{f"bytes_per_token_{row.cache}": row.bytes_per_token for row in rows},
        "needle_model": _name(finder),
        "needle_bf16": score(outcomes, "bf16"),
        "needle_fp8": score(outcomes, "fp8"),
        "needle_cells_equal": same_outcomes(outcomes, "bf16", "fp8"),
        "seconds": time.monotonic() - began,
    }
    write_results(
        lambda path: write_json(path, {**results, "meta": about(loaded), "perplexity": rows, "needle": cells(outcomes)})
    )
    out.rule("What the cache saves, and what it costs", align="left")
    out.print(gain(name, rows), markup=False, highlight=False)
    out.print(f"{folder}/demo.json, {folder}/needle.png; {results['seconds']:.0f} s")
    return results


def gain(name: str, rows: list[Perplexity]) -> str:
    """What fp8attn's cache gains over a plain cast, in one sentence; then why this is not seen in the perplexity.

    Args:
        rows: of `CACHES`.
    """
    bf16, fp8, cast = rows
    times = cast.kl / fp8.kl
    change = f"{times:.1f} times less" if times >= 1 else f"{1 / times:.1f} times more"
    memory = fp8.bytes_per_token / bf16.bytes_per_token
    ours, casts = fp8.ppl / bf16.ppl - 1, cast.ppl / bf16.ppl - 1
    shown = "less" if (abs(ours) < abs(casts)) == (times >= 1) else "nothing"
    return (
        f"With {memory:.1%} of the memory of BF16, fp8attn changes the predictions of {name} {change} than a plain "
        f"cast to FP8 does: the KL divergence from BF16's predictions is {fp8.kl:.1e} instead of {cast.kl:.1e} nats "
        f"per token.\n"
        f"Perplexity shows {shown} of this ({ours:+.2%} and {casts:+.2%}), because changes that help and "
        "changes that hurt cancel in it."
    )


def _name(model: Any) -> str:
    return Path(model.config.name_or_path).name


def _answer(model: Any, tokenizer: Any) -> tuple[str, list[list[int]]]:
    """The prompt, and the tokens of BF16's and of FP8's answer, up to its end."""
    prompt = QUESTION if tokenizer.chat_template else PROMPT
    ids, end, answers = (
        encode(tokenizer, prompt, bool(tokenizer.chat_template))["input_ids"].to(model.device),
        tokenizer.eos_token_id,
        [],
    )
    with progress("answering") as tick:
        for number, make in enumerate(makers(dict.fromkeys(("bf16", "fp8")), model).values(), 1):
            cache = make()
            new, _ = decode_greedily(
                model, prefill(model, ids, cache), cache, ANSWER, done=lambda ids: bool(ids[0, -1] == end)
            )
            answers.append(list(takewhile(lambda token: token != end, new[0].tolist())))
            tick(number, 2)
    return prompt, answers


def _show(tokenizer: Any, prompt: str, answers: list[list[int]]) -> tuple[int, int]:
    """Print the prompt with each cache's answer.

    Returns:
        The number of tokens before the first difference, and the number of BF16's tokens.
    """
    out.print(f"[bold]{escape(prompt.rstrip())}")
    for name, ids in zip(("bf16", "fp8"), answers, strict=True):
        out.print(f"{title(name):>5}: {tokenizer.decode(ids).strip()}", markup=False, highlight=False)
    bf16, fp8 = answers
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(fp8, bf16, strict=False))), len(bf16)
