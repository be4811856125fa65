"""Launches of a compiled kernel by CUDA's driver: `cuLaunchKernelEx`, called with ctypes.

Triton's own launcher does the same in C. It first collects the arguments in Python and encodes a tensor map for each
descriptor, which costs 2 to 7 us more for a launch. Here a launch packs its arguments into memory that a kernel keeps,
with one `struct.pack_into`. A kernel's PTX says which parameters it has.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

from triton.runtime import driver

from .view import View

MAP_BYTES = 128  # of a tensor map
ALIGNMENT = 64  # of a tensor map
CONFIG = "3I3II4xQQI4x8x"  # CUlaunchConfig, padded to `ALIGNMENT`
OVERLAP_ID = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
MOST_SHARED = 228 << 10  # bytes of shared memory; more needs another attribute
# CUlaunchAttribute: a kernel may begin before the kernel before it has ended (`launch_pdl`).
_overlap = ctypes.create_string_buffer(struct.pack("<I4xi60x", OVERLAP_ID, 1))


@dataclass(frozen=True, eq=False)
class MapForm:
    """What Triton's compiler has decided about the tensor map of one argument: the entry in the kernel's metadata."""

    rank: int
    swizzle: int
    elem_size: int
    elem_type: int
    block_size: tuple[int, ...]

    @classmethod
    def of(cls, meta: dict[str, Any]) -> MapForm | None:
        """The form of this entry; None if this Triton has other objects of tensor maps than `tensor_map` reads."""
        from triton.backends.nvidia.driver import PyCUtensorMap

        if PyCUtensorMap.__basicsize__ != 2 * MAP_BYTES:
            return None
        block = tuple(meta["block_size"])
        return cls(len(block), meta["swizzle"], meta["elem_size"], meta["elem_type"], block)

    @property
    def field(self) -> str:
        """The format of `tensor_map`, for `struct`."""
        return f"{MAP_BYTES + 16 * self.rank}s"


@lru_cache(maxsize=4096)
def tensor_map(address: int, view: View, form: MapForm) -> bytes:
    """The parameters of a descriptor: the tensor map, the shape in int32 and the strides in int64, each at a multiple
    of 8 bytes. They are a function of these three, so none is outdated.
    """
    from triton.backends.nvidia.driver import TMA_DTYPE_DEVICE_TO_HOST

    utils = driver.active.utils
    fill = getattr(utils, "fill_tma_descriptor_tiled", None) or utils.fill_tma_descriptor  # the name in Triton 3.6
    elem_type = TMA_DTYPE_DEVICE_TO_HOST[form.elem_type]
    made = fill(address, form.swizzle, form.elem_size, elem_type, form.block_size, view.shape, view.strides, 0)
    # Triton has no function that returns the map's bytes. They are the second half of the object.
    map_ = ctypes.string_at(id(made) + MAP_BYTES, MAP_BYTES)
    return map_ + struct.pack("<" + form.rank * "i4x" + form.rank * "q", *view.shape, *view.strides)


@cache
def _launch_kernel() -> Any:
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.argtypes, function.restype = [ctypes.c_void_p] * 4, ctypes.c_int
    return function


class _Memory(NamedTuple):
    """What a launch passes to the driver."""

    buffer: Any  # CUlaunchConfig, then the parameters
    start: int  # of the config in it
    config: int  # its address
    parameters: Any  # the addresses of the parameters


class Function:
    """A compiled kernel as CUDA's driver launches it.

    Args:
        program: Triton's `CompiledKernel`, which was launched once, and so is loaded.
        fields: of each argument that is a parameter (None is none), its format for `struct`: "Q" (an address), "i" or
            "f". Or a `MapForm`.
    Attributes:
        offsets, sizes: of the parameters, in bytes from the config's start.
    """

    def __init__(self, program: Any, fields: Sequence[str | MapForm]) -> None:
        num_warps, _, shared = program.packed_metadata
        overlaps = program.metadata.launch_pdl
        self.function = program.function
        self.block = 32 * num_warps, 1, 1, shared
        self.attributes = ctypes.addressof(_overlap) if overlaps else 0, int(overlaps)
        self.offsets: list[int] = []
        self.sizes: list[int] = []
        formats, end = [CONFIG], struct.calcsize("<" + CONFIG)
        for field in fields:
            if isinstance(field, MapForm):
                padding = -end % ALIGNMENT
                start = end + padding
                self.offsets += [start, *range(start + MAP_BYTES, start + MAP_BYTES + 16 * field.rank, 8)]
                self.sizes += [MAP_BYTES, *[4] * field.rank, *[8] * field.rank]
                field = f"{padding}x{field.field}"
            else:
                self.offsets.append(end)
                self.sizes.append(struct.calcsize(field))
                field += "4x" * (field != "Q")
            formats.append(field)
            end += struct.calcsize("<" + field)
        # Triton's last two parameters are null pointers, because no kernel has its scratch.
        self.offsets += [end, end]
        self.sizes += [8, 8]
        self.struct = struct.Struct("<" + "".join(formats) + "8x")
        # A launch takes one of them, because a thread may launch while the driver reads another's.
        self.idle: list[_Memory] = []

    @classmethod
    def of(cls, program: Any, fields: Sequence[str | MapForm]) -> Function | None:
        """The function, or None if it cannot be launched here: it is for other GPUs, its launch needs more than the
        arguments, its parameters are not those that `fields` describe, or Triton kept no PTX that tells them
        (TRITON_STORE_BINARY_ONLY).
        """
        metadata = program.metadata
        if (
            metadata.target.backend != "cuda"
            or metadata.num_ctas != 1
            or metadata.launch_cooperative_grid
            or metadata.global_scratch_size
            or metadata.profile_scratch_size
            or metadata.shared > MOST_SHARED
        ):
            return None
        function = cls(program, fields)
        return function if function.sizes == parameter_sizes(program.asm.get("ptx", "")) else None

    def launch(self, grid: tuple[int, int, int], stream: int, values: Sequence[Any]) -> bool:
        """Launch it with `values` of the fields. False: it was not launched, because a value does not fit its field, or
        the driver refuses, as in a thread without a CUDA context.
        """
        try:
            memory = self.idle.pop()
        except IndexError:
            memory = self._new_memory()
        try:
            config = (*grid, *self.block, stream, *self.attributes)
            self.struct.pack_into(memory.buffer, memory.start, *config, *values)
            return _launch_kernel()(memory.config, self.function, memory.parameters, None) == 0
        except (struct.error, OverflowError):
            return False
        finally:
            self.idle.append(memory)

    def _new_memory(self) -> _Memory:
        buffer = ctypes.create_string_buffer(self.struct.size + ALIGNMENT)
        start = -ctypes.addressof(buffer) % ALIGNMENT
        config = ctypes.addressof(buffer) + start
        return _Memory(
            buffer, start, config, (ctypes.c_void_p * len(self.offsets))(*[config + x for x in self.offsets])
        )


_ENTRY = re.compile(r"\.entry\s+\w+\((.*?)\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.[bfsu](\d+)[^,\[]*(?:\[(\d+)\])?")


def parameter_sizes(ptx: str) -> list[int]:
    """The sizes in bytes of the parameters of a kernel."""
    entry = _ENTRY.search(ptx)
    return [int(count or bits) // (1 if count else 8) for bits, count in _PARAMETER.findall(entry[1] if entry else "")]
