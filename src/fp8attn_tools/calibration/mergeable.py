"""State that processes gather separately and then combine: tensors of constant size, each with an operation that combines two."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist

Operation = Literal["sum", "min", "max"]
_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {"sum": torch.add, "min": torch.minimum, "max": torch.maximum}


class Mergeable:
    """A state whose tensors are the attributes in `STATE`. They are None before the first data.

    Merging is associative and commutative. For sums of integers and for extremes it is also exact, so any order gives the same bits.
    """

    STATE: ClassVar[dict[str, Operation]]

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The tensors by name; none before the first data."""
        return {name: tensor for name in self.STATE if (tensor := getattr(self, name)) is not None}

    def load_state_dict(self, tensors: dict[str, torch.Tensor], device: torch.device | str = "cpu") -> None:
        """Continue from the tensors of `state_dict`."""
        for name in self.STATE:
            setattr(self, name, tensors[name].to(device) if name in tensors else None)

    def merge(self, other: Any) -> None:
        """Add what another object of the same class has seen of the same heads."""
        for name, operation in self.STATE.items():
            mine, theirs = getattr(self, name), getattr(other, name)
            if theirs is not None:
                setattr(self, name, theirs.clone() if mine is None else _COMBINE[operation](mine, theirs.to(mine.device)))

    def all_reduce(self, group: dist.ProcessGroup) -> None:
        """Merge the states of all processes of a group; each then has the same state. All must have seen data."""
        operations = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
        for name, operation in self.STATE.items():
            mine = getattr(self, name)
            shared = mine.to(collective_device(group), copy=True)
            dist.all_reduce(shared, operations[operation], group=group)
            setattr(self, name, shared.to(mine.device))


def select(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """The tensors whose names begin with `name` and a dot, without these."""
    return {key.removeprefix(f"{name}."): x for key, x in tensors.items() if key.startswith(f"{name}.")}


def collective_device(group: dist.ProcessGroup) -> torch.device:
    """The device that tensors must be on for collective operations of the group."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")


def concatenate(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """`x` of all processes of the group, concatenated along the first axis, on the CPU; `x` itself without a group. Shapes are equal."""
    if group is None:
        return x.cpu()
    x = x.to(collective_device(group)).contiguous()
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x, group=group)
    return torch.cat(parts).cpu()
