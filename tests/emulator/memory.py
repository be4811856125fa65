"""Global memory, the boxes that TMA copies, and the barriers that count their bytes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch


class Memory:
    """Global memory: tensors at invented addresses, with guards between them."""

    def __init__(self, size: int = 1 << 26) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.owned = np.zeros(size >> 2, bool)  # whether the four bytes belong to a tensor
        self.top = 1 << 12
        self.tensors: list[tuple[torch.Tensor, int]] = []
        self.withheld: list[tuple[int, np.ndarray]] = []

    def add(self, tensor: torch.Tensor) -> int:
        """Copies a tensor; returns its address."""
        raw = tensor.contiguous().view(torch.uint8).numpy().reshape(-1)
        address = self.top
        assert address + raw.size + 4096 < self.bytes.size, "emulated memory is full"
        self.bytes[address : address + raw.size] = raw
        self.owned[address >> 2 : (address + raw.size + 3) >> 2] = True
        self.top = (address + raw.size + 4095) // 1024 * 1024
        self.tensors.append((tensor, address))
        return address

    def withhold(self, address: int, size: int) -> None:
        """Fill memory with NaN until `complete`."""
        self.withheld.append((address, self.bytes[address : address + size].copy()))
        self.bytes[address : address + size] = 0xFF

    def complete(self) -> None:
        """Write what the launch before writes: a warp waits for its end."""
        while self.withheld:
            address, raw = self.withheld.pop()
            self.bytes[address : address + raw.size] = raw

    def sync(self) -> None:
        """Copies what the kernel has written into the tensors."""
        for tensor, address in self.tensors:
            raw = torch.from_numpy(self.bytes[address : address + tensor.nbytes].copy())
            tensor.view(torch.uint8).copy_(raw.view(tensor.view(torch.uint8).shape))

    def check(self, address: np.ndarray) -> None:
        assert self.owned[address >> 2].all(), f"access outside every tensor: {address}"


class TensorMap:
    """A tensor map of TMA.

    Args:
        address: of the tensor in `memory`.
        size: bytes of an element.
        strides: in elements.
        box: the shape of what one copy moves.
        swizzle: 16 for none, or the bytes of a row that are swizzled: 32, 64, 128.
    """

    def __init__(
        self,
        memory: Memory,
        address: int,
        size: int,
        shape: list[int],
        strides: list[int],
        box: list[int],
        swizzle: int,
    ) -> None:
        self.memory, self.address = memory, address
        self.shape, self.strides, self.box = (*shape, size), (*(n * size for n in strides), 1), (*box, size)
        self.swizzle = swizzle
        self.nbytes = int(np.prod(self.box))

    def load(self, shared: np.ndarray, target: int, corner: list[int]) -> None:
        at, source, inside = self._places(target, corner)
        shared[at] = np.where(inside, self.memory.bytes[source], 0)

    def store(self, shared: np.ndarray, source: int, corner: list[int]) -> None:
        at, target, inside = self._places(source, corner)
        self.memory.bytes[target[inside]] = shared[at[inside]]

    def _places(self, start: int, corner: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each byte of the box at `corner`: its address in shared memory, its address in global memory, and whether
        it is inside the tensor."""
        inside, place = np.bool_(True), np.int64(self.address)
        for size, stride, length, first in zip(self.shape, self.strides, self.box, (*corner, 0), strict=True):
            i = np.arange(length) + first
            inside = inside[..., None] & (i >= 0) & (i < size)
            place = place[..., None] + i.clip(0, size - 1) * stride  # modulo 2**64, as addresses are
        self.memory.check(place)
        at = start + np.arange(self.nbytes).reshape(self.box)
        return at ^ ((at >> 7) & (self.swizzle // 16 - 1)) << 4, place, inside


class Barrier:
    """An mbarrier. Its phase ends when all arrivals and bytes that it expects are counted."""

    def __init__(self, count: int, ended: Callable[[], None]) -> None:
        self.count = self.pending = count
        self.ended = ended
        self.phase = self.bytes = 0

    def update(self, arrivals: int = 0, expected: int = 0) -> None:
        self.pending -= arrivals
        self.bytes += expected
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            self.ended()
