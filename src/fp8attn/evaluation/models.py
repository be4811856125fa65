"""Models and text to evaluate on; by default the ones in this repository, so that nothing needs a network or a GPU."""

from __future__ import annotations

import json
import lzma
import sysconfig
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import HFValidationError, validate_repo_id
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from ..integrations import transformers as _registers_fp8_kv  # noqa: F401
from .public import PUBLIC, dequantized, find

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
    """The config of a causal language model. Code that comes with a model is never run.

    Args:
        model: a folder, a name of `PUBLIC` or a Hugging Face id; None: the committed model.
    Raises:
        ValueError: no such folder; a public model that is not installed; a type of model that transformers does not know, or that is no
            causal language model.
        OSError: transformers finds no config.
    """
    if model in PUBLIC:
        file = find(model)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        config.name_or_path = PUBLIC[model].title
        return config
    source = default_model() if model is None else model
    is_folder = Path(source).is_dir()
    if not is_folder:
        try:
            validate_repo_id(str(source))
        except HFValidationError as error:
            raise ValueError(f"there is no folder {source}; name a model's folder, or a Hugging Face id such as org/name") from error
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except ValueError as error:
        first = str(error).partition("\n")[0]  # the lines after it are general advice
        raise ValueError(f"transformers {transformers.__version__} cannot read the config of {source}: {first}") from error
    except OSError as error:
        if is_folder:
            raise
        raise OSError(f"there is no folder {source}, and loading it from the Hugging Face Hub failed: {error}") from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(
            f"{source} is a model of type {config.model_type!r}, which is no causal language model in transformers "
            f"{transformers.__version__}; name a model that generates text and has no encoder"
        )
    return config


def load(
    model: str | Path | None = None,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    attn_implementation: str = "fp8_kv",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model for evaluation, and its tokenizer.

    Args:
        model: a folder, a name of `PUBLIC` or a Hugging Face id; None: the committed model.
        device: default: the GPU if there is one.
        dtype: default: the checkpoint's on a GPU (bfloat16 of a GGUF file) and float32 on a CPU (whose 16-bit products are slow).
        attn_implementation: of transformers; `fp8_kv` reads both kinds of cache.
    Raises:
        ValueError: no model given outside a checkout; no such folder or device; a public model that is not installed; not a causal
            language model; a damaged file.
        OSError: transformers finds no such model.
    """
    source = default_model() if model is None else model
    device = _usable(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    config = load_config(source)  # its errors are shorter than those of the classes below
    dtype = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16 if model in PUBLIC else "auto")
    if model in PUBLIC:
        loaded, tokenizer = _load_gguf(find(model), config, dtype=dtype, attn_implementation=attn_implementation)
        return loaded.to(device).eval(), tokenizer
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        loaded = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attn_implementation, trust_remote_code=False)
    except (SafetensorError, json.JSONDecodeError) as error:
        raise ValueError(f"a file of {source} is damaged or cut short ({error}); download or copy the model again") from error
    return loaded.to(device).eval(), tokenizer


def _load_gguf(file: Path, config: Any, **options) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(config.eos_token_id)  # transformers 5.17 takes the first special token
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, config=config, gguf_file=file.name, **dequantized(), **options)
    loaded.config.name_or_path = config.name_or_path
    return loaded, tokenizer


def _usable(device: torch.device | str) -> torch.device:
    """The device, after a tensor was written to it and read back.

    Raises:
        ValueError: torch knows no such device, or cannot use it on this machine.
    """
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build of torch without CUDA
        reason = str(error).partition("\n")[0].partition(". ")[0]
        usable = "cuda or cpu" if torch.cuda.is_available() else "cpu"
        raise ValueError(f"the device {str(device)!r} cannot be used here ({reason}); choose {usable}") from error
    return torch.device(device)


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
