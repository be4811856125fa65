"""What a launch passes to CUDA's driver, read by a function in the driver's place."""

import ctypes
import struct
from types import SimpleNamespace

import pytest

cuda = pytest.importorskip("fp8attn.kernels.cuda")
compiler = pytest.importorskip("triton.compiler.compiler")
PTX = """
.visible .entry kernel(
\t.param .u64 .ptr .global .align 1 kernel_param_0,
\t.param .u32 kernel_param_1,
\t.param .align 64 .b8 kernel_param_2[128],
\t.param .u32 kernel_param_3,
\t.param .u64 kernel_param_4,
\t.param .f32 kernel_param_5,
\t.param .u64 .ptr .global .align 1 kernel_param_6,
\t.param .u64 .ptr .global .align 1 kernel_param_7
)
.maxnreg 128
{
"""
FORM = cuda.MapForm(rank=1, swizzle=0, elem_size=1, elem_type=0, block_size=(16,))
FIELDS = ["Q", "i", FORM, "f"]
BLOB = bytes(range(128)) + struct.pack("<i4xq", 7, 1)


def program(**changed):
    metadata = dict(
        target=SimpleNamespace(backend="cuda"), num_ctas=1, launch_cooperative_grid=False, global_scratch_size=0,
        profile_scratch_size=0, shared=1024, launch_pdl=True,
    )  # fmt: skip
    return SimpleNamespace(
        function=5, packed_metadata=(4, 1, 1024), metadata=SimpleNamespace(**metadata | changed), asm={"ptx": PTX}
    )


def read(config, parameters):
    """The grid and the stream of a config, and its parameters."""
    grid = struct.unpack("<3I", ctypes.string_at(config, 12))
    (stream,) = struct.unpack("<Q", ctypes.string_at(config + 32, 8))
    sizes = [8, 4, 128, 4, 8, 4, 8, 8]
    return grid, stream, [ctypes.string_at(at, size) for at, size in zip(parameters, sizes, strict=True)]


EXPECTED = [
    struct.pack("<Q", 2**63), struct.pack("<i", -3), BLOB[:128], struct.pack("<i", 7), struct.pack("<q", 1),
    struct.pack("<f", 0.5), bytes(8), bytes(8),
]  # fmt: skip


def test_a_launch_passes_its_config_and_parameters(monkeypatch):
    calls = []
    monkeypatch.setattr(
        cuda, "_launch_kernel", lambda: lambda *args: (calls.append((args[1], *read(*args[::2]))), 0)[1]
    )
    function = cuda.Function.of(program(), FIELDS)
    assert function.launch((3, 2, 1), 9, [2**63, -3, BLOB, 0.5])
    assert calls == [(5, (3, 2, 1), 9, EXPECTED)]


def test_values_that_no_field_takes_are_not_launched(monkeypatch):
    monkeypatch.setattr(cuda, "_launch_kernel", lambda: lambda *args: pytest.fail("launched"))
    function = cuda.Function.of(program(), FIELDS)
    for values in ([0, 2**31, BLOB, 0.5], [0, 1.0, BLOB, 0.5], [0, 1, BLOB, 1e300], [None, 1, BLOB, 0.5]):
        assert not function.launch((1, 1, 1), 9, values), values
    monkeypatch.setattr(cuda, "_launch_kernel", lambda: lambda *args: 201)
    assert not function.launch((1, 1, 1), 9, [0, 1, BLOB, 0.5])


def test_a_launch_during_a_launch_has_memory_of_its_own(monkeypatch):
    """The driver is called without the GIL, so another thread may launch the same kernel."""
    function, calls = cuda.Function.of(program(), FIELDS), []

    def launch(config, handle, parameters, extra):
        if not calls:
            calls.append(None)
            assert function.launch((1, 1, 1), 1, [1, 1, bytes(144), 1.0])
        calls.append(read(config, parameters))
        return 0

    monkeypatch.setattr(cuda, "_launch_kernel", lambda: launch)
    for _ in range(2):
        assert function.launch((3, 2, 1), 9, [2**63, -3, BLOB, 0.5])
        assert calls[-1] == ((3, 2, 1), 9, EXPECTED)
    assert len(function.idle) == 2


@pytest.mark.parametrize(
    "changed",
    [
        {"target": SimpleNamespace(backend="hip")}, {"num_ctas": 2}, {"launch_cooperative_grid": True},
        {"global_scratch_size": 8}, {"profile_scratch_size": 8}, {"shared": 229 << 10},
    ],
)  # fmt: skip
def test_a_kernel_that_needs_more_is_not_launched_here(changed):
    assert cuda.Function.of(program(**changed), FIELDS) is None


@pytest.mark.parametrize("fields", [FIELDS[:-1], [*FIELDS, "i"], ["i", *FIELDS[1:]], [*FIELDS[:-1], "Q"]])
def test_parameters_are_those_of_the_ptx(fields):
    assert cuda.Function.of(program(), fields) is None


def test_a_kernel_without_ptx_is_left_to_triton():
    """As Triton keeps one with TRITON_STORE_BINARY_ONLY=1."""
    bare = program()
    bare.asm = compiler.AsmDict(cubin=b"")
    assert cuda.Function.of(bare, FIELDS) is None
