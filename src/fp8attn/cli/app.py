"""The commands. Each imports what it needs itself, so that `--help` and `plan` do not wait for transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from .. import __version__
from ..layout import DEFAULT_KEY_DTYPE
from .shared import ask_all, encode, load, makers, needle_samples, numbers, out, output, print_json, progress, read_windows

app = typer.Typer(
    help="An FP8 KV cache and FP8 attention: half the memory, the same answers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
evaluate = typer.Typer(help="Compare caches on identical tokens: everything with --report, or one evaluation.", invoke_without_command=True)
app.add_typer(evaluate, name="evaluate")

Model = Annotated[
    str | None, typer.Option(help="A model folder, smollm2, or a Hugging Face id. Default: the small model of this repository.")
]
Device = Annotated[str | None, typer.Option(help="Where to run. Default: the GPU where there is one.")]
CACHES = "bf16, fp8, fp8-int8-keys, fp8-e4m3-keys, fp8-e4m3-plain, fp8-static, scale-1, transformers-fp8"
CacheChoice = Annotated[str, typer.Option("--cache", help=f"both, or some of {CACHES}, joined by commas.")]
Scales = Annotated[Path | None, typer.Option(help="Calibrated scales (fp8attn calibrate): fp8 means fp8-static, unless both are named.")]
Text = Annotated[Path | None, typer.Option(help="A text file, plain or .xz. Default: the held-out text of the committed model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
Chunk = Annotated[int, typer.Option(help="Tokens of a prefill's forward.", min=1)]
Stress = Annotated[
    int, typer.Option(help="Plant offsets and outlier channels that cancel (evaluation/stress.py), this hard.", min=0, max=3)
]
TASKS = "recall, niah_single_1, niah_multikey_2, niah_multikey_3, ruler_vt"
Tasks = Annotated[str, typer.Option("--task", help=f"Some of {TASKS}, joined by commas; all but the first need fp8attn[ruler].")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fp8attn {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Options of `fp8attn` itself."""


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


@evaluate.callback()
def evaluate_all(
    context_: typer.Context,
    report: Annotated[Path | None, typer.Option(help="Run everything and write a page, index.html, into this folder.")] = None,
    model: Model = None,
    cache: CacheChoice = "both",
    scales: Scales = None,
    text: Text = None,
    context: Annotated[int, typer.Option(help="Tokens of a window, for the perplexity.", min=1)] = 4096,
    windows: Annotated[int, typer.Option(help="Windows, from the start of the text.", min=1)] = 2,
    decode: Annotated[int, typer.Option(help="Tokens of the first window that are also decoded one at a time.", min=1)] = 128,
    task: Tasks = "recall",
    lengths: Annotated[str, typer.Option(help="Tokens of the questions' prompts.")] = "512,1024,2048,4096",
    samples: Annotated[int, typer.Option(help="Questions of each length (recall: and of each of five depths).", min=1)] = 2,
    chunk: Chunk = 512,
    stress: Stress = 0,
    device: Device = None,
) -> None:
    if context_.invoked_subcommand is not None:
        return
    if report is None:
        raise ValueError("say --report FOLDER, or which evaluation: perplexity, needle, drift (fp8attn evaluate --help)")
    from .report import run

    sizes = numbers(lengths, int, "--lengths")
    what = {"device": device, "stress": stress, "cache": cache, "scales": scales, "text": text, "tasks": task}
    run(report, model, **what, context=context, windows=windows, decode=decode, lengths=sizes, samples=samples, chunk=chunk)


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
    stress: Stress = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Perplexity and bits per byte of the same tokens through each cache."""
    from ..evaluation.perplexity import perplexity
    from ..evaluation.report import meta, perplexity_table

    loaded, tokenizer = load(model, device, stress)
    caches = makers(cache, loaded, scales)
    tokens = read_windows(tokenizer, model, text, context + 1, windows)
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
    task: Tasks = "recall",
    text: Text = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the prompts.")] = "512,1024,2048,4096",
    samples: Annotated[int, typer.Option(help="Prompts of each length (recall: and of each depth).", min=1)] = 2,
    depths: Annotated[str, typer.Option(help="recall: where the needle stands: 0 the start, 1 the end.")] = "0,0.25,0.5,0.75,1",
    distractors: Annotated[int, typer.Option(help="recall: other pairs in each prompt.", min=0)] = 3,
    seed: Annotated[int, typer.Option(help="Of keys, values, texts and places.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Write heat maps here (.png, .svg, .pdf).")] = None,
    save: Annotated[Path | None, typer.Option(help="Write every answer here, as JSON lines.")] = None,
    chunk: Chunk = 512,
    stress: Stress = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Retrieve what is hidden at each length and depth, through each cache, greedily; the same samples, compared in pairs."""
    from ..evaluation.needle import cells, same_outcomes, save_outcomes, score
    from ..evaluation.paired import compare
    from ..evaluation.report import accuracy_tables, discordant, meta, needle_table, title

    if plot:
        from ..evaluation import plots

        plots.check_format(plot)
    write_plot, write_outcomes = output(plot), output(save)
    grid = {"lengths": numbers(lengths, int, "--lengths"), "depths": numbers(depths, float, "--depths")}
    loaded, tokenizer = load(model, device, stress)
    caches = makers(cache, loaded, scales)
    questions = needle_samples(task, tokenizer, model, text, **grid, samples=samples, distractors=distractors, seed=seed)
    outcomes = ask_all("answers", loaded, tokenizer, questions, caches, chunk=chunk)
    first, *others = caches
    heading = f"Needle in a haystack: {Path(loaded.config._name_or_path).name}"
    write_outcomes(lambda path: save_outcomes(path, outcomes))
    write_plot(lambda path: plots.save(plots.needle_maps(outcomes, heading=heading), path))
    if as_json:
        scores = {name: score(outcomes, name) for name in caches}
        equal = {name: same_outcomes(outcomes, first, name) for name in others}
        pairs = [compare(outcomes, first, name) for name in others]
        print_json({"meta": meta(loaded), "scores": scores, "equal_to_first": equal, "paired": pairs, "rows": cells(outcomes)})
        return
    out.print(needle_table(outcomes))
    out.print(*accuracy_tables(outcomes))
    for mine, theirs in discordant(outcomes):
        where = f"{mine.task} {mine.length} #{mine.index}, {', '.join(mine.answers)}"
        out.print(f"{where}: {title(first)} said {mine.text!r}, {title(theirs.cache)} {theirs.text!r}", markup=False, highlight=False)


