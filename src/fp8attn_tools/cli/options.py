"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8attn.formats import codec

from ..evaluation.names import CACHES, TASKS

MOST_TOKENS = 1 << 24  # of a sequence: above every model's context
MOST = 10_000  # of windows, sequences, layers and heads: above every run that ends
MOST_SAMPLES = 1000  # of each length: all are made before the model runs
CACHE_NAMES = ", ".join(CACHES)
Model = Annotated[
    str | None,
    typer.Option(
        help="A model's folder, smollm2, or a Hugging Face id. Default: in a checkout its small model, elsewhere "
        "smollm2."
    ),
]
Device = Annotated[str | None, typer.Option(help="The device. Default: the GPU if there is one.")]
CacheChoice = Annotated[
    str, typer.Option("--cache", help=f"both (bf16 and fp8), or any of {CACHE_NAMES}, joined by commas.")
]
Scales = Annotated[
    Path | None,
    typer.Option(help="Calibrated scales (fp8attn calibrate). Then fp8 means fp8-static, unless --cache has both."),
]
Text = Annotated[
    Path | None,
    typer.Option(
        help="A text file, plain or .xz. Default: the held-out text of the model in a checkout, or Python source code."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON to stdout instead of tables.")]
Context = Annotated[
    int | None,
    typer.Option(
        help="Tokens of a sequence. Default: the model's context, at most 32,768; on a CPU, 4,096.",
        min=2,
        max=MOST_TOKENS,
    ),
]
Chunk = Annotated[int, typer.Option(help="Tokens of a forward during prefill.", min=1, max=MOST_TOKENS)]
Windows = Annotated[
    int, typer.Option("--windows", help="Number of windows, from the start of the text.", min=1, max=MOST)
]
Lengths = Annotated[str, typer.Option(help="Tokens of the prompts.")]
Samples = Annotated[
    int, typer.Option(help="Prompts for each length; for recall, for each depth, too.", min=1, max=MOST_SAMPLES)
]
Tasks = Annotated[
    str,
    typer.Option(
        "--task", help=f"Any of {', '.join(TASKS)}, joined by commas. All but the first need the extra ruler."
    ),
]
Seed = Annotated[int, typer.Option(help="Seed of everything that is random.", min=0, max=2**64 - 1)]
KeyDtype = Annotated[codec.KeyDtype, typer.Option(help="The format of keys in the cache.")]
RotateKeys = Annotated[bool, typer.Option(help="Whether the cache rotates keys before it quantizes them.")]
