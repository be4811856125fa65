"""`fp8attn evaluate`: caches compared on identical tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8attn.errors import UsageError

from . import options, shared

evaluate = typer.Typer(help="Compare caches on identical tokens.", no_args_is_help=True)


@evaluate.command()
def perplexity(
    model: options.Model = None,
    cache: options.CacheChoice = "both",
    scales: options.Scales = None,
    text: options.Text = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.", min=1, max=options.MOST_TOKENS)] = 2048,
    count: options.Windows = 8,
    decode: Annotated[
        int,
        typer.Option(
            help="Predict only this many last tokens, one at a time. 0: all, in chunks.", min=0, max=options.MOST_TOKENS
        ),
    ] = 0,
    chunk: options.Chunk = 512,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Perplexity and bits per byte of the same tokens through each cache."""
    from ..evaluation.perplexity import perplexity
    from .tables import perplexity_table, positions_table

    chosen, passage = shared.choose(cache, scales), shared.read_text(text, model)
    loaded, tokenizer = shared.load(model, device)
    caches, tokens = shared.makers(chosen, loaded), shared.windows(tokenizer, passage, context + 1, count)
    with shared.progress("tokens") as tick:
        rows = perplexity(loaded, tokens, caches, chunk=chunk, decode_tokens=decode, tokenizer=tokenizer, progress=tick)
    if as_json:
        shared.print_json({"meta": shared.about(loaded), "rows": rows})
    else:
        shared.out.print(perplexity_table(rows))
        if len(rows[0].positions) > 1:
            shared.out.print(positions_table(rows))


@evaluate.command()
def needle(
    model: options.Model = None,
    cache: options.CacheChoice = "both",
    scales: options.Scales = None,
    task: options.Tasks = "recall",
    text: options.Text = None,
    lengths: options.Lengths = "512,1024,2048,4096",
    samples: options.Samples = 2,
    depths: Annotated[
        str, typer.Option(help="recall: positions of the needle: 0 is the start, 1 the end.")
    ] = "0,0.25,0.5,0.75,1",
    distractors: Annotated[
        int, typer.Option(help="recall: other pairs in each prompt.", min=0, max=options.MOST_SAMPLES)
    ] = 3,
    seed: options.Seed = 0,
    plot: Annotated[Path | None, typer.Option(help="Write heat maps to this file (.png, .svg, .pdf).")] = None,
    save: Annotated[Path | None, typer.Option("--out", help="Write every answer to this file, as JSON lines.")] = None,
    chunk: options.Chunk = 512,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Ask for sentences hidden at each length and depth, greedily. All caches get the same samples, and are compared in
    pairs.
    """
    if plot:
        from . import plots

        plots.check_format(plot)
    write_plot, write_outcomes = shared.output(plot), shared.output(save)
    from ..evaluation.outcomes import cells, same_outcomes, save_outcomes, score
    from ..evaluation.paired import compare
    from .tables import accuracy_tables, discordant_table, needle_table

    tasks = shared.task_names(task)
    grid = {"lengths": shared.numbers(lengths, int, "--lengths"), "depths": shared.numbers(depths, float, "--depths")}
    chosen, passage = shared.choose(cache, scales), shared.read_text(text, model)
    loaded, tokenizer = shared.load(model, device)
    caches = shared.makers(chosen, loaded)
    questions = shared.needle_samples(
        tasks, tokenizer, passage, **grid, samples=samples, distractors=distractors, seed=seed
    )
    outcomes = shared.ask_all("answers", loaded, tokenizer, questions, caches, chunk=chunk)
    first, *others = caches
    heading = f"Needle in a haystack: {Path(loaded.config._name_or_path).name}"
    write_outcomes(lambda path: save_outcomes(path, outcomes))
    write_plot(lambda path: plots.save(plots.needle_maps(outcomes, heading=heading), path))
    if as_json:
        scores = {name: score(outcomes, name) for name in caches}
        equal = {name: same_outcomes(outcomes, first, name) for name in others}
        pairs = [compare(outcomes, first, name) for name in others]
        shared.print_json(
            {
                "meta": shared.about(loaded),
                "scores": scores,
                "equal_to_first": equal,
                "paired": pairs,
                "rows": cells(outcomes),
            }
        )
        return
    shared.out.print(needle_table(outcomes))
    shared.out.print(*accuracy_tables(outcomes), discordant_table(outcomes))


@evaluate.command()
def drift(
    model: options.Model = None,
    cache: Annotated[str, typer.Option(help=f"The cache to compare with bf16: one of {options.CACHE_NAMES}.")] = "fp8",
    scales: options.Scales = None,
    text: options.Text = None,
    prompt: Annotated[int, typer.Option(help="Tokens that are prefilled.", min=1, max=options.MOST_TOKENS)] = 1024,
    decode: Annotated[
        int, typer.Option(help="Tokens that are then decoded, one at a time.", min=2, max=options.MOST_TOKENS)
    ] = 512,
    segment: Annotated[
        int, typer.Option(help="Tokens between two operations on the cache.", min=2, max=options.MOST_TOKENS)
    ] = 64,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.", min=1, max=options.MOST)] = 2,
    chunk: options.Chunk = 512,
    device: options.Device = None,
    as_json: options.Json = False,
) -> None:
    """Decode many tokens while the cache is copied, reordered and truncated: do predictions drift away from BF16?"""
    from ..evaluation.drift import drift
    from .tables import drift_table

    if "," in cache or cache == "both":
        raise UsageError(f"drift takes one cache at a time; got {cache!r}")
    chosen, passage = shared.choose(cache, scales), shared.read_text(text, model)
    loaded, tokenizer = shared.load(model, device)
    (make,) = shared.makers(chosen, loaded, max_cache_len=prompt + decode).values()
    baseline = shared.makers({"bf16": None}, loaded)["bf16"]
    tokens = shared.windows(tokenizer, passage, prompt + decode + 1, batch)
    with shared.progress("tokens") as tick:
        rows = drift(loaded, tokens, make, baseline, prompt=prompt, segment=segment, chunk=chunk, progress=tick)
    if as_json:
        shared.print_json({"meta": shared.about(loaded), "cache": cache, "rows": rows})
    else:
        shared.out.print(drift_table(rows))