@evaluate.command()
def drift(
    model: Model = None,
    cache: Annotated[str, typer.Option(help=f"The cache to judge beside bf16: one of {CACHES}.")] = "fp8",
    scales: Scales = None,
    text: Text = None,
    prompt: Annotated[int, typer.Option(help="Tokens that are prefilled.", min=1)] = 1024,
    decode: Annotated[int, typer.Option(help="Tokens that are then decoded, one at a time.", min=2)] = 512,
    segment: Annotated[int, typer.Option(help="Tokens between two operations on the cache.", min=2)] = 64,
    batch: Annotated[int, typer.Option(help="Sequences side by side.", min=1)] = 2,
    chunk: Chunk = 512,
    stress: Stress = 0,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Decode at length while the cache is copied, reordered and truncated: does it drift away from BF16?"""
    from ..evaluation.drift import drift
    from ..evaluation.report import drift_table, meta

    loaded, tokenizer = load(model, device, stress)
    if "," in cache or cache == "both":
        raise ValueError(f"drift judges one cache at a time; got {cache!r}")
    ((_, make),) = makers(cache, loaded, scales, max_cache_len=prompt + decode).items()
    baseline = makers("bf16", loaded, None)["bf16"]
    tokens = read_windows(tokenizer, model, text, prompt + decode + 1, batch)
    with progress("tokens") as tick:
        rows = drift(loaded, tokens, make, baseline, prompt=prompt, segment=segment, chunk=chunk, progress=tick)
    if as_json:
        print_json({"meta": meta(loaded), "cache": cache, "rows": rows})
    else:
        out.print(drift_table(rows))


@app.command()
def calibrate(
    model: Model = None,
    save: Annotated[Path, typer.Option("--out", help="Where to write the scales (safetensors).")] = Path("out/scales.safetensors"),
    text: Text = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.", min=2)] = 1024,
    windows: Annotated[int, typer.Option(help="Windows, from the end of the text (evaluations start at its start).", min=1)] = 16,
    method: Annotated[str, typer.Option(help="absmax, or percentile (what is larger saturates).")] = "absmax",
    percentile: Annotated[float, typer.Option(help="Of the magnitudes, with --method percentile.")] = 99.99,
    key_dtype: Annotated[str, typer.Option(help="What the cache will store keys in: int8 or e4m3.")] = DEFAULT_KEY_DTYPE,
    rotate_keys: Annotated[bool, typer.Option(help="Whether the cache will rotate keys.")] = True,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Find static scales and means, how much each layer loses to 8 bits, and the layers whose K has an offset that no mean removes."""
    from .. import calibrate as run
    from ..doctor import offset_checks
    from ..evaluation.report import meta, sensitivity_table

    write_scales = output(save)
    loaded, tokenizer = load(model, device)
    batches = read_windows(tokenizer, model, text, context, windows, from_end=True)
    with progress("windows") as tick:
        options = {"method": method, "percentile": percentile, "key_dtype": key_dtype, "rotate_keys": rotate_keys}
        found = run(loaded, batches.split(1), **options, progress=tick)
    write_scales(found.save)
    if as_json:
        rows = [
            {"layer": index, "k_sqnr_db": k, "v_sqnr_db": v, "k_offset": found.k_offsets.get(index)}
            for index, (k, v) in found.sqnr_db.items()
        ]
        about = {"scales": str(save), "tokens": found.tokens, "method": found.method, "key_dtype": key_dtype, "rotate_keys": rotate_keys}
        print_json({"meta": meta(loaded), **about, "rows": rows})
        return
    out.print(sensitivity_table(found))
    for check in offset_checks(found.k_offsets):
        out.print(f"{check.name}: {check.detail}", markup=False)
    out.print(f"scales: {save}")


@app.command()
def plan(
    model: Model = None,
    layers: Annotated[int | None, typer.Option(help="Instead of a model: its attention layers.", min=1)] = None,
    kv_heads: Annotated[int | None, typer.Option(help="... and their KV heads.", min=1)] = None,
    head_dim: Annotated[int | None, typer.Option(help="... and the size of a head.", min=1)] = None,
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
def warmup(
    model: Annotated[str | None, typer.Option(help="A model folder, smollm2, or a Hugging Face id: its config is read.")] = None,
    shape: Annotated[str | None, typer.Option(help="Instead of a model: query heads, KV heads and head_dim, such as 32,8,128.")] = None,
    device: Annotated[str, typer.Option(help="The GPU to compile for.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="That the model runs in: bfloat16 or float16.")] = "bfloat16",
    backend: Annotated[str, typer.Option(help="auto, hopper or triton.")] = "auto",
    key_dtype: Annotated[str, typer.Option(help="What the cache stores keys in: int8 or e4m3.")] = DEFAULT_KEY_DTYPE,
    rotate_keys: Annotated[bool, typer.Option(help="Whether the cache rotates keys.")] = True,
    means: Annotated[bool, typer.Option(help="Static means too (FP8Cache.for_model).")] = False,
    static_scales: Annotated[bool, typer.Option(help="Calibrated scales instead of the pages' own.")] = False,
    window: Annotated[bool, typer.Option(help="Windows too.")] = False,
    softcap: Annotated[bool, typer.Option(help="Attention has a softcap (read from a model's config).")] = False,
    sinks: Annotated[bool, typer.Option(help="Attention has sinks (read from a model's config).")] = False,
    target: Annotated[str | None, typer.Option(help="Compile for this architecture, such as sm_90, without a GPU.")] = None,
    processes: Annotated[int | None, typer.Option(help="That compile side by side. Default: one a core.", min=1)] = None,
    as_json: Json = False,
) -> None:
    """Compile every kernel that a model can meet, side by side, so that nothing compiles while it serves."""
    import time

    from .. import warmup as run
    from ..warmup import DTYPES

    if (model is None) == (shape is None):
        raise ValueError("give a --model or a --shape, such as --shape 32,8,128 (query heads, KV heads, head_dim)")
    if dtype not in DTYPES:
        raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    if model is not None:
        from ..evaluation.models import load_config

        layer = {"config": load_config(model)}
    else:
        if shape.count(",") != 2:
            raise ValueError(f"--shape must be three numbers: query heads, KV heads and head_dim; got {shape!r}")
        layer = dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), numbers(shape, int, "--shape"), strict=True))
    begun = time.monotonic()
    with progress("kernels") as tick:
        kernels = run(
            **layer, device=device, dtype=DTYPES[dtype], backend=backend, key_dtype=key_dtype, rotate_keys=rotate_keys, means=means,
            static_scales=static_scales, window=window, softcap=softcap, sinks=sinks, target=target, processes=processes, progress=tick,
        )  # fmt: skip
    seconds = time.monotonic() - begun
    if as_json:
        print_json({"seconds": seconds, "kernels": [kernel._asdict() for kernel in kernels]})
        return
    out.print(f"{len(kernels)} kernels in {seconds:.0f} s ({sum(kernel.seconds for kernel in kernels):.0f} s of one core)")


@app.command()
def doctor(
    model: Annotated[str | None, typer.Option(help="Also what 8-bit keys mean for this model: a folder or Hugging Face id.")] = None,
    measure: Annotated[bool, typer.Option(help="On a Hopper GPU, run the FP8 kernels that are here and say how exactly they sum.")] = True,
    as_json: Json = False,
) -> None:
    """What this machine can run, why not the rest, and how exactly its FP8 kernels sum."""
    from ..doctor import diagnose, examine

    checks = diagnose(measure)
    if model is not None:
        checks += examine(load(model, "cpu")[0])
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
