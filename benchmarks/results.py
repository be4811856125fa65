"""Results files: what was measured, on what, and of which sources.

`{"meta": {"device", "torch", "triton", "date", "command", "sources": {path: sha256}}, "rows": [...]}`. `sources` are the files whose change
makes the numbers stale; `tests/test_results.py` recomputes their hashes.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def hashes(sources: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files, and of the Python files below folders, by their path in the repository."""
    files: list[Path] = []
    for source in sources:
        path = ROOT / source
        files += sorted(path.rglob("*.py")) if path.is_dir() else [path]
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def write(path: str | Path, rows: list[dict], sources: Iterable[str], replaces: str = "") -> None:
    """Write rows, keeping those of the file whose case does not begin with `replaces` if what they measured is unchanged.

    Args:
        path: below the repository.
        rows: each with `case` and `impl`.
        sources: files and folders whose change makes the rows stale.
        replaces: prefix of the cases that these rows stand for; "" is all of them.
    """
    import torch
    import triton

    path = ROOT / path
    fresh = hashes(sources)
    if replaces and path.exists():
        old = json.loads(path.read_text())
        if old["meta"]["sources"] == hashes(old["meta"]["sources"]):
            rows = [row for row in old["rows"] if not row["case"].startswith(replaces)] + rows
            fresh = old["meta"]["sources"] | fresh
    meta = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "date": datetime.date.today().isoformat(),
        "command": "python " + " ".join(sys.orig_argv[1:]),
        "sources": fresh,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    path.write_text(f'{{\n "meta": {json.dumps(meta, indent=2)},\n "rows": [\n{lines}\n ]\n}}\n')
