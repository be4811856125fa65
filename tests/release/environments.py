"""Environments of their own for what is published: torch and safetensors, copied by links, and what pip
adds to a copy.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".cache/environments"
CONSTRAINTS = ROOT / "constraints.txt"


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """What a command prints, errors too. It sees neither this checkout nor a GPU, and has no network but pip's."""
    hidden = ("PYTHON", "COV_", "PYTEST", "TRITON", "VIRTUAL_ENV")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    clean |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "NO_COLOR": "1"}
    ended = subprocess.run(command, cwd=cwd, env=clean, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ended.returncode == code, f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout}"
    return ended.stdout


@contextmanager
def alone(name: str) -> Iterator[Path]:
    """A new folder, which one process of a test run makes, while the others wait for it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield FOLDER / name


def distribution(kind: str, folder: Path, name: str = "fp8attn") -> Path:
    """The file that `make release` publishes, in the folder FP8ATTN_DIST; without one, the wheel of this checkout."""
    if given := os.environ.get("FP8ATTN_DIST"):
        return next((ROOT / given).glob({"wheel": f"{name}-*.whl", "sdist": f"{name}-*.tar.gz"}[kind]))
    assert kind == "wheel"
    source = ROOT if name == "fp8attn" else ROOT / "plugins" / name.removeprefix("fp8attn_")
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, source, cwd=folder)
    return next(folder.glob(f"{name}-*.whl"))


def install(python: Path, *packages: str | Path) -> None:
    run(python, "-m", "pip", "install", "-q", "--no-compile", "-c", CONSTRAINTS, *packages, cwd=FOLDER)


def base() -> Path:
    """The environment that the others begin as: torch and safetensors, of this Python and these versions."""
    of = hashlib.sha256(f"{sys.version} {sys.executable} {CONSTRAINTS.read_text()}".encode()).hexdigest()[:8]
    with alone(f"base-{of}") as folder:
        if not (folder / "complete").exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
            install(folder / "bin/python", "torch", "safetensors")
            run(
                folder / "bin/python", "-c", "import torch, safetensors.torch", cwd=folder
            )  # compiles what all copies import
            (folder / "complete").touch()
    return folder


@contextmanager
def environment(kind: str, extra: str, folder: Path, *more: str) -> Iterator[Path]:
    """A Python with the wheel or the sdist, one extra of it, and nothing else.

    Args:
        kind: "wheel" or "sdist".
        extra: of pyproject.toml; "" for none.
        folder: an empty one, where the environment is made. Afterwards it is removed.
        more: arguments of pip.
    """
    copy = folder / "environment"
    shutil.copytree(base(), copy, symlinks=True, copy_function=os.link)
    try:
        install(
            copy / "bin/python",
            f"{distribution(kind, folder)}[{extra}]" if extra else distribution(kind, folder),
            *more,
        )
        yield copy / "bin/python"
    finally:
        shutil.rmtree(copy)
