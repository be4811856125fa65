"""Results as JSON, with the versions, device and date of the run."""

from __future__ import annotations

import importlib.metadata
import json
import math
import platform
import subprocess
import time
from dataclasses import asdict, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from fp8attn import __version__

from .perplexity import Perplexity


def meta(model: Any = None) -> dict[str, Any]:
    """Where and when a result was measured: device, versions, commit, date, model."""
    device = "cpu" if model is None else str(model.device)
    return {
        "device": torch.cuda.get_device_name(model.device)
        if device.startswith("cuda")
        else f"{device} ({platform.machine()})",
        "fp8attn": __version__,
        "commit": commit(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "model": None if model is None else Path(model.config._name_or_path).name,
    }


@cache
def commit() -> str | None:
    """The commit of this package, with a `+` if files of it are changed. None: it is neither in a git checkout nor
    installed from git.
    """
    root = Path(__file__).resolve().parents[3]
    if (root / ".git").exists():
        git = ["git", "-C", str(root)]
        try:
            head = subprocess.run(
                [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
            ).stdout.strip()
            changed = subprocess.run(
                [*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=True
            ).stdout
        except (OSError, subprocess.CalledProcessError):  # no git, or a checkout of another user
            return None
        return head + "+" * bool(changed)
    try:
        source = importlib.metadata.distribution("fp8attn").read_text(
            "direct_url.json"
        )  # pip writes it for an install from git
    except importlib.metadata.PackageNotFoundError:
        return None
    return json.loads(source or "{}").get("vcs_info", {}).get("commit_id")


def to_json(value: Any) -> Any:
    """Dataclasses as dicts (a `Perplexity` with its `ppl`), and NaN and infinities as null, ready for `json.dumps`."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value) | ({"ppl": value.ppl} if isinstance(value, Perplexity) else {})
    if isinstance(value, dict):
        return {str(name): to_json(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | Path, value: Any) -> None:
    """Write `to_json(value)`, and make the folders above."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(to_json(value), indent=2) + "\n")
