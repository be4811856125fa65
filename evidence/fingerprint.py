"""A short hash of what a row of results depends on: the launches of a call, the syntax trees of code, or the version of a library.

The package's docstring describes these three types.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"fp8attn": "src/fp8attn", "fp8attn_tools": "src/fp8attn_tools", "benchmarks": "benchmarks"}  # what absolute imports name
FOLDERS = ("src", "benchmarks")
MODEL = "models/stdlib-llama/model.safetensors"
# What a results file depends on, where that is more than the benchmark of its name.
SOURCES = {
    "tests": ("tests/gpu",),
    "vllm": ("benchmarks/vllm.py", "src/fp8attn/integrations/vllm", MODEL),  # vLLM imports the plugin
    "sanitize": ("tests/gpu/sanitizer.py", "tests/gpu/sanitized.py"),
    "model": ("training/report.py", "training/data.py", "training/config.json", MODEL),
    "needle": ("benchmarks/needle_systems.py", MODEL),  # needle.py keeps answers and counts them, and decides none
    **{name: (f"benchmarks/{name}.py", MODEL) for name in ("agreement", "demo", "drift", "perplexity")},
    **{name: (f"benchmarks/{name}.py", MODEL, "models/prose/sherlock.txt.xz") for name in ("real_model", "speculative")},
}
NEEDLE = (  # what answers of other systems depend on; of the layout and the numerics, what FP8 is and how it is rounded to
    *("benchmarks/needle_systems.py", "src/fp8attn/layout.py", "src/fp8attn/formats/codec.py", MODEL),
    *(f"src/fp8attn_tools/evaluation/{name}.py" for name in ("caches", "models", "needle", "outcomes", "ruler", "stress")),
)
STOCK_VLLM = (  # what vLLM without the plugin depends on: models that it is given, and exported scales
    *("benchmarks/vllm.py", "benchmarks/planted.py", "src/fp8attn_tools/evaluation/stress.py", MODEL),
    *("src/fp8attn_tools/calibration", "src/fp8attn_tools/checkpoints"),
)


def digest(value: Any) -> str:
    return hashlib.sha256(value if isinstance(value, bytes) else repr(value).encode()).hexdigest()[:16]


# Syntax trees


def sources(name: str) -> tuple[str, ...]:
    """The files and folders that the rows of `results/*/{name}.json` depend on; what they import comes with them."""
    return SOURCES.get(name, (f"benchmarks/{name}.py",))


@lru_cache
def tree(*paths: str, folders: tuple[str, ...] = FOLDERS) -> str:
    """The fingerprint of the files that `files` finds."""
    return "tree:" + digest([(str(path.relative_to(ROOT)), _content(path)) for path in files(*paths, folders=folders)])


def files(*paths: str, folders: Iterable[str] = FOLDERS) -> list[Path]:
    """Files, the Python files below folders, and all that these import, wherever in a file, from `folders` of this repository.

    Args:
        paths: relative to the repository.
    """
    found: set[Path] = set()
    todo = [ROOT / path for path in paths]
    inside = tuple(ROOT / folder for folder in folders)
    while todo:
        path = todo.pop()
        if path.is_dir():
            todo += path.rglob("*.py")
        elif path not in found:
            found.add(path)
            if path.suffix == ".py":
                todo += [other for other in imported(path) if any(other.is_relative_to(folder) for folder in inside)]
    return sorted(found)


@lru_cache
def imported(path: Path) -> set[Path]:
    """The files of this repository that a Python file imports, wherever in it, relatively or by name."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found |= _modules(_package(alias.name), ())
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
            if node.level:
                found |= _modules(path.parents[node.level - 1].joinpath(*(node.module or "").split(".")), names)
            else:
                found |= _modules(_package(node.module), names)
    return found


def _package(name: str) -> Path | None:
    """Where an absolute import leads, without a suffix; None outside the repository."""
    first, *rest = name.split(".")
    return ROOT.joinpath(PACKAGES[first], *rest) if first in PACKAGES else None


def _modules(module: Path | None, names: Iterable[str]) -> set[Path]:
    """The files of `from module import names`."""
    if module is None:
        return set()
    candidates = [module.with_suffix(".py"), module / "__init__.py"]
    for name in names:
        candidates += [module / f"{name}.py", module / name / "__init__.py"]
    return {path for path in candidates if path.is_file()}


