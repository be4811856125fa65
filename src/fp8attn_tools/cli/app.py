"""The commands. Each imports what it needs itself, so that `--help` and `plan` do not import transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table
from typer.core import TyperGroup

from fp8attn import __version__
from fp8attn.errors import UsageError
from fp8attn.extras import needs
from fp8attn.formats.codec import DEFAULT_KEY_DTYPE

from .doctor import doctor
from .evaluate import evaluate
from .export import export
from .failure import fail
from .generate import generate
from .options import MOST, MOST_TOKENS, Chunk, Context, Device, Json, KeyDtype, Model, RotateKeys, Text
from .sensitivity import sensitivity
from .shared import (
    about,
    load,
    numbers,
    out,
    output,
    print_json,
    progress,
    read_text,
    sequence_length,
    sequences,
    served_config,
)

BIASED = (  # `plan` of a model with biases
    "Weights are not read here. A layer that FP8Cache keeps in 16 bits because of its biases takes twice as much; "
    "fp8attn doctor --model names such layers"
)


class Commands(TyperGroup):
    """Shows errors that the user can correct in one line, with exit code 2. `--debug` shows their traceback, too."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command."""
        try:
            with needs("cli"):
                return super().invoke(ctx)
        except UsageError as error:
            if ctx.params.get("debug"):
                raise
            fail(str(error))
            raise typer.Exit(2) from error
        except typer.BadParameter as error:  # a number out of its range, a word that is no choice
            fail(error.format_message())
            raise typer.Exit(2) from error


app = typer.Typer(
    cls=Commands,
    help="An 8-bit KV cache and 8-bit attention: half the memory of BF16.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(evaluate, name="evaluate")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fp8attn {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of every error.")] = False,
) -> None:
    """Options of `fp8attn` itself."""


app.command()(generate)


