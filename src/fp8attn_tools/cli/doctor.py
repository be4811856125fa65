"""`fp8attn doctor`: what this machine can run, what a model needs, and how exactly kernels sum."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from .options import Json
from .shared import load, out, print_json, progress


def doctor(
    model: Annotated[
        str | None,
        typer.Option(
            help="Whether fp8attn can serve this model, and how hard its K is to store: a folder, smollm2, or an id."
        ),
    ] = None,
    measure: Annotated[
        bool, typer.Option(help="On a Hopper GPU, run the installed FP8 kernels and report how exactly they sum.")
    ] = True,
    accumulation: Annotated[
        bool,
        typer.Option(
            "--accumulation",
            help="Only measure how exactly the installed kernels sum, by length and batch: over K and V, and over "
            "latents (MLA).",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Report what this machine can run, why it cannot run the rest, and how exactly its FP8 kernels sum."""
    if accumulation:
        _print_accumulation(as_json)
        return
    from ..diagnostics import diagnose, examine, latents, served
    from ..evaluation.models import load_config

    checks = diagnose(measure)
    if model is not None:
        config = load_config(model)
        checks.append(served(config))
        if checks[-1].status == "ok":
            checks += latents(config) or examine(load(model, "cpu")[0])
    if as_json:
        print_json(checks)
        return
    table = Table(box=None, show_header=False)
    marks = {"ok": "[green]ok", "warn": "[yellow]!", "no": "[yellow]no", "info": ""}
    for check in checks:
        table.add_row(marks[check.status], check.name, escape(check.detail))
    out.print(table)


def _print_accumulation(as_json: bool) -> None:
    """Measure all kernels that can run on the first GPU, and name those that cannot, with the reason."""
    import torch

    from ..diagnostics.accumulation import INPUTS, Accumulation, candidates, measure
    from .tables import accumulation_table

    device = "cuda" if torch.cuda.is_available() else "cpu"
    results: dict[str, dict[str, Accumulation | str]] = {}
    with progress("kernels") as tick:
        for task, inputs in INPUTS.items():
            results[task] = {}
            for kernel, attend in candidates(inputs, device).items():
                results[task][kernel] = attend if isinstance(attend, str) else measure(attend, device, inputs)
                tick(sum(map(len, results.values())), None)
    if as_json:
        rows: list[dict[str, Any]] = []
        for task, kernels in results.items():
            for kernel, result in kernels.items():
                row = {"inputs": task, "kernel": kernel}
                if isinstance(result, str):
                    rows.append({**row, "reason": result})
                else:
                    rows += [
                        {**row, "batch": batch, "length": length, "rel_err": error}
                        for (batch, length), error in result.errors.items()
                    ]
        print_json(rows)
        return
    for task, kernels in results.items():
        measured = {kernel: result for kernel, result in kernels.items() if not isinstance(result, str)}
        out.print(accumulation_table(task, measured) if measured else f"{task}: no kernel can run here")
        for kernel, result in kernels.items():
            out.print(f"{kernel}: {result}", markup=False, highlight=False)
        out.print()
