"""Files that are replaced as a whole: after a full disk or a kill, the older file is still there, complete."""

from __future__ import annotations

import glob
import os
import secrets
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as to_bytes

from .errors import UsageError

ABANDONED = 3600  # seconds since the last byte of a draft was written, after which its writer is taken for killed


def draft_of(target: Path) -> Path:
    """A name beside `target`, with its suffix, that no other writer has."""
    return target.with_name(f".{target.stem}-{secrets.token_hex(4)}{target.suffix}")


def _remove_abandoned(target: Path) -> None:
    """Remove drafts of `target` whose writers were killed."""
    for draft in target.parent.glob(f".{glob.escape(target.stem)}-{'[0-9a-f]' * 8}{glob.escape(target.suffix)}"):
        if time.time() - draft.stat().st_mtime > ABANDONED:
            draft.unlink(missing_ok=True)


def is_special(path: Path) -> bool:
    """Whether `path` is a device or a pipe, which must be written to and not replaced."""
    return path.exists() and not (path.is_file() or path.is_dir())


def write_whole(path: str | Path, save: Callable[[Path], object]) -> None:
    """Call `save` with the name of a draft beside `path`, and then move the complete file to `path`. Folders above it
    are made.

    A file that exists keeps its permissions. A link stays, and the file it names is replaced. Drafts of this file that
    were written an hour ago or earlier, by processes that were killed, are removed.

    Raises:
        UsageError: `path` is a folder.
        OSError: the file cannot be written. No file was changed.
    """
    target = Path(path).resolve()
    if is_special(target):
        save(target)
        return
    if target.is_dir():
        raise UsageError(f"{path} is a folder; give the name of a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    draft = draft_of(target)
    try:
        save(draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        if target.exists():
            shutil.copymode(target, draft)
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


def write_tensors(path: str | Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file as a whole, and make the folders above it. safetensors' own `save_file` ignores the
    umask and makes the file private."""
    contents = to_bytes(tensors, metadata)
    write_whole(path, lambda draft: draft.write_bytes(contents))


def read_tensors(path: str | Path, write: str, again: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and the metadata of a safetensors file. Nothing in it is executed.

    Args:
        write, again: what writes such a file, and what to do if it is damaged, for errors.
    Raises:
        UsageError: the file does not exist, or is damaged.
    """
    if not Path(path).is_file():
        raise UsageError(f"{'a folder' if Path(path).is_dir() else 'no such file'}: {path}; {write}")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118
    except SafetensorError as error:
        raise UsageError(f"{path} is not a safetensors file, or it is cut short ({error}); {again}") from error
