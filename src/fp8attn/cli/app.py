"""The commands. Each imports what it needs itself, so that `--help` and `plan` do not wait for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from .shared import encode, load, makers, numbers, out, print_json, progress

app = typer.Typer(
    help="An FP8 KV cache and FP8 attention: half the memory, the same answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
evaluate = typer.Typer(help="Compare caches on identical tokens.", no_args_is_help=True)
app.add_typer(evaluate, name="evaluate")

Model = Annotated[str | None, typer.Option(help="A model folder or Hugging Face id. Default: the small model of this repository.")]
Device = Annotated[str | None, typer.Option(help="Where to run. Default: the GPU where there is one.")]
CACHES = "bf16, fp8, fp8-static, fp8-no-means, transformers-fp8"
CacheChoice = Annotated[str, typer.Option("--cache", help=f"both, or some of {CACHES}, joined by commas.")]
Scales = Annotated[Path | None, typer.Option(help="Calibrated scales for the FP8 cache (fp8attn calibrate).")]
Text = Annotated[Path | None, typer.Option(help="A text file, plain or .xz. Default: the held-out text of the committed model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
Chunk = Annotated[int, typer.Option(help="Tokens of a prefill's forward.", min=1)]


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to continue.")],
    model: Model = None,
    cache: CacheChoice = "fp8",
    scales: Scales = None,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0: greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of the sampling; the same for every cache.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Continue a prompt, through one cache or several."""
    import torch

    from ..evaluation.report import title

    loaded, tokenizer = load(model, device)
    caches = makers(cache, loaded, scales)
    inputs = encode(tokenizer, prompt, chat).to(loaded.device)
    sampling = {"do_sample": True, "temperature": temperature} if temperature else {"do_sample": False}
    rows = []
    for name, make in caches.items():
        torch.manual_seed(seed)
        pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        made = make()
        ids = loaded.generate(**inputs, past_key_values=made, max_new_tokens=max_new_tokens, pad_token_id=pad, **sampling)
        new = ids[0, inputs["input_ids"].shape[1] :].tolist()
        rows.append({"cache": name, "text": tokenizer.decode(new), "tokens": new, "cache_bytes": getattr(made, "nbytes", None)})
    same = all(row["tokens"] == rows[0]["tokens"] for row in rows)
    if as_json:
        print_json({"prompt": prompt, "rows": rows, "tokens_equal": same})
        return
    for row in rows:
        out.rule(f"{title(row['cache'])} cache" + ("" if row["cache_bytes"] is None else f", {row['cache_bytes']:,} bytes"), align="left")
        out.print((prompt if not chat else "") + row["text"], markup=False, highlight=False)
    if len(rows) > 1:
        out.rule("the same tokens" if same else "different tokens", align="left")


