"""The file from which a calibration continues after it was killed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fp8attn.errors import UsageError
from fp8attn.files import write_tensors

FORMAT = "fp8attn.calibration.1"


class Text:
    """Which batches have been seen: their number, and a digest by which a file refuses other batches.

    Attributes:
        count: number of batches.
        digest: of their tokens, in order.
    """

    def __init__(self, count: int = 0, digest: str = "") -> None:
        self.count, self.digest = count, digest

    def add(self, *tensors: torch.Tensor | None) -> None:
        """See a batch of these tensors."""
        found = hashlib.sha256(self.digest.encode())
        for tensor in tensors:
            found.update(
                b"none" if tensor is None else f"{list(tensor.shape)}".encode() + tensor.cpu().long().contiguous().numpy().tobytes()
            )
        self.count, self.digest = self.count + 1, found.hexdigest()


class Checkpoint:
    """A safetensors file with the state of a calibration. It is replaced as a whole, so it is complete at any time.

    Args:
        path: the file. The folders above it are made.
        identity: what must be equal for a calibration to continue, by name.
    """

    def __init__(self, path: str | Path, identity: dict[str, object]) -> None:
        self.path, self._identity = Path(path), {name: str(value) for name, value in identity.items()}

    def save(self, tensors: dict[str, torch.Tensor], looked: Text, counted: Text) -> None:
        """Write the state after means were computed from the batches `looked`, and the batches `counted` have been counted."""
        texts = [[text.count, text.digest] for text in (looked, counted)]
        metadata = {"format": FORMAT, "identity": json.dumps(self._identity), "texts": json.dumps(texts)}
        write_tensors(self.path, {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata)

    def load(self) -> tuple[dict[str, torch.Tensor], Text, Text] | None:
        """What `save` wrote last; None: there is no file.

        Raises:
            UsageError: the file is damaged, or of another calibration.
        """
        if not self.path.exists():
            return None
        try:
            with safe_open(self.path, "pt") as file:
                metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise UsageError(f"{self.path} is no checkpoint of a calibration ({error}); pass another path") from error
        if metadata.get("format") != FORMAT:
            raise UsageError(f"{self.path} is no checkpoint of a calibration ({FORMAT}); pass another path")
        theirs = json.loads(metadata["identity"])
        names = [name for name in theirs.keys() | self._identity.keys() if theirs.get(name) != self._identity.get(name)]
        if names:
            what = "; ".join(f"{name} is {theirs.get(name)!r} there and {self._identity.get(name)!r} here" for name in sorted(names))
            raise UsageError(
                f"the checkpoint {self.path} belongs to another calibration: {what}. Pass another path, or delete it to begin again"
            )
        looked, counted = (Text(*text) for text in json.loads(metadata["texts"]))
        return tensors, looked, counted

    def check(self, seen: Text, given: Text) -> None:
        """Refuse batches that differ from those that the file was made from.

        Raises:
            UsageError: another text or order, or fewer batches.
        """
        if (seen.count, seen.digest) != (given.count, given.digest):
            raise UsageError(
                f"the checkpoint {self.path} has seen {seen.count} batches, and the first batches here "
                f"{'are other ones' if given.count == seen.count else f'are only {given.count}'}. Pass the same batches in the same "
                "order, or delete the checkpoint to begin again"
            )

    def remove(self) -> None:
        """Delete the file, because the calibration has ended."""
        self.path.unlink(missing_ok=True)
