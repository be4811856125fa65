"""Calls that come down to launches, made again without the Python that led to them.

What a call launches follows from its tensors' shapes, strides and types; from one call to the next only addresses change. So a call is
recorded: its launches, and for each address whether it is an input's, the result's, or in between. Made again, it allocates the result and
one piece of memory for all that is in between, and launches. (A CUDA graph would fix the addresses.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from .launch import Compiled, PerStream, Recording, Tiles, View, current_stream, is_direct, recording

MOST = 512  # calls that are remembered; with one more, all are forgotten
_ALIGNED = 256  # bytes: every piece of memory in between begins at a multiple


class Step(NamedTuple):
    """A launch; `at` and `offset` say which of the call's addresses a pointer is relative to, and by how much."""

    compiled: Compiled
    grid: tuple[int, int, int]
    values: tuple  # what the launcher takes, but for what follows
    pointers: tuple[tuple[int, int, int], ...]  # (i, at, offset)
    asked: tuple[tuple[int, PerStream], ...]
    tiles: tuple[tuple[int, int, int, View, Callable], ...]  # (i, at, offset, view, encoder), the last first


class Replay:
    """A recorded call.

    Args:
        steps: the launches; their addresses are relative to the inputs, then the result, then the memory in between.
        like: the result of the recorded call.
        nbytes: of the memory in between.
    """

    def __init__(self, steps: Sequence[Step], like: torch.Tensor, nbytes: int) -> None:
        self.steps, self.nbytes, self.device = steps, nbytes, like.device
        self.shape, self.strides, self.dtype = like.shape, like.stride(), like.dtype

    def __call__(self, addresses: Sequence[int]) -> torch.Tensor:
        """The result for inputs at these addresses."""
        device = self.device
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=device)
        between = torch.empty(self.nbytes, dtype=torch.uint8, device=device)
        addresses = (*addresses, out.data_ptr(), between.data_ptr())
        stream = current_stream(device)
        for compiled, (x, y, z), template, pointers, asked, tiles in self.steps:
            values = list(template)
            for i, at, offset in pointers:
                values[i] = addresses[at] + offset
            for i, (make, where) in asked:
                values[i] = make(where).data_ptr()
            for i, at, offset, view, encode in tiles:
                values[i : i + 1] = encode(addresses[at] + offset, view)
            compiled.call(x, y, z, stream, values)
        return out


class Replays:
    """`function(*tensors, *options)`, recorded when such a call comes again (and launches are direct), and from then on replayed.

    The function must depend on nothing but its arguments, and on nothing in its tensors but what `__call__` makes a key of. It may do
    anything: a call is replayed only if all that its launches take are inputs, `own` tensors and `PerStream` ones, and its result is one
    of the second.
    """

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function
        self.known: dict[tuple, Replay | bool] = {}  # True: seen once; False: not to be replayed

    def __call__(self, tensors: Sequence[torch.Tensor], options: tuple) -> torch.Tensor:
        """
        Args:
            tensors: on one GPU or on several, nothing that torch traces or differentiates.
            options: hashable.
        """
        addresses = [x.data_ptr() for x in tensors]
        same = map(addresses.index, addresses)  # who begins where another one does: there an address does not tell who is meant
        key = (
            options, *same, *[(x.shape, x.stride(), x.dtype, x.device, i & 15) for x, i in zip(tensors, addresses, strict=True)]
        )  # fmt: skip
        found = self.known.get(key)
        if isinstance(found, Replay) and is_direct(found.device):
            return found(addresses)
        if found is not True or not is_direct(tensors[0].device):  # `launch` learns nothing of what Triton launches its own way
            if found is None:
                if len(self.known) >= MOST:
                    self.known.clear()
                self.known[key] = True
            return self.function(*tensors, *options)
        with recording() as notes:
            out = self.function(*tensors, *options)
        self.known[key] = _replay(notes, tensors, out) or False
        return out


def _replay(notes: Recording, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> Replay | None:
    """What was recorded as a `Replay`; None where it was more than launches on tensors that are known."""
    places = {x.data_ptr(): (at, 0) for at, x in enumerate(tensors)}
    nbytes, found = 0, False
    for x in notes.owned:
        if x.data_ptr() == out.data_ptr():
            places[x.data_ptr()] = len(tensors), 0
            found = True
        elif x.numel():
            places[x.data_ptr()] = len(tensors) + 1, nbytes
            nbytes += -(-x.untyped_storage().nbytes() // _ALIGNED) * _ALIGNED
    steps = [_step(launch, places) for launch in notes.launches]
    return Replay(steps, out, nbytes) if found and all(steps) else None


def _step(launch: tuple, places: dict[int, tuple[int, int]]) -> Step | None:
    kernel, grid, args, given = launch
    compiled = next((known for known in given.compiled if known.kernel is kernel and known.values(args) is not None), None)
    if compiled is None:
        return None
    values = list(args)
    pointers, asked, tiles = [], [(i, args[i]) for i in compiled.asked], []
    for i, _ in compiled.pointers:
        if i not in compiled.asked:
            if args[i].data_ptr() not in places:
                return None
            pointers.append((i, *places[args[i].data_ptr()]))
    for i, *_, encode in compiled.tiles:
        if args[i].x.data_ptr() not in places:
            return None
        tiles.append((i, *places[args[i].x.data_ptr()], args[i].view, encode))
    for i, x in enumerate(values):  # nothing is kept alive
        if isinstance(x, torch.Tensor | Tiles | PerStream):
            values[i] = None
    return Step(compiled, (*grid, 1, 1)[:3], (*values, *compiled.constants), tuple(pointers), tuple(asked), tuple(tiles))