@evaluate.command()
def perplexity(
    model: Model = None,
    cache: CacheChoice = "both",
    scales: Scales = None,
    text: Text = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.", min=1)] = 2048,
    windows: Annotated[int, typer.Option(help="Windows, from the start of the text.", min=1)] = 8,
    decode: Annotated[int, typer.Option(help="Predict only the last so many tokens, one at a time. 0: all, in chunks.", min=0)] = 0,
    chunk: Chunk = 512,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Perplexity and bits per byte of the same tokens through each cache."""
    from ..evaluation.models import read_text, tokenize
    from ..evaluation.models import windows as cut
    from ..evaluation.perplexity import perplexity
    from ..evaluation.report import meta, perplexity_table

    loaded, tokenizer = load(model, device)
    caches = makers(cache, loaded, scales)
    tokens = cut(tokenize(tokenizer, read_text(text, model)), context + 1, windows)
    with progress("windows") as tick:
        rows = perplexity(loaded, tokens, caches, chunk=chunk, decode_tokens=decode, tokenizer=tokenizer, progress=tick)
    if as_json:
        print_json({"meta": meta(loaded), "rows": rows})
    else:
        out.print(perplexity_table(rows))


@evaluate.command()
def needle(
    model: Model = None,
    cache: CacheChoice = "both",
    scales: Scales = None,
    text: Text = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "512,1024,2048,4096",
    depths: Annotated[str, typer.Option(help="Where the needle stands: 0 the start, 1 the end.")] = "0,0.25,0.5,0.75,1",
    samples: Annotated[int, typer.Option(help="Prompts of each cell.", min=1)] = 2,
    distractors: Annotated[int, typer.Option(help="Other pairs in each prompt.", min=0)] = 3,
    seed: Annotated[int, typer.Option(help="Of names, values, texts and places.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write a heat map (PNG) here.")] = None,
    chunk: Chunk = 512,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Retrieve a value hidden in code, at each length and depth, through each cache; exact match, greedy."""
    from ..evaluation.models import read_text
    from ..evaluation.needle import Haystack, cells_equal, needle_grid, score
    from ..evaluation.report import meta, needle_table, plot_needle

    grid = {"lengths": numbers(lengths, int, "--lengths"), "depths": numbers(depths, float, "--depths")}
    loaded, tokenizer = load(model, device)
    caches = makers(cache, loaded, scales)
    haystack = Haystack(tokenizer, read_text(text, model), seed)
    with progress("prompts") as tick:
        cells = needle_grid(
            loaded, tokenizer, haystack, caches, **grid, samples=samples, distractors=distractors, chunk=chunk, progress=tick
        )
    names = list(caches)
    scores = {name: score(cells, name) for name in names}
    equal = {name: cells_equal(cells, names[0], name) for name in names[1:]}
    if plot:
        plot_needle(cells, plot, heading=f"Needle in a haystack: {Path(loaded.config._name_or_path).name}")
    if as_json:
        print_json({"meta": meta(loaded), "scores": scores, "equal_to_first": equal, "rows": cells})
        return
    out.print(needle_table(cells))
    for name, same in equal.items():
        out.print(f"{name}: {'right and wrong on the same prompts as' if same else 'differs from'} {names[0]}")


@app.command()
def calibrate(
    model: Model = None,
    save: Annotated[Path, typer.Option("--out", help="Where to write the scales (safetensors).")] = Path("out/scales.safetensors"),
    text: Text = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.", min=2)] = 1024,
    windows: Annotated[int, typer.Option(help="Windows, from the end of the text (evaluations start at its start).", min=1)] = 16,
    method: Annotated[str, typer.Option(help="absmax, or percentile (what is larger saturates).")] = "absmax",
    percentile: Annotated[float, typer.Option(help="Of the magnitudes, with --method percentile.")] = 99.99,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Find static scales and means, and how much each layer loses to FP8."""
    from .. import calibrate as run
    from ..evaluation.models import read_text, tokenize
    from ..evaluation.models import windows as cut
    from ..evaluation.report import meta, sensitivity_table

    loaded, tokenizer = load(model, device)
    batches = cut(tokenize(tokenizer, read_text(text, model)), context, windows, from_end=True)
    with progress("windows") as tick:
        found = run(loaded, batches.split(1), method=method, percentile=percentile, progress=tick)
    save.parent.mkdir(parents=True, exist_ok=True)
    found.save(save)
    if as_json:
        rows = [{"layer": index, "k_sqnr_db": k, "v_sqnr_db": v} for index, (k, v) in found.sqnr_db.items()]
        print_json({"meta": meta(loaded), "scales": str(save), "tokens": found.tokens, "method": found.method, "rows": rows})
        return
    out.print(sensitivity_table(found))
    out.print(f"scales: {save}")


@app.command()
def plan(
    model: Model = None,
    layers: Annotated[int | None, typer.Option(help="Instead of a model: its attention layers.")] = None,
    kv_heads: Annotated[int | None, typer.Option(help="... and their KV heads.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="... and the size of a head.")] = None,
    memory: Annotated[str, typer.Option(help="Of the device, such as 80GB or 24GiB.")] = "80GB",
    weights: Annotated[str | None, typer.Option(help="Bytes of the parameters. Default: counted, where a model is named.")] = None,
    context: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1)] = 32768,
    batch: Annotated[int, typer.Option(help="Sequences side by side.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """What fits into a memory: the longest context and the largest batch, BF16 beside FP8."""
    from .. import plan as planning

    given = (layers, kv_heads, head_dim)
    if any(given) and (model or not all(given)):
        raise ValueError("give a --model, or all of --layers, --kv-heads and --head-dim")
    if all(given):
        shape, counted, source = planning.CacheShape(*given), 0, "not counted; give --weights"
    else:
        from ..evaluation.models import default_model, load_config

        config = load_config(model)
        shape = planning.shape_of(config)
        counted, source = (0, "") if weights else planning.count_weights(str(model or default_model()), config)
    if weights:
        counted, source = planning.parse_bytes(weights), "as given"
    size = planning.parse_bytes(memory)
    fits = planning.plan(shape, size, weights=counted, context=context, batch=batch)
    if as_json:
        print_json({"memory": size, "weights": counted, "context": context, "batch": batch, "shape": shape, "rows": fits})
        return
    table = Table(title=f"{planning.human(size)}, weights {planning.human(counted)} ({source})")
    columns = (
        "cache",
        "bytes/token",
        f"{batch} x {context:,} tokens take",
        f"longest context, batch {batch}",
        f"largest batch at {context:,}",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "cache" else "right")
    for fit in fits:
        taken = planning.human(fit.cache_bytes)
        table.add_row(fit.cache.upper(), f"{fit.bytes_per_token:,.0f}", taken, f"{fit.longest_context:,}", f"{fit.largest_batch:,}")
    out.print(table)
    if shape.windows or shape.other_layers:
        kept = f"{len(shape.windows)} sliding layers stay in 16 bits, {shape.other_layers} layers have no cache of K and V"
        out.print(f"{shape.full_layers} full layers; {kept}")


@app.command()
def doctor(
    measure: Annotated[bool, typer.Option(help="On a Hopper GPU, run the FP8 kernels that are here and say how exactly they sum.")] = True,
    as_json: Json = False,
) -> None:
    """What this machine can run, why not the rest, and how exactly its FP8 kernels sum."""
    from ..doctor import diagnose

    checks = diagnose(measure)
    if as_json:
        print_json(checks)
        return
    table = Table(box=None, show_header=False)
    marks = {"ok": "[green]ok", "warn": "[yellow]!", "no": "[yellow]no", "info": ""}
    for check in checks:
        table.add_row(marks[check.status], check.name, escape(check.detail))
    out.print(table)


@app.command()
def demo(
    save: Annotated[Path, typer.Option("--out", help="Folder for demo.json, needle.png and scales.safetensors.")] = Path("out"),
    device: Device = None,
) -> None:
    """Everything once on the committed model: calibrate, generate, perplexity, needles; BF16 beside FP8. Minutes on a laptop, no GPU."""
    from .demo import run

    run(save, device)
