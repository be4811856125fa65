"""A checkpoint's folder: its config and the tensors of its safetensors files."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from fp8attn.errors import UsageError

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}  # dtypes by their names in safetensors


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is, and what it is.

    Attributes:
        file: the name of its file in the folder.
        dtype: as safetensors names it, such as `"BF16"`.
        shape: its dimensions.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `config.json` and safetensors files.

    Attributes:
        folder: the folder.
        config: `config.json`.
        tensors: by name.
    """

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @classmethod
    def read(cls, folder: str | Path) -> Checkpoint:
        """Read the config and the headers of the weights.

        Raises:
            UsageError: no such folder or config; no weights in safetensors files; an index that does not agree with the
                files.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise UsageError(
                f"there is no folder {folder}; give the folder of a checkpoint with {CONFIG} and safetensors files"
            )
        config = read_json(folder / CONFIG)
        if (folder / INDEX).exists():
            named = weight_map(folder)
            files = sorted(set(named.values()))
        else:
            files = sorted(path.name for path in folder.glob("*.safetensors"))
            if len(files) != 1:
                names = ", ".join(files) or "none"
                raise UsageError(
                    f"{folder} has no {INDEX}, and therefore must have one safetensors file; it has {names}"
                )
            named = None
        tensors: dict[str, Tensor] = {}
        for file in files:
            for name, tensor in _header(folder / file).items():
                if name in tensors:
                    raise UsageError(
                        f"{folder}: {name} is in {tensors[name].file} and in {file}; a loader could take either"
                    )
                tensors[name] = tensor
        if named is not None:
            for name in sorted(named.keys() | tensors.keys()):
                place = tensors[name].file if name in tensors else None
                if named.get(name) != place:
                    raise UsageError(
                        f"{folder / INDEX} says that {name} is in {named.get(name, 'no file')}, and it is in "
                        f"{place or 'none of the files'}"
                    )
        return cls(folder, config, tensors)

    @property
    def decoder(self) -> dict[str, Any]:
        """The config of the decoder. For a multimodal model, it is a part of the config."""
        return self.config.get("text_config") or self.config

    def get(self, name: str) -> torch.Tensor:
        """A tensor's values."""
        with safe_open(self.folder / self.tensors[name].file, "pt") as file:
            return file.get_tensor(name)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        UsageError: no such file, or it holds no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object, and holds a {type(value).__name__}")
    return value


def weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says.

    Raises:
        UsageError: the index is not valid, or a file is missing.
    """
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, dict) or not all(
        isinstance(file, str) and file == Path(file).name for file in named.values()
    ):
        raise UsageError(
            f"{folder / INDEX} must have a weight_map from names of tensors to names of files in the folder"
        )
    if missing := sorted({file for file in named.values() if not (folder / file).is_file()}):
        raise UsageError(
            f"{folder / INDEX} names {', '.join(missing)}, which the folder does not have (a broken link?)"
        )
    return named


def _header(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: Tensor(path.name, part.get_dtype(), tuple(part.get_shape())) for name, part in slices.items()}
    except (OSError, SafetensorError) as error:
        raise UsageError(f"{path} is not a safetensors file, or it is cut short ({error})") from error
