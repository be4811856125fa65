"""Writing calibrated scales beside the weights of a checkpoint, as an overlay: links to the original files, and a few
new ones.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from fp8attn.errors import UsageError
from fp8attn.scales import KVScales, LayerScales

from .attentions import Attention, attentions_of, heads_of, layers_text
from .check import NOTE, SCALES, Export, check
from .fold import moved_means, overwrite
from .folder import CONFIG, INDEX, Checkpoint
from .formats import STRATEGIES, Strategy, names, new_config, to_tensor, values

# Weights that a loader might take instead of those that the index names, and their config. The overlay has no links to
# them.
_OTHER_WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".gguf"}
# transformers reads a file of the first name without looking at the index, and would not see the scales.
_RENAMED = {"model.safetensors": "model-00001-of-00001.safetensors"}
_OTHER_FILES = {"params.json", "consolidated.safetensors.index.json", "pytorch_model.bin.index.json"}


def export(
    checkpoint: str | Path,
    scales: KVScales,
    out: str | Path,
    *,
    strategy: Strategy = "tensor",
    fold_v_mean: bool = True,
    skip_layers: Collection[int] = (),
) -> Export:
    """Write a checkpoint that stock vLLM serves with calibrated scales: `x_8bit = x / scale` in E4M3, for K, V and
    queries.

    The new folder has the config, the index and the scales, and links to all other files. It is written under another
    name, read back (`check`) and then renamed.

    Args:
        checkpoint: the folder of the original, with safetensors files. It is not changed.
        scales: calibrated with key_dtype="e4m3" and rotate_keys=False. vLLM subtracts no means, so the scale of K is
            made larger by `max |k_mean| / 448`.
        out: the new folder.
        strategy: `"tensor"`, one scale a layer: the largest of its heads'. `"attn_head"`, one a head, which
            FlashAttention-3 takes; vLLM's FlashInfer and Triton refuse it, and its CPU backend takes the largest.
        fold_v_mean: move static means of V into biases (`v_proj.bias -= m`, `o_proj.bias += W m`). The model is the
            same but for the rounding of o_proj's bias to its dtype. Files with these biases are copied. False: the
            scale of V is made larger, as K's.
        skip_layers: indices of layers whose cache vLLM keeps in 16 bits: `Export.command` has the option. They get no
            scales.
    Raises:
        UsageError: the scales do not fit the checkpoint; a layer has none; a mean of V that no bias can take; names of
            an unknown architecture; a checkpoint that is quantized in another way; a folder that cannot be written.
    """
    if strategy not in STRATEGIES:
        raise UsageError(f"strategy must be one of {STRATEGIES}; got {strategy!r}")
    source, target = Checkpoint.read(checkpoint), Path(out)
    attentions = _layers_to_write(source, scales, skip_layers)
    config = new_config(source, strategy)
    written: dict[str, torch.Tensor] = {}
    moved: dict[str, torch.Tensor] = {}
    moved_layers = []
    for index, attention in attentions.items():
        layer = scales.layer(index)
        if fold_v_mean and layer.v_mean.any():
            moved |= moved_means(source, attention, layer.v_mean)
            moved_layers.append(index)
        given = {"q": _q_scale(source, index, layer), **values(layer, index in moved_layers)}
        written |= {name: to_tensor(given[x], strategy) for x, name in names(attention).items()}
    if clash := sorted(written.keys() & source.tensors.keys()):
        raise UsageError(
            f"{source.folder} has {clash[0]} already: it has scales of a cache; export the original checkpoint"
        )
    note = {
        "strategy": strategy, "skip_layers": sorted(set(skip_layers)), "moved": moved_layers,
        "model_id": scales.model_id, "method": scales.method, "tokens": scales.tokens,
    }  # fmt: skip

    def write(folder: Path) -> None:
        changed = {source.tensors[name].file for name in moved}
        _link(source, folder, changed)
        for file in changed:
            new = {name: tensor for name, tensor in moved.items() if source.tensors[name].file == file}
            overwrite(folder / _RENAMED.get(file, file), new)
        # safetensors' own save_file ignores the umask and makes the file private.
        (folder / SCALES).write_bytes(save(written, {"format": "pt", NOTE: json.dumps(note)}))
        _write_json(folder / CONFIG, config)
        _write_json(folder / INDEX, _index(source, written))
        check(folder, scales)

    _write_folder(target, write)
    return check(target, scales)


def _layers_to_write(source: Checkpoint, scales: KVScales, skip_layers: Collection[int]) -> dict[int, Attention]:
    """The attention modules that get scales, after the checks that the scales are this model's and of a kind that vLLM
    can use.
    """
    if (scales.key_dtype, scales.rotate_keys) != ("e4m3", False):
        raise UsageError(
            f"stock vLLM stores keys in E4M3 without a rotation, and these scales are for "
            f"key_dtype={scales.key_dtype!r}, rotate_keys={scales.rotate_keys}; calibrate again with key_dtype='e4m3', "
            f"rotate_keys=False"
        )
    decoder, (_, kv_heads, head_dim) = source.decoder, heads_of(source)
    if shared := decoder.get("num_kv_shared_layers"):
        raise UsageError(
            f"the last {shared} layers share K and V of others, and vLLM reads scales of their own for them; it has no "
            f"such export"
        )
    scales.check(
        num_layers=decoder.get("num_hidden_layers", scales.num_layers), num_kv_heads=kv_heads, head_dim=head_dim,
        model_id=_model_id(source.folder),
    )  # fmt: skip
    attentions = attentions_of(source)
    if strangers := set(skip_layers) - attentions.keys():
        raise UsageError(
            f"skip_layers has {sorted(strangers)}, and {source.folder} has attention in {layers_text(attentions)}"
        )
    if homeless := scales.layers.keys() - attentions.keys():
        raise UsageError(
            f"there are scales of {layers_text(homeless)}, and {source.folder} has attention in "
            f"{layers_text(attentions)}"
        )
    if without := attentions.keys() - scales.layers.keys() - set(skip_layers):
        needed = sorted(attentions.keys() - scales.layers.keys())
        raise UsageError(
            f"{source.folder}: no scales for {layers_text(without)} (sliding windows are not calibrated), and vLLM "
            f"would take 1.0 in silence. Keep them in 16 bits: export with skip_layers={needed}, and serve with "
            f"--kv-cache-dtype-skip-layers {' '.join(map(str, needed))}"
        )
    chosen = {index: attention for index, attention in attentions.items() if index not in skip_layers}
    if not chosen:
        raise UsageError("skip_layers has all layers, so there are no scales to write; serve the original checkpoint")
    return chosen


def _q_scale(source: Checkpoint, index: int, layer: LayerScales) -> torch.Tensor:
    """The scale of each query head `[num_q_heads]`."""
    q_heads, scale = heads_of(source)[0], layer.q_scale
    if scale is None:
        raise UsageError(
            f"layer {index} has no scale for queries, and vLLM's FlashAttention-3, FlashInfer and Triton quantize them "
            f"with 1.0 in silence; calibrate again with fp8attn_tools.calibrate"
        )
    if scale.shape != (q_heads,):
        raise UsageError(
            f"layer {index}: q_scale must be [{q_heads}], one for each query head; it is {list(scale.shape)}"
        )
    return scale


def _model_id(folder: Path) -> str:
    """The model's name: the folder's, or in the cache of the Hugging Face Hub (`models--org--name/snapshots/...`) the
    repository's.
    """
    folder = folder.absolute()
    return folder.parent.parent.name.rpartition("--")[2] if folder.parent.name == "snapshots" else folder.name


def _link(source: Checkpoint, folder: Path, changed: Collection[str]) -> None:
    """Links to the files of the checkpoint, and copies of those that are `changed`; without config, index and other
    weights.
    """
    named = {tensor.file for tensor in source.tensors.values()}
    for path in sorted(source.folder.iterdir()):
        other = (
            (path.suffix in _OTHER_WEIGHTS and path.name not in named)
            or path.name in _OTHER_FILES
            or path.name.startswith(".")
        )
        if other or path.name in {CONFIG, INDEX}:
            continue
        new_path = folder / _RENAMED.get(path.name, path.name)
        if path.name in changed:
            shutil.copyfile(path, new_path)
        else:
            new_path.symlink_to(path.resolve())


def _index(source: Checkpoint, written: dict[str, torch.Tensor]) -> dict[str, Any]:
    weight_map = {
        name: _RENAMED.get(tensor.file, tensor.file) for name, tensor in source.tensors.items()
    } | dict.fromkeys(written, SCALES)
    files = {source.folder / tensor.file for tensor in source.tensors.values()}
    size = sum(file.stat().st_size for file in files) + 4 * sum(tensor.numel() for tensor in written.values())
    return {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_folder(target: Path, write: Callable[[Path], None]) -> None:
    """Write a folder under a temporary name beside `target`, and rename it when it is complete. A run that fails leaves
    nothing.
    """
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists; name a folder that does not, or remove it")
    draft = target.absolute().with_name(f".{target.name}-{os.getpid()}")
    try:
        draft.mkdir(parents=True)
        write(draft)
        draft.replace(target)
    except OSError as error:
        raise UsageError(
            f"cannot write {target} ({error.strerror}: {error.filename}); name a folder that you can write to"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
