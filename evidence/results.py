"""Results files, `results/<device>/<name>.json`: measurements, and the machine, date and code of each.

    {"meta": {"device", "capability", "sms", "shared"},
     "provenance": {id: {"torch", "triton", "date", "commit", "command", "code"}},
     "rows": [{"case", "impl", ..., "provenance": id, "fingerprint"}]}

A file holds one device's rows. Rows of one `provenance` were measured by one command: ratios are of those. `fingerprint` says what a row
depends on (`fingerprint.py`), and `code` is the syntax tree of everything that a row could depend on: while that is what it was, a row is
fresh. Rows from before there were fingerprints have neither.
"""

from __future__ import annotations

import argparse
import datetime
import fcntl
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from .fingerprint import ROOT, digest, of_row, sources, tree

RESULTS = ROOT / "results"


def add_save(parser: argparse.ArgumentParser) -> None:
    help = "keep the rows in results/<this device>/; rows of other cases and implementations stay"
    parser.add_argument("--save", action="store_true", help=help)


def parse(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    args = parser.parse_args(arguments)
    if getattr(args, "save", False) and commit() is None:
        sys.exit("rows are kept with the commit they are of, and git does not tell it here: set FP8ATTN_COMMIT, or leave out --save")
    return args


def save(name: str, rows: list[dict]) -> Path:
    """Keep rows that this process measured, in the place of those of the same case and implementation.

    Args:
        name: of the results file.
        rows: each with `case`, `impl` and, unless it is of a syntax tree, `fingerprint`.
    Raises:
        SystemExit: the file holds another device's rows, or the commit is not known.
    """
    machine = meta()
    path = RESULTS / slug(machine["device"]) / f"{name}.json"
    with _alone(path.parent):
        kept = json.loads(path.read_text()) if path.exists() else {"meta": machine, "provenance": {}, "rows": []}
        if kept["meta"] != machine:
            sys.exit(f"{path} holds rows of {kept['meta']}, this is {machine}: move that file away to begin another")
        now = provenance(name)
        number = digest(now)[:8]
        made = {key(row): {"fingerprint": of_row(name, row["impl"])} | row | {"provenance": number} for row in rows}
        write(path, machine, kept["provenance"] | {number: now}, list(({key(row): row for row in kept["rows"]} | made).values()))
    print(f"{len(rows)} rows kept in {path.relative_to(ROOT)}", flush=True)
    return path


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Processes that measure on several GPUs at once save one after another."""
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)  # and unlocks


def write(path: Path, machine: dict, provenances: dict[str, dict], rows: list[dict]) -> None:
    """The file, a row a line, with the provenances that its rows have."""
    used = {row["provenance"] for row in rows}
    parts = {
        "meta": json.dumps(machine),
        "provenance": "{\n" + ",\n".join(f'  "{k}": {json.dumps(v)}' for k, v in provenances.items() if k in used) + "\n }",
        "rows": "[\n" + ",\n".join("  " + json.dumps(row) for row in rows) + "\n ]",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("{\n" + ",\n".join(f' "{k}": {v}' for k, v in parts.items()) + "\n}\n")


def key(row: dict) -> tuple[str, str]:
    return row["case"], row["impl"]


def meta() -> dict:
    """This machine, as far as launches depend on it."""
    import torch

    if not torch.cuda.is_available():
        return {"device": "cpu"}
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": torch.cuda.get_device_name(),
        "capability": list(torch.cuda.get_device_capability()),
        "sms": properties.multi_processor_count,
        "shared": getattr(properties, "shared_memory_per_block_optin", 64 << 10),  # as kernels/portable asks
    }


def slug(device: str) -> str:
    """The folder of a device: `h100` of "NVIDIA H100 80GB HBM3", `h100-pcie` of "NVIDIA H100 PCIe"."""
    words = [word for word in re.split(r"[\s-]+", device.lower()) if not re.fullmatch(r"nvidia|amd|\d+gb|hbm\w*", word)]
    return "-".join(words)


def provenance(name: str) -> dict:
    """The provenance of rows that this process measures."""
    import torch

    return {
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": "python " + " ".join(sys.orig_argv[1:]),
        "code": code(name),
    }


def code(name: str) -> str:
    """The syntax tree of all that rows of a file could depend on."""
    return tree(*sources(name), "src/fp8attn")


@cache
def commit() -> str | None:
    """The commit that is measured, with a `+` if files of it are changed: from FP8ATTN_COMMIT, or from git. None: neither says."""
    if named := os.environ.get("FP8ATTN_COMMIT"):
        return named
    try:
        run = lambda *command: subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout  # noqa: E731
        changed = run("status", "--porcelain", "--untracked-files=no", "src", "benchmarks", "tests", "training", "models")
        return run("rev-parse", "--short", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
