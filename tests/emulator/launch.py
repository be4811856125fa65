"""A recorded launch on the emulator. Only in a process where Triton compiles (`tests.support.compiling.call`)."""

from __future__ import annotations

import torch

from fp8attn.kernels.launch import Counters, Launch, Tiles
from tests.support.machine_code import build

from .machine import Machine
from .memory import Memory, TensorMap


def emulate(
    launch: Launch, late: tuple[int, ...] = (), written_before: tuple[torch.Tensor, ...] = (), seed: int = 0
) -> int:
    """Run the launch. Its tensors then hold what a GPU would have written.

    Args:
        late: warps that fall behind all others again and again.
        written_before: tensors that the launch before this one writes: they are NaN until a warp waits for its end.
        seed: of the order of warps.
    Returns:
        How many counters were not left zero.
    """
    kernel = build(launch).kernel
    memory, addresses = Memory(), {}

    def address(tensor: torch.Tensor) -> int:
        base = tensor._base if tensor._base is not None and tensor.numel() != tensor._base.numel() else tensor
        if base.data_ptr() not in addresses:
            addresses[base.data_ptr()] = memory.add(base)
        return addresses[base.data_ptr()] + tensor.data_ptr() - base.data_ptr()

    metas, arguments, counters = iter(kernel.metadata.tensordesc_meta or ()), [], []
    for name, value in zip(launch.kernel.arg_names, launch.args, strict=False):
        if kernel.src.signature[name] == "constexpr":  # None, or a number that is compiled in
            continue
        if isinstance(value, Tiles):
            (x, view), meta = value, next(metas)
            about = value.dtype.itemsize, view.shape, view.strides, meta["block_size"], 16 << meta["swizzle"]
            arguments += [TensorMap(memory, address(x) + view.offset, *about), *view.shape, *view.strides]
        elif isinstance(value, Counters):
            counters.append(torch.zeros(value.count, dtype=torch.int32))
            arguments.append(address(counters[-1]))
        elif isinstance(value, torch.Tensor):
            arguments.append(address(value))
        else:
            arguments.append(value)
    for tensor in written_before:
        memory.withhold(address(tensor), tensor.nbytes)
    scratch = 0, 0  # Triton's own two parameters
    arguments = [*arguments, *scratch]
    Machine(kernel.asm["ptx"], kernel.metadata.shared, memory, arguments, launch.grid[0], seed).run(late=late)
    return sum(int(x.count_nonzero()) for x in counters)
