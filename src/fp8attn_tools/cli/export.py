"""`fp8attn export`: calibrated scales in a checkpoint, for stock vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from fp8attn.errors import UsageError

from .options import Json
from .shared import numbers, out, print_json


def export(
    folder: Annotated[Path, typer.Argument(help="The checkpoint's folder; with --check an exported one.")],
    scales: Annotated[
        Path | None, typer.Option(help="Calibrated scales: fp8attn calibrate --key-dtype e4m3 --no-rotate-keys.")
    ] = None,
    save: Annotated[Path | None, typer.Option("--out", help="The folder to write.")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Only verify an exported folder, with --scales against these.")
    ] = False,
    strategy: Annotated[
        Literal["tensor", "attn_head"],
        typer.Option(help="One scale a layer, or one a head (FlashAttention-3 takes these)."),
    ] = "tensor",
    fold_v_mean: Annotated[bool, typer.Option(help="Move static means of V into the biases of the checkpoint.")] = True,
    skip_layers: Annotated[str, typer.Option(help="Layers that vLLM keeps in 16 bits, such as 0,5.")] = "",
    as_json: Json = False,
) -> None:
    """Write calibrated scales beside a checkpoint's weights, so that vLLM without fp8attn serves with them. Verify that
    all arrived.
    """
    from fp8attn.scales import KVScales

    from .. import checkpoints

    if check and save is not None:
        raise UsageError("--check writes nothing: leave out --out")
    given = KVScales.load(scales) if scales is not None else None
    if check:
        found = checkpoints.check(folder, given)
    elif given is None or save is None:
        raise UsageError(
            "give --scales FILE (fp8attn calibrate writes it) and --out FOLDER, or --check to verify an exported folder"
        )
    else:
        skipped = numbers(skip_layers, int, "--skip-layers") if skip_layers else []
        found = checkpoints.export(folder, given, save, strategy=strategy, fold_v_mean=fold_v_mean, skip_layers=skipped)
    if as_json:
        rows = [
            {"layer": index, **{f"{x}_scale": scale.tolist() for x, scale in layer.items()}}
            for index, layer in found.scales.items()
        ]
        how = {"folder": str(found.folder), "strategy": found.strategy, "command": found.command}
        print_json({**how, "skip_layers": found.skip_layers, "moved": found.moved, "rows": rows})
        return
    table = Table(title=f"{found.folder}: scales by {found.strategy}")
    for column in ("layer", "K", "V", "queries", ""):
        table.add_column(column, justify="right" if column else "left")
    for index, layer in found.scales.items():
        shown = (" ".join(f"{number:.4g}" for number in layer[x].tolist()) for x in "kvq")
        table.add_row(str(index), *shown, "V's mean is in the biases" if index in found.moved else "")
    for index in found.skip_layers:
        table.add_row(str(index), "", "", "", "in 16 bits")
    out.print(table)
    out.print(
        f"every layer has its scales; serve it with\n{found.command}", markup=False, highlight=False, soft_wrap=True
    )
