"""Results files: what was measured, on what, and of which sources.

`{"meta": {"device", "torch", "triton", "date", "command", "sources": {path: sha256}}, "rows": [...]}`. `sources` are the files whose change
makes the numbers stale; `tests/test_results.py` recomputes their hashes. A benchmark's `SOURCES` names itself, the kernels that its numbers
are of and what of the package leads to them; what those kernels and the benchmark import comes with them.
"""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# Files in these folders do not stand alone. Elsewhere imports are not followed: `ops` reaches every kernel, whichever is measured.
FOLLOWED = (ROOT / "src/fp8attn/kernels", ROOT / "benchmarks")


def hashes(sources: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files, of the Python files below folders, and of what those in `FOLLOWED` import, by their path in the repository."""
    found: set[Path] = set()
    todo = [ROOT / source for source in sources]
    while todo:
        path = todo.pop()
        if path.is_dir():
            todo += path.rglob("*.py")
        elif path not in found:
            found.add(path)
            todo += imported(path) if path.parent in FOLLOWED else []
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(found)}


def imported(path: Path) -> set[Path]:
    """The files that a Python file imports relatively, wherever in it, but this one, which measures nothing."""
    found: set[Path] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            package = path.parents[node.level - 1]
            module = package.joinpath(*(node.module or "").split("."))
            found |= {module.with_suffix(".py")} if node.module else {package / f"{alias.name}.py" for alias in node.names}
    return found - {Path(__file__).resolve()}


def write(path: str | Path, rows: list[dict], sources: Iterable[str]) -> None:
    """Write rows that this process measured in the place of what the file held.

    Args:
        path: below the repository.
        rows: each with `case` and `impl`.
        sources: files and folders whose change makes the rows stale, as `hashes` takes them.
    """
    save(ROOT / path, about(sources), rows)


def about(sources: Iterable[str]) -> dict:
    """The `meta` of what this process measures."""
    import torch
    import triton

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.orig_argv[1:]),
        "sources": hashes(sources),
    }


def save(path: Path, meta: dict, rows: list[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{{\n "meta": {json.dumps(meta, indent=2)},\n "rows": [\n{lines}\n ]\n}}\n')
