"""Reading an exported checkpoint back: every layer has every scale, where vLLM looks for it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open

from fp8attn.errors import UsageError
from fp8attn.scales import KVScales

from .attentions import attentions_of, heads_of, layers_text
from .folder import FLOATS, INDEX, Checkpoint
from .formats import Strategy, declared, names, shape, to_tensor, values

SCALES = "model-kv-scales.safetensors"
NOTE = "fp8attn"  # the entry in the metadata of that file
# Names of a cache's scales, current ones and older ones. Other scales belong to weights, such as `weight_scale`.
_CACHE_SCALE = re.compile(r".*\.([qkv]|kv|prob|output)_scale")


@dataclass(frozen=True, eq=False)
class Export:
    """A checkpoint with scales for stock vLLM.

    Attributes:
        folder: where it is.
        strategy: how the scales are written.
        scales: by layer index, the scales of `"q"`, `"k"` and `"v"`, float32: `[1]`, or `[heads]` with
            `strategy="attn_head"`.
        skip_layers: layers without scales, whose cache must be in 16 bits.
        moved: layers where a static mean of V was moved into the biases.
    """

    folder: Path
    strategy: Strategy
    scales: Mapping[int, Mapping[str, torch.Tensor]]
    skip_layers: tuple[int, ...] = ()
    moved: tuple[int, ...] = ()

    @property
    def command(self) -> str:
        """The command that serves it."""
        skip = f" --kv-cache-dtype-skip-layers {' '.join(map(str, self.skip_layers))}" if self.skip_layers else ""
        return f"vllm serve {self.folder} --kv-cache-dtype fp8{skip}"


def check(folder: str | Path, scales: KVScales | None = None) -> Export:
    """Read an exported checkpoint as vLLM does, and verify that no layer would get a scale of 1.0 that is not in the
    checkpoint.

    Args:
        folder: the checkpoint.
        scales: those that it was exported from. None: their values are not compared.
    Returns:
        What the folder has.
    Raises:
        UsageError: a scale is missing, or has a name, shape or dtype that vLLM does not read; it is not positive and
            finite, or not the one in `scales`; the index does not agree with the files; the config does not make vLLM
            read scales.
    """
    checkpoint = Checkpoint.read(folder)
    strategy = declared(checkpoint)
    if unnamed := {path.name for path in checkpoint.folder.glob("*.safetensors")} - {
        t.file for t in checkpoint.tensors.values()
    }:
        raise UsageError(
            f"{checkpoint.folder / INDEX} does not name {', '.join(sorted(unnamed))}: vLLM would not read it"
        )
    note = _note(checkpoint)
    attentions = attentions_of(checkpoint)
    skipped = tuple(note.get("skip_layers", ()))
    wanted = {index: names(attention) for index, attention in attentions.items() if index not in skipped}
    expected = {name for named in wanted.values() for name in named.values()}
    present = {name for name in checkpoint.tensors if _CACHE_SCALE.fullmatch(name)}
    _compare(checkpoint, expected, present)
    found: dict[int, dict[str, torch.Tensor]] = {}
    q_heads, kv_heads, _ = heads_of(checkpoint)
    for index, named in wanted.items():
        found[index] = {
            x: _scale(checkpoint, name, shape(strategy, q_heads if x == "q" else kv_heads)) for x, name in named.items()
        }
    export = Export(Path(folder), strategy, found, skipped, tuple(note.get("moved", ())))
    if scales is not None:
        _compare_values(export, scales)
    return export


def _note(checkpoint: Checkpoint) -> dict[str, list[int]]:
    """What `export` noted; empty for a checkpoint of another tool."""
    if not (checkpoint.folder / SCALES).is_file():
        return {}
    with safe_open(checkpoint.folder / SCALES, "pt") as file:
        note = (file.metadata() or {}).get(NOTE, "")
    try:
        found: dict[str, list[int]] = json.loads(note)
    except ValueError as error:
        raise UsageError(
            f"{checkpoint.folder / SCALES} has no entry {NOTE!r} with JSON in its metadata; export again"
        ) from error
    return found


def _compare(checkpoint: Checkpoint, expected: Iterable[str], present: Iterable[str]) -> None:
    missing, unknown = sorted(set(expected) - set(present)), sorted(set(present) - set(expected))
    if missing:
        also = f"; it has {_some(unknown)}, which vLLM does not know" if unknown else ""
        raise UsageError(f"{checkpoint.folder} lacks {_some(missing)}, and vLLM would take 1.0{also}. Export again")
    if unknown:
        raise UsageError(
            f"{checkpoint.folder} has {_some(unknown)}, which are not the names of its layers' scales; export again"
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _scale(checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    tensor = checkpoint.tensors[name]
    # vLLM takes one number in any shape.
    if (tensor.shape != shape and not math.prod(tensor.shape) == math.prod(shape) == 1) or tensor.dtype not in FLOATS:
        raise UsageError(
            f"{name} must be {list(shape)} in one of {', '.join(FLOATS)}, and is {list(tensor.shape)} {tensor.dtype}; "
            f"export again"
        )
    value = checkpoint.get(name).float().flatten()
    if not torch.isfinite(value).all() or (value <= 0).any():
        raise UsageError(f"{name} must be positive and finite, and is {value.tolist()}; calibrate and export again")
    return value


def _compare_values(export: Export, scales: KVScales) -> None:
    if strangers := set(export.scales) - set(scales.layers):
        raise UsageError(f"{export.folder} has scales of {layers_text(strangers)}, and the calibrated scales have none")
    for index, found in export.scales.items():
        layer = scales.layer(index)
        calibrated = values(layer, index in export.moved)
        if (queries := layer.q_scale) is not None:
            calibrated["q"] = queries
        for x, given in calibrated.items():
            value = to_tensor(given, export.strategy).flatten()
            if not torch.equal(found[x], value):
                got = f"{found[x].tolist()}, and was calibrated as {value.tolist()}"
                raise UsageError(f"{export.folder}: the scale of {x.upper()} of layer {index} is {got}; export again")
