"""Models and text to evaluate on; by default the ones in this repository, so that nothing needs a network or a GPU."""

from __future__ import annotations

import lzma
import sysconfig
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..integrations import transformers as _registers_fp8_kv  # noqa: F401

DEFAULT_MODEL = "models/stdlib-llama"
HELD_OUT = "heldout.txt.xz"


def default_model() -> Path:
    """The committed model's folder.

    Raises:
        ValueError: this is not a checkout of the repository (an installed wheel has no model).
    """
    roots = (Path(__file__).resolve().parents[3], Path.cwd())
    for root in roots:
        if (root / DEFAULT_MODEL / "config.json").is_file():
            return root / DEFAULT_MODEL
    raise ValueError(
        f"the default model, {DEFAULT_MODEL}, is part of a checkout of fp8attn, and there is none at {' or '.join(map(str, roots))}; "
        "name a model folder or a Hugging Face id with --model, or run inside a clone"
    )


def load_config(model: str | Path | None = None) -> Any:
    """The config of a folder or hub id (None: the committed model). Code that comes with a model is never run."""
    return AutoConfig.from_pretrained(default_model() if model is None else model)


def load(
    model: str | Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str = "fp8_kv",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model for evaluation, and its tokenizer.

    Args:
        model: a folder or Hugging Face id; None: the committed model.
        device: default: the GPU where there is one.
        dtype: default: the checkpoint's on a GPU and float32 on a CPU (whose 16-bit products are slow).
        attn_implementation: of transformers; `fp8_kv` reads both kinds of cache.
    Raises:
        ValueError: no model given outside a checkout.
        OSError: transformers finds no such model.
    """
    folder = default_model() if model is None else model
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    dtype = dtype or (torch.float32 if device.type == "cpu" else "auto")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn_implementation)
    return loaded.to(device).eval(), AutoTokenizer.from_pretrained(folder)


def read_text(path: str | Path | None = None, model: str | Path | None = None) -> str:
    """Text to evaluate on.

    Args:
        path: a text file, plain or `.xz`. None: the held-out modules beside the model, or those of the committed model, or else (in no
            checkout) the source of this Python's standard library.
        model: a folder to look for held-out text in.
    Raises:
        ValueError: no such file.
    """
    if path is not None:
        if not Path(path).is_file():
            raise ValueError(f"no such text file: {path}")
        return _read(Path(path))
    for folder in (model, Path(__file__).resolve().parents[3] / DEFAULT_MODEL, Path.cwd() / DEFAULT_MODEL):
        if folder is not None and (Path(folder) / HELD_OUT).is_file():
            return _read(Path(folder) / HELD_OUT)
    library = Path(sysconfig.get_path("stdlib"))
    return "".join(file.read_text(encoding="utf-8") for file in sorted(library.glob("*.py")))


def _read(path: Path) -> str:
    data = path.read_bytes()
    return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """`[N]` token ids of the text alone, without special tokens."""
    # A long text is what is wanted here: windows are cut from it afterwards.
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def windows(tokens: torch.Tensor, length: int, count: int, *, from_end: bool = False) -> torch.Tensor:
    """`[count, length]`: consecutive windows from the text's start or end. Calibration takes the end, evaluation the start.

    Raises:
        ValueError: the text is too short.
    """
    if length < 2 or count < 1:
        raise ValueError(f"windows need a length of at least 2 tokens and a count of at least 1; got {length} and {count}")
    if length * count > len(tokens):
        raise ValueError(f"{count} windows of {length} tokens need {length * count}, and the text has {len(tokens)}")
    part = tokens[-length * count :] if from_end else tokens[: length * count]
    return part.view(count, length)
