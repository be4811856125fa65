"""`fp8attn sensitivity`: the cost of 8 bits in each layer, and a choice of layers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fp8attn.errors import UsageError
from fp8attn.params import BackendName

from ..evaluation.names import CACHES, UNIFORM
from .options import MOST, MOST_TOKENS, Chunk, Device, Json, Model, Scales, Text
from .shared import about, choose, load, out, output, print_json, progress, read_text, windows

NAMES = ", ".join(name for name in CACHES if name not in UNIFORM)


def sensitivity(
    model: Model = None,
    max_kl: Annotated[
        float | None,
        typer.Option(min=0, help="Leave as few layers in 16 bits as this KL divergence allows, in nats per token."),
    ] = None,
    max_bytes: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Leave the best layers in 16 bits that fit into so many bytes per token (fp8attn plan shows them).",
        ),
    ] = None,
    text: Text = None,
    context: Annotated[int, typer.Option(help="Tokens of a window.", min=1, max=MOST_TOKENS)] = 1024,
    count: Annotated[
        int,
        typer.Option(
            "--windows",
            help="Windows, from the start of the text. With a budget, as many again check the choice.",
            min=1,
            max=MOST,
        ),
    ] = 1,
    cache: Annotated[str, typer.Option(help=f"The cache to measure: one of {NAMES}.")] = "fp8",
    scales: Scales = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"],
        typer.Option(
            help="The model's. In 16 bits, rounding alone changes predictions by more than 8 bits do in most layers."
        ),
    ] = "float32",
    chunk: Chunk = 512,
    save: Annotated[Path | None, typer.Option("--out", help="Write the report to this file, as JSON.")] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            help="With a budget: write the choice into this folder of a checkpoint, as ModelOpt's "
            "kv_cache_quantized_layers."
        ),
    ] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """What 8 bits cost in each layer, and which layers to leave in 16 bits under a budget."""
    if max_kl is not None and max_bytes is not None:
        raise UsageError("give --max-kl or --max-bytes, not both: each of them determines the layers")
    if write is not None and max_kl is None and max_bytes is None:
        raise UsageError("--write writes a choice of layers: give --max-kl or --max-bytes")
    write_report = output(save)
    import torch

    from ..checkpoints.recipe import layers_to_choose, write_recipe
    from ..evaluation import sensitivity as study
    from ..evaluation.caches import cache_factory
    from ..evaluation.models import load_config
    from .tables import layers_table, margin

    if "," in cache or cache == "both" or cache in UNIFORM:
        raise UsageError(f"sensitivity takes one of {NAMES}; got {cache!r}")
    ((name, loaded_scales),) = choose(cache, scales).items()
    if max_bytes is not None:
        study.check_budget(load_config(model), max_bytes)
    attentions = {} if write is None else layers_to_choose(write)
    passage = read_text(text, model)
    loaded, tokenizer = load(model, device, dtype=getattr(torch, dtype))
    budget = max_kl is not None or max_bytes is not None
    tokens = windows(tokenizer, passage, context + 1, 2 * count if budget else count)
    backend: BackendName = "reference" if dtype == "float32" else "auto"

    def make(skip_layers: Sequence[int]) -> Any:
        given: dict[str, Any] = {"scales": loaded_scales, "skip_layers": skip_layers, "backend": backend}
        return cache_factory(name, loaded, **given)()

    with progress("forwards") as tick:
        report = study.sensitivity(loaded, tokens[:count], make, name=name, chunk=chunk, progress=tick)
    write_report(report.save)
    if not as_json:
        out.print(layers_table(report))
    found: dict[str, Any] = {}
    chosen: tuple[int, ...] = ()
    if budget:
        chosen = study.choose(report, max_kl=max_kl, max_bytes_per_token=max_bytes)
        with progress("forwards on other tokens") as tick:
            others = study.divergence(loaded, tokens[count:], [(), chosen], make, chunk=chunk, progress=tick)
        checked = [dict(zip(("kl", "standard_error"), pair, strict=True)) for pair in others]
        found = {
            "skip_layers": chosen, "kl": report.kl(chosen), "bytes_per_token": report.bytes_per_token(chosen),
            "other_tokens": dict(zip(("all_in_8_bits", "chosen"), checked, strict=True)),
            "vllm": study.vllm_arguments(report, chosen),
        }  # fmt: skip
        if write is not None:
            in_8_bits = {row.layer for row in report.layers}.difference(chosen)
            found["recipe"] = str(write_recipe(write, attentions, in_8_bits))
    if as_json:
        print_json({"meta": about(loaded), "report": report, "choice": found or None})
    elif found:
        (everything, _), (kept, error) = others
        out.print(
            f"KL {found['kl']:.2e} nats per token; on other tokens {kept:.2e}{margin(error, '.0e')} (all in 8 bits "
            f"{everything:.2e})"
        )
        out.print(f"{found['bytes_per_token']:,.0f} bytes per token")
        lines = {"FP8Cache": f"skip_layers={chosen}", "AttentionPolicy": f"skip={chosen}", "vllm serve": found["vllm"]}
        for what, how in lines.items():
            out.print(f"{what}: {how}", markup=False, highlight=False, soft_wrap=True)
        if write is not None:
            out.print(f"written: {found['recipe']}", markup=False, highlight=False, soft_wrap=True)
        if name != "scale-1":
            out.print("(vLLM's own FP8 cache is a plain cast: choose for it with --cache scale-1)")
