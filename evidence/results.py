"""Results files, `results/<device>/<name>.json`: the rows of one command, and above them where and when they were
measured.

    {"device": "NVIDIA H200", "commit": "abc1234", "date": "2026-11-24", "torch": "2.11.0", "triton": "3.9.0",
     "peers": {"fa3-fp8": "fa3-fwd 0.0.3"}, "command": "python -m benchmarks.set",
     "rows": [{"case", "impl", ...}]}

One command writes a file whole. Cases may be added later on the same device, with the same torch and Triton; those that
are there are never measured again. `mixed` then names the cases or implementations of each other commit. `note` says
what else a reader should know. FP8ATTN_RESULTS names another folder than `results`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(os.environ.get("FP8ATTN_RESULTS") or ROOT / "results")
HEADER = ("device", "commit", "mixed", "date", "torch", "triton", "peers", "command", "note")


def parse(parser: argparse.ArgumentParser, arguments: Iterable[str] | None = None) -> argparse.Namespace:
    """Parse arguments, `--save` among them, which needs the commit."""
    parser.add_argument(
        "--save",
        action="store_true",
        help="write the rows to results/<this device>/, in place of the file that is there",
    )
    args = parser.parse_args(None if arguments is None else list(arguments))
    if args.save:
        require_commit()
    return args


def require_commit() -> None:
    """Exit if the commit that is measured is not known."""
    if commit() is None:
        sys.exit("results name the commit that was measured, and git does not answer here: set FP8ATTN_COMMIT")


def save(name: str, rows: list[dict], peers: Mapping[str, str] | None = None, folder: Path | None = None) -> Path:
    """Write the rows that this process measured.

    Args:
        name: of the results file.
        rows: each with `case` and `impl`, which no other row has.
        peers: the releases of other systems, by implementation.
        folder: instead of `results`.
    """
    head = header(peers or {})
    path = (folder or RESULTS) / slug(head["device"]) / f"{name}.json"
    write(path, head, rows)
    print(f"{len(rows)} rows of {name} in {path}", flush=True)
    return path


def add(name: str, rows: list[dict], peers: Mapping[str, str] | None = None, folder: Path | None = None) -> Path:
    """Add rows of whole cases, which this process measured, to a results file. Without a file it is `save`, whose
    arguments it takes.

    Raises:
        ValueError: the file has one of the cases, or rows of another device, torch or Triton.
    """
    cases = list(dict.fromkeys(row["case"] for row in rows))
    path, held = require_new(name, cases, folder)
    if held is None:
        return save(name, rows, peers, folder)
    write(path, joined(held, header(peers or {}), cases), held["rows"] + rows)
    print(f"{len(rows)} rows added to {path}", flush=True)
    return path


def current(name: str) -> dict | None:
    """The results file of this device, if it is of this commit, torch and Triton."""
    head = header({})
    path = RESULTS / slug(head["device"]) / f"{name}.json"
    held = json.loads(path.read_text()) if path.is_file() else {}
    return held if all(held.get(key) == head[key] for key in ("commit", "torch", "triton")) else None


def require_new(name: str, cases: Iterable[str], folder: Path | None = None) -> tuple[Path, dict | None]:
    """The results file to which these cases can be added, and what it has; None if there is no file.

    Raises:
        ValueError: as `add`.
    """
    head = header({})
    path = (folder or RESULTS) / slug(head["device"]) / f"{name}.json"
    if not path.is_file():
        return path, None
    held = json.loads(path.read_text())
    if twice := sorted({row["case"] for row in held["rows"]} & {*cases}):
        raise ValueError(f"{path} has {', '.join(twice)}: measure other cases, or all of them")
    joined(held, head, cases)
    return path, held


def joined(held: Mapping, head: Mapping, names: Iterable[str]) -> dict:
    """The header of a file to which rows are added.

    Args:
        held: its header.
        head: of the rows that are added.
        names: the cases that are added; of a case that the file has, the implementations.
    Raises:
        ValueError: another device, torch or Triton.
    """
    for key in ("device", "torch", "triton"):
        if held.get(key) != head.get(key):
            raise ValueError(
                f"the rows of the file have {key} {held.get(key)}, and the new ones {head.get(key)}: measure the file "
                f"whole"
            )
    mixed = {commit: list(old) for commit, old in held.get("mixed", {}).items()}
    if head["commit"] != held["commit"]:
        mixed[head["commit"]] = sorted({*mixed.get(head["commit"], ()), *names})
    commands = "; ".join(dict.fromkeys([*held["command"].split("; "), head["command"]]))
    return {
        **held,
        "mixed": mixed,
        "peers": {**held.get("peers", {}), **(head.get("peers") or {})},
        "command": commands,
    }


def write(path: Path, head: Mapping, rows: Iterable[dict]) -> None:
    """Write a file with a line for each row. Who reads it meanwhile finds the older file whole."""
    lines = [f' "{key}": {json.dumps(head[key])},' for key in HEADER if head.get(key)]
    body = ",\n".join("  " + json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text("\n".join(["{", *lines, ' "rows": [', body, " ]", "}"]) + "\n")
    unfinished.rename(path)


def header(peers: Mapping[str, str]) -> dict:
    """The header of rows that this process measures."""
    import torch

    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "triton": importlib.import_module("triton").__version__ if importlib.util.find_spec("triton") else None,
        "peers": dict(peers),
        "command": "python " + " ".join(sys.orig_argv[1:]),
    }


def slug(device: str) -> str:
    """The folder of a device: `h100` of "NVIDIA H100 80GB HBM3", `h100-pcie` of "NVIDIA H100 PCIe"."""
    words = [word for word in re.split(r"[\s-]+", device.lower()) if not re.fullmatch(r"nvidia|amd|\d+gb|hbm\w*", word)]
    return "-".join(words)


@cache
def commit() -> str | None:
    """The commit that is measured, with a `+` if files of it are changed: from FP8ATTN_COMMIT, or from git. None if
    neither tells it.
    """
    if named := os.environ.get("FP8ATTN_COMMIT"):
        return named
    try:
        kept = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
        run = lambda *command: subprocess.run(["git", *command], **kept).stdout  # noqa: E731
        changed = run("status", "--porcelain", "--untracked-files=no", "src", "benchmarks", "tests", "models")
        return run("rev-parse", "--short", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None