@app.command()
def calibrate(
    model: Model = None,
    save: Annotated[Path, typer.Option("--out", help="The file to write (safetensors).")] = Path(
        "out/scales.safetensors"
    ),
    text: Text = None,
    context: Context = None,
    count: Annotated[
        int | None, typer.Option("--windows", help="Number of sequences. Default: 32,768 tokens.", min=1, max=MOST)
    ] = None,
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: RotateKeys = True,
    means: Annotated[
        bool, typer.Option(help="Means where K or V has an offset. Engines other than fp8attn subtract none.")
    ] = True,
    chunk: Chunk = 32768,
    held_out: Annotated[
        Path | None,
        typer.Option(help="Another text: report which of its values saturate, and which are rounded to zero."),
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Find static scales and means, what each layer loses in 8 bits, and the layers whose K has an offset that no mean
    removes.

    The text's last tokens are used, in sequences of the model's context.
    """
    write_scales = output(save)
    passage, other = read_text(text, model), None if held_out is None else read_text(held_out, model)
    from ..calibration.calibrate import calibrate as run
    from ..calibration.calibrate import check_calibrated, check_scales
    from ..diagnostics import offset_checks
    from ..evaluation.models import load_tokenizer
    from .tables import coverage_table, sensitivity_table

    config = served_config(model)
    check_calibrated(config)
    tokenizer = load_tokenizer(model)
    length = sequence_length(config, device, context)
    batches = sequences(
        tokenizer, passage, length, count, from_end=True
    )  # before the weights are loaded: a text may be too short
    others = None if other is None else sequences(tokenizer, other, length)
    loaded, _ = load(model, device)
    with progress("sequences") as tick:
        found = run(
            loaded, batches, key_dtype=key_dtype, rotate_keys=rotate_keys, means=means, chunk=chunk, progress=tick
        )  # fmt: skip
    write_scales(found.save)
    covered = None
    if others is not None:
        with progress("held-out sequences") as tick:
            covered = check_scales(loaded, others, found, chunk=chunk, progress=tick)
    if as_json:
        rows = [
            {"layer": index, "k_sqnr_db": k, "v_sqnr_db": v, "k_offset": found.k_offsets.get(index)}
            for index, (k, v) in found.sqnr_db.items()
        ]
        how = {
            "scales": str(save),
            "tokens": found.tokens,
            "method": found.method,
            "key_dtype": key_dtype,
            "rotate_keys": rotate_keys,
        }
        print_json({"meta": about(loaded), **how, "rows": rows, "report": None if covered is None else covered.rows()})
        return
    out.print(sensitivity_table(found))
    for check in offset_checks(found.k_offsets):
        out.print(f"{check.name}: {check.detail}", markup=False)
    if covered is not None:
        out.print(coverage_table(covered))
    out.print(f"scales: {save}")


app.command()(sensitivity)
app.command()(export)


@app.command()
def plan(
    model: Model = None,
    layers: Annotated[
        int | None, typer.Option(help="Instead of a model: the number of its attention layers.", min=1, max=MOST)
    ] = None,
    kv_heads: Annotated[int | None, typer.Option(help="With --layers: KV heads of a layer.", min=1, max=MOST)] = None,
    head_dim: Annotated[int | None, typer.Option(help="With --layers: the size of a head.", min=1, max=MOST)] = None,
    memory: Annotated[str, typer.Option(help="Memory of the device, such as 80GB or 24GiB.")] = "80GB",
    weights: Annotated[
        str | None, typer.Option(help="Bytes of the parameters, such as 16GB. Default: counted, if there is a model.")
    ] = None,
    context: Annotated[int, typer.Option(help="Tokens of a sequence.", min=1, max=MOST_TOKENS)] = 32768,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.", min=1, max=MOST)] = 1,
    as_json: Json = False,
) -> None:
    """How much fits into memory: the longest context and the largest batch, with a BF16 and with an FP8 cache."""
    from .. import plan as planning

    given = (layers, kv_heads, head_dim)
    if any(given) and (model or not all(given)):
        raise UsageError("give --model, or all of --layers, --kv-heads and --head-dim")
    if layers is not None and kv_heads is not None and head_dim is not None:
        shape, counted, source = planning.CacheShape(layers, kv_heads, head_dim), 0, "not counted; give --weights"
        biases = False
    else:
        from ..evaluation.models import default_model, load_config
        from ..shape import count_weights, may_have_biases, shape_of

        name = model or default_model()
        config = load_config(name)
        shape = shape_of(config)
        biases = shape.rank is None and may_have_biases(config)
        counted, source = (0, "") if weights else count_weights(name, config)
    if weights:
        counted, source = planning.parse_bytes(weights), "--weights"
    size = planning.parse_bytes(memory)
    fits = planning.plan(shape, size, weights=counted, context=context, batch=batch)
    note = BIASED if biases else None
    if shape.rank is not None:
        pages = shape.pages
        note = (
            f"Attention caches latents of {shape.rank} channels and {shape.head_dim - shape.rank} of a key with RoPE: "
            f"{pages.layout.token_bytes} bytes a token and layer, {2 * sum(pages.widths):,} in 16 bits"
        )
    if as_json:
        print_json(
            {
                "memory": size,
                "weights": counted,
                "context": context,
                "batch": batch,
                "shape": shape,
                "rows": fits,
                "note": note,
            }
        )
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
        table.add_row(
            fit.cache.upper(),
            f"{fit.bytes_per_token:,.0f}",
            taken,
            f"{fit.longest_context:,}",
            f"{fit.largest_batch:,}",
        )
    out.print(table)
    if shape.num_layers > shape.full_layers:
        sliding = (
            f"{len(shape.windows)} sliding layers have pages of their windows, {len(shape.windows_16_bit)} stay in 16 "
            f"bits"
        )
        out.print(f"{shape.full_layers} full layers; {sliding}; {shape.other_layers} layers have no cache of K and V")
    if note:
        out.print(note)


@app.command()
def warmup(
    model: Annotated[
        str | None, typer.Option(help="A model's folder, smollm2, or a Hugging Face id. Only its config is read.")
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="Instead of a model: query heads, KV heads and head_dim, such as 32,8,128.")
    ] = None,
    device: Annotated[str, typer.Option(help="The GPU to compile for.")] = "cuda",
    dtype: Annotated[str, typer.Option(help="The model's dtype: bfloat16 or float16.")] = "bfloat16",
    backend: Annotated[Literal["auto", "hopper", "triton"], typer.Option(help="The backend.")] = "auto",
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: RotateKeys = True,
    means: Annotated[bool, typer.Option(help="Also kernels with static means, for models with biases.")] = False,
    static_scales: Annotated[
        bool, typer.Option(help="Kernels for calibrated scales instead of the pages' own.")
    ] = False,
    window: Annotated[bool, typer.Option(help="Also kernels with windows.")] = False,
    softcap: Annotated[bool, typer.Option(help="Attention has a softcap (read from a model's config).")] = False,
    sinks: Annotated[bool, typer.Option(help="Attention has sinks (read from a model's config).")] = False,
    exact: Annotated[bool, typer.Option(help="Exact attention (exact=True of a cache) instead of the other.")] = False,
    batch_invariant: Annotated[
        bool, typer.Option(help="Attention with batch_invariant=True of a cache instead of the other.")
    ] = False,
    threads: Annotated[
        int | None,
        typer.Option(help="Kernels that are compiled at the same time. Default: one for each core.", min=1, max=1024),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compile every kernel that a model can use, in parallel, so that none compiles while it serves."""
    import time

    from fp8attn import warmup as run
    from fp8attn.params import options_of
    from fp8attn.precompile.calls import DTYPES

    if (model is None) == (shape is None):
        raise UsageError("give --model, or --shape such as --shape 32,8,128 (query heads, KV heads, head_dim)")
    if dtype not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    layer: dict[str, Any] = {}
    if model is not None:
        from ..evaluation.models import load_config

        layer = {"config": load_config(model)}
    elif shape is not None:
        if shape.count(",") != 2:
            raise UsageError(f"--shape must be three numbers: query heads, KV heads and head_dim; got {shape!r}")
        layer = dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), numbers(shape, int, "--shape"), strict=True))
    options = options_of(window=window, softcap=softcap, sinks=sinks, exact=exact, batch_invariant=batch_invariant)
    begun = time.monotonic()
    with progress("kernels") as tick:
        kernels = run(
            **layer, device=device, dtype=DTYPES[dtype], backend=backend, key_dtype=key_dtype, rotate_keys=rotate_keys,
            means=means,
            static_scales=static_scales, attention=options, threads=threads, progress=tick,
        )  # fmt: skip
    seconds = time.monotonic() - begun
    if as_json:
        print_json({"seconds": seconds, "kernels": [kernel._asdict() for kernel in kernels]})
        return
    out.print(f"{len(kernels)} kernels in {seconds:.0f} s")


app.command()(doctor)


@app.command()
def demo(
    save: Annotated[Path, typer.Option("--out", help="Folder for demo.json and needle.png.")] = Path("out"),
    device: Device = None,
) -> None:
    """What an 8-bit cache saves and costs: an answer, perplexity and needles through each cache. One to two minutes
    without a GPU.
    """
    from .demo import run

    run(save, device)