@lru_cache
def _content(path: Path) -> str:
    return digest(_plain(ast.parse(path.read_bytes())) if path.suffix == ".py" else path.read_bytes())


def _plain(node: Any) -> Any:
    """A syntax tree as tuples, without docstrings and empty fields, whose number differs between versions of Python."""
    if isinstance(node, list):
        return [_plain(x) for x in node]
    if not isinstance(node, ast.AST):
        return node
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
        fields["body"] = fields["body"][1:]
    return type(node).__name__, [(name, _plain(x)) for name, x in fields.items() if x is not None and x != []]


def of_row(name: str, impl: str) -> str:
    """The `tree` fingerprint of a row of `results/*/{name}.json`."""
    if name == "needle" and not impl.startswith("fp8attn"):  # a change of our kernels leaves other systems' answers as they are
        return tree(*NEEDLE, folders=("benchmarks",))
    if name == "vllm" and not impl.startswith("fp8attn"):
        return tree(*STOCK_VLLM, folders=("benchmarks",))
    return tree(*sources(name))


# Other libraries


# By a part of a peer's name, the libraries that it is.
LIBRARIES = {
    "vllm": ("vllm_fa3",), "fa3": ("fa3_fwd",), "hpc-ops": ("hpc_ops",), "flashinfer": ("flashinfer_fmha", "flashinfer_xqa"),
    "sage": ("sage_sm90",),
}  # fmt: skip


@lru_cache
def peer(name: str) -> str:
    """The fingerprint of an implementation of `peers`: of its binary, or the release that it comes with."""
    import torch

    from benchmarks.peers.binaries import UNPACKED

    torch_release = f"torch {torch.__version__}"
    if name == "torchao":
        return f"peer:torchao {sys.modules['torchao'].__version__}, {peer('fa3-fp8').removeprefix('peer:')}"
    if name.startswith("cudnn"):
        frontend = f" frontend {sys.modules['cudnn'].__version__}," if name == "cudnn-fp8" else ""
        return f"peer:cudnn {torch.backends.cudnn.version()},{frontend} {torch_release}"
    found = [libraries for part, libraries in LIBRARIES.items() if part in name]
    if not found:
        return f"peer:{torch_release}"
    digests = []
    for library in found[0]:
        with open(UNPACKED / f"{library}.so", "rb") as file:
            digests.append(f"{library} {hashlib.file_digest(file, 'sha256').hexdigest()[:16]}")
    return f"peer:{', '.join(digests)}"


# Launches


def of_call(impl: str, call: Callable[[], Any] | None) -> str:
    """The fingerprint of an implementation: of what ours and the ceilings launch, of the release that a peer is."""
    return launched(call) if impl.startswith("fp8attn") or impl.endswith("ceiling") else peer(impl)


def launched(call: Callable[[], Any]) -> str:
    """The fingerprint of what `call()` launches on this GPU."""
    from fp8attn.kernels.launch import recording

    from .ptx import normalized

    with recording() as launches:
        call()
    return of_launches((made, digest(normalized(made.compiled.asm["ptx"]))) for made in launches)


def of_launches(launches: Iterable[tuple[Any, str]]) -> str:
    """The fingerprint of `launch.Launch`es, each with the digest of its PTX. Launches by torch are not among them."""
    found = [(ptx, made.grid, bool(made.given.get("launch_pdl")), list(_numbers(made.args))) for made, ptx in launches]
    if not found:
        raise ValueError("this call launches no kernel through kernels.launch; give its rows a fingerprint of another kind")
    return "launches:" + digest(found)


def _numbers(args: Iterable[Any]) -> Iterator[Any]:
    """What the host chose among the arguments: numbers, and how TMA sees tensors; no addresses."""
    from fp8attn.kernels.launch import Counters, Tiles

    for x in args:
        if isinstance(x, Tiles):
            yield x.view.shape, x.view.strides, x.view.block, x.view.swizzled
        elif isinstance(x, Counters | int | float):
            yield tuple(x) if isinstance(x, Counters) else x
