"""Models and texts to evaluate on."""

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

from fp8attn.errors import UsageError
from fp8attn.integrations import transformers as _registers_fp8_kv  # noqa: F401

from .public import PUBLIC, dequantized, find

COMMITTED = "models/stdlib-llama"  # in a checkout of the repository
DEFAULT_PUBLIC = "smollm2"
HELD_OUT = "heldout.txt.xz"


def committed_model() -> Path | None:
    """The folder of the model in the repository. None: this is not a checkout (an installed wheel has no model)."""
    folders = (root / COMMITTED for root in (Path(__file__).resolve().parents[3], Path.cwd()))
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def default_model() -> str:
    """The model that is used if none is named: in a checkout the committed one, elsewhere the public model `smollm2` if
    it is installed.

    Raises:
        UsageError: there is neither.
    """
    if (folder := committed_model()) is not None:
        return str(folder)
    try:
        find(DEFAULT_PUBLIC)
    except UsageError as error:
        raise UsageError(
            "no model was named: pass a model's folder or a Hugging Face id such as org/name. "
            f"Without a name, {DEFAULT_PUBLIC} is used if it is installed: {error}"
        ) from error
    return DEFAULT_PUBLIC


def load_config(model: str | Path | None = None) -> Any:
    """The config of a causal language model. Code that comes with a model is never run.

    Args:
        model: a folder, a name in `PUBLIC` or a Hugging Face id; None: `default_model()`.
    Raises:
        UsageError: no such folder; a public model that is not installed; no readable config; a type of model that
            transformers does not know, or that is no causal language model.
    """
    source = default_model() if model is None else model
    if source in PUBLIC:
        file = find(source)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        config.name_or_path = PUBLIC[source].title
        return config
    if not str(source):
        raise UsageError("the name of the model is empty; pass a model's folder, or a Hugging Face id such as org/name")
    is_folder = Path(source).is_dir()
    if not is_folder:
        try:
            validate_repo_id(str(source))
        except HFValidationError as error:
            raise UsageError(
                f"there is no folder {source}; pass a model's folder, or a Hugging Face id such as org/name"
            ) from error
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except ValueError as error:
        first = str(error).partition("\n")[0]  # the lines after it are general advice
        raise UsageError(
            f"transformers {transformers.__version__} cannot read the config of {source}: {first}"
        ) from error
    except OSError as error:
        raise UsageError(
            str(error)
            if is_folder
            else f"there is no folder {source}, and loading it from the Hugging Face Hub failed: {error}"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UsageError(
            f"{source} is a model of type {config.model_type!r}, which is no causal language model in transformers "
            f"{transformers.__version__}; pass a model that generates text and has no encoder"
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
        model: a folder, a name in `PUBLIC` or a Hugging Face id; None: `default_model()`.
        device: default: the GPU if there is one.
        dtype: default: on a GPU the checkpoint's (bfloat16 for a GGUF file), on a CPU float32, because 16-bit products
            are slow there.
        attn_implementation: transformers' option; `fp8_kv` reads FP8 and 16-bit caches.
    Raises:
        UsageError: no model to load (`load_config`), no such device, a missing or damaged file.
    """
    source = default_model() if model is None else model
    device = usable_device(device)
    config = load_config(source)  # its errors are shorter than those of the calls below
    kind: torch.dtype | str
    kind = dtype or (torch.float32 if device.type == "cpu" else torch.bfloat16 if source in PUBLIC else "auto")
    if source in PUBLIC:
        loaded, tokenizer = _load_gguf(find(source), config, dtype=kind, attn_implementation=attn_implementation)
        return loaded.to(device).eval(), tokenizer
    try:
        tokenizer = _tokenizer(source)
        loaded, report = AutoModelForCausalLM.from_pretrained(
            source, dtype=kind, attn_implementation=attn_implementation, trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
    except (SafetensorError, json.JSONDecodeError) as error:
        raise UsageError(
            f"a file of {source} is damaged or cut short ({error}); download or copy the model again"
        ) from error
    except OSError as error:
        raise UsageError(f"a file of {source} cannot be loaded: {error}") from error
    wrong = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if wrong:  # transformers gives these random values
        raise UsageError(
            f"the weights of {source} do not fit its config: {wrong[0]} and {len(wrong) - 1} others are missing or of "
            f"other sizes; download or copy the model again"
        )
    return loaded.to(device).eval(), tokenizer


def load_tokenizer(model: str | Path | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model that `load` takes. No weights are read."""
    source = default_model() if model is None else model
    return _gguf_tokenizer(find(source), load_config(source)) if source in PUBLIC else _tokenizer(source)


def _tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except json.JSONDecodeError:  # a damaged one
        raise
    except ValueError as error:
        first = str(error).partition("\n")[0].partition(" from one of")[0]
        raise UsageError(
            f"{source} has no tokenizer that transformers can read ({first}); add tokenizer.json to the folder"
        ) from error


def _load_gguf(file: Path, config: Any, **options: Any) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    tokenizer = _gguf_tokenizer(file, config)
    loaded = AutoModelForCausalLM.from_pretrained(
        file.parent, config=config, gguf_file=file.name, **dequantized(), **options
    )
    loaded.config.name_or_path = config.name_or_path
    return loaded, tokenizer


def _gguf_tokenizer(file: Path, config: Any) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(
        config.eos_token_id
    )  # transformers 5.17 takes the first special token
    return tokenizer


def usable_device(device: torch.device | str | None) -> torch.device:
    """The device, after a test that a tensor can be written to it and read back. None: the GPU if there is one.

    Raises:
        UsageError: torch has no such device, or cannot use it on this machine.
    """
    device = ("cuda" if torch.cuda.is_available() else "cpu") if device is None else device
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build of torch without CUDA
        reason = str(error).partition("\n")[0].partition(". ")[0]
        usable = "cuda or cpu" if torch.cuda.is_available() else "cpu"
        raise UsageError(f"the device {str(device)!r} cannot be used here ({reason}); choose {usable}") from error
    return torch.device(device)


def read_text(path: str | Path | None = None, model: str | Path | None = None) -> str:
    """Text to evaluate on.

    Args:
        path: a text file in UTF-8, plain or `.xz`. None: the held-out text in the model's folder, or that of the
            committed model, or (outside a checkout) the source of this Python's standard library.
        model: a model's folder, which may have a held-out text.
    Raises:
        UsageError: no such file, or it cannot be read.
    """
    if path is not None:
        return _read(Path(path))
    for folder in (model, committed_model()):
        if folder is not None and (Path(folder) / HELD_OUT).is_file():
            return _read(Path(folder) / HELD_OUT)
    library = Path(sysconfig.get_path("stdlib"))
    return "".join(file.read_text(encoding="utf-8") for file in sorted(library.glob("*.py")))


def _read(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"no such text file: {path}")
    try:
        data = path.read_bytes()
        return (lzma.decompress(data) if path.suffix == ".xz" else data).decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as text in UTF-8, plain or .xz: {error}") from error


def tokenize(tokenizer: PreTrainedTokenizerBase, text: str) -> torch.Tensor:
    """`[N]` token ids of the text, without special tokens."""
    # The text may be longer than the model's context, because windows are cut from it.
    return torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def windows(tokens: torch.Tensor, length: int, count: int, *, from_end: bool = False) -> torch.Tensor:
    """Consecutive windows `[count, length]` from the start or the end of a text. Calibration takes the end, evaluation
    the start.

    Raises:
        UsageError: the text is too short.
    """
    if length < 2 or count < 1:
        raise UsageError(
            f"windows need a length of at least 2 tokens and a count of at least 1; got {length} and {count}"
        )
    if length * count > len(tokens):
        raise UsageError(
            f"{count} windows of {length} tokens need {length * count}, and the text has {len(tokens)}; pass a longer "
            f"text, or fewer tokens"
        )
    part = tokens[-length * count :] if from_end else tokens[: length * count]
    return part.view(count, length)
