"""Launches a kernel by Triton and then by its compiled kernel (`kernels.launch`) on a libcuda that only records its
arguments; prints JSON.

A process of its own (`test_launch.py` runs it), because a process with TRITON_INTERPRET=1 cannot compile.

    python -m tests.kernels.run_launch FOLDER_WITH_LIBCUDA
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

FOLDER = Path(sys.argv[1])
os.environ["TRITON_LIBCUDA_PATH"] = str(FOLDER)
STUB = ctypes.CDLL(FOLDER / "libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
MADE = ctypes.c_int.in_dll(STUB, "stub_launches")

import torch  # noqa: E402
import triton  # noqa: E402
from torch.overrides import TorchFunctionMode  # noqa: E402
from triton import knobs  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.backends.nvidia.driver import CudaDriver  # noqa: E402

from fp8attn import (  # noqa: E402
    AttentionParams,
    AttentionPolicy,
    KVPages,
    PagedKVCache,
    _torch_ops,
    backends,
    fp8_attention,
    kernels,
    ops,
    scaled_dot_product_attention,
)
from fp8attn.dense import sdpa  # noqa: E402
from fp8attn.formats.codec import FP8  # noqa: E402
from fp8attn.kernels import append, combine, compile, decode, machine, prefill  # noqa: E402
from fp8attn.kernels.gluon import gl, gluon  # noqa: E402
from fp8attn.kernels.launch import Constants, Counters, Tiles, launch, recording  # noqa: E402
from fp8attn.kernels.view import View  # noqa: E402
from fp8attn.precompile.calls import Layer, attend, from_dense  # noqa: E402
from tests.support.machines import TARGETS  # noqa: E402

DEVICE = torch.device("cuda", 0)
ROWS = View((1024, 64), (64, 1), (128, 64))


class Driver(CudaDriver):
    """Triton's driver, on a machine with one Hopper GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.get_device_capability = lambda device=0: (9, 0)
        torch.accelerator.current_device_index = self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 7

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


@gluon.jit(do_not_specialize=["count"])
def kernel(x_ptr, stride, k_desc, absent_ptr, v_desc, y_ptr, count, scale, D: gl.constexpr, FLAG: gl.constexpr):
    i = gl.arange(0, D, gl.BlockedLayout([1], [32], [4], [0]))
    x = gl.load(x_ptr + i * stride, mask=i < count)
    gl.store(y_ptr + i, x * scale + k_desc.shape[0].to(gl.float32) + v_desc.shape[0].to(gl.float32), mask=i < count)


def noted(compiled) -> dict:
    """The arguments of the last launch."""
    parameters = (ctypes.c_ubyte * 128 * 128).in_dll(STUB, "stub_parameters")
    return {
        "grid": list((ctypes.c_uint * 3).in_dll(STUB, "stub_grid")),
        "config": list((ctypes.c_ulong * 8).in_dll(STUB, "stub_config")),
        "parameters": [bytes(parameters[i])[:size].hex() for i, size in enumerate(sizes(compiled))],
    }


def expect(compiled) -> None:
    """Set the sizes of the parameters of the next launches in the stub."""
    found = (ctypes.c_int * 128).in_dll(STUB, "stub_sizes")
    for i, size in enumerate([*sizes(compiled), 0]):
        found[i] = size


def sizes(compiled) -> list[int]:
    """The sizes in bytes of the parameters of a compiled kernel."""
    declared = re.search(r"\.entry \w+\((.*?)\)", compiled.asm["ptx"], re.DOTALL)[1]
    bytes_of = {"u64": 8, "b64": 8, "u32": 4, "b32": 4, "f32": 4}
    return [
        int(n) if n else bytes_of[kind]
        for kind, n in re.findall(r"\.param (?:\.align \d+ )?\.(\w+)[^,\[]*(?:\[(\d+)\])?", declared)
    ]


def watched(done: Callable[[], dict]) -> dict:
    """Whether Triton binds the arguments of a launch, and how often a hook is called, under every way to observe
    launches.
    """
    seen = []
    enter, leave = (lambda metadata: seen.append(metadata) for _ in range(2))
    rows = {}

    def row(name: str) -> None:
        seen.clear()
        rows[name] = {"ordinary": done()["ordinary"], "hooks": len(seen)}

    for name, chain, hook in (
        ("enter", knobs.runtime.launch_enter_hook, enter),
        ("exit", knobs.runtime.launch_exit_hook, leave),
    ):
        chain.add(hook)
        row(name)
        chain.remove(hook)
    kernel.pre_run_hooks.append(lambda *args, **options: seen.append(args))
    row("before runs")
    kernel.pre_run_hooks.clear()
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        row("debug")
    row("nothing")
    return rows


def refused(launch: Callable[[], None]) -> dict:
    """The error of a launch that the driver refuses, and whether the next one is launched; before, of one that the
    driver refuses only once.
    """
    error, once = (ctypes.c_int.in_dll(STUB, name) for name in ("stub_error", "stub_error_once"))
    once.value, before = 201, MADE.value
    launch()
    again = MADE.value - before
    error.value = 201
    try:
        launch()
    except RuntimeError as raised:
        message = str(raised)
    error.value, before = 0, MADE.value
    launch()
    return {"message": message, "again": again, "next": MADE.value - before}


def stand_in(kernel):
    """A kernel of the same parameters that does nothing, and compiles at once."""
    fixed = [param.name for param in kernel.params if param.do_not_specialize]
    parameters = ", ".join(
        f"{param.name}: gl.constexpr" if param.is_constexpr else param.name for param in kernel.params
    )
    path = FOLDER / f"{kernel.__name__}_stand_in.py"
    path.write_text(
        f"from fp8attn.kernels.gluon import gl, gluon\n\n\n"
        f"@gluon.jit(do_not_specialize={fixed})\ndef {kernel.__name__}({parameters}):\n    pass\n"
    )
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, kernel.__name__)


def called(function: Callable[[], Any]) -> int:
    """The number of Python functions of fp8attn that a call of `function` calls."""
    ours = str(Path(kernels.__file__).parent.parent)
    events = []
    sys.setprofile(
        lambda frame, event, argument: events.append(event == "call" and frame.f_code.co_filename.startswith(ours))
    )
    try:
        function()
    finally:
        sys.setprofile(None)
    return sum(events)


class Made(TorchFunctionMode):
    """Counts the calls of torch whose results are tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.count += isinstance(result, torch.Tensor) or (
            isinstance(result, list | tuple) and isinstance([*result, 0][0], torch.Tensor)
        )
        return result


def attended(launches: list, compiled: dict) -> dict:
    """Results of calls of `ops.attention`, on a CPU that is treated as a Hopper GPU.

    `launches` grows by one for each launch that Triton binds, whose kernel is then `compiled["last"]`.
    """
    decode.decode_kernel, prefill.prefill_kernel = stand_in(decode.decode_kernel), stand_in(prefill.prefill_kernel)
    decode.plan.num_sms = prefill.plan.num_sms = lru_cache(lambda device: 132)
    hopper = backends.load("hopper")
    ops.find = _torch_ops.find = cache(lambda *_: hopper)
    ops.at_hand = lambda x, backend: False  # as on a GPU, which nothing waits for
    kernels.launch.counters = lambda device, stream, count: torch.zeros(count, dtype=torch.int32)
    kernels.launch.Constants = lambda device, **values: Constants(DEVICE, **values)
    sinks = torch.zeros(32)
    rows = {}
    for name, queries, columns, given in (
        ("1 query", 1, 4, {}),
        ("256 queries", 256, 4, {}),
        ("64 queries in parts", 64, 64, {}),
        ("sinks, 64 queries in parts", 64, 64, {"sinks": sinks}),
    ):
        q = torch.zeros(queries, 32, 128, dtype=torch.bfloat16)
        pages = KVPages.empty(columns, 8, 128, 1, columns)
        (ctypes.c_int * 128).in_dll(STUB, "stub_sizes")[0] = 0

        def call(q=q, pages=pages, given=given):
            return ops.attention(q, pages, return_lse=True, **given)

        call()
        expect(compiled["last"])
        before, earlier = len(launches), MADE.value
        out, lse = call()
        row = {"ordinary": len(launches) - before, "launches": MADE.value - earlier}
        words = {
            int.from_bytes(bytes.fromhex(x[:16]), "little")
            for x in noted(compiled["last"])["parameters"]
            if len(x) >= 16
        }
        held = {"q": q, "k": pages.k, "table": pages.page_table, "sinks": sinks, "out": out, "lse": lse}
        rows[name] = row | {
            "calls": called(call),
            "last takes": [name for name, x in held.items() if x.data_ptr() in words],
        }

    before, earlier = len(launches), MADE.value
    for num_seqs, queries in ((3, 1), (1, 300)):
        other = torch.zeros(num_seqs * queries, 32, 128, dtype=torch.bfloat16)
        ops.attention(other, KVPages.empty(4 * num_seqs, 8, 128, num_seqs, 4), return_lse=True)
    rows["other sizes"] = {"ordinary": len(launches) - before, "launches": MADE.value - earlier}
    return rows


def prompted(launches: list) -> dict:
    """Results of a new cache and its first append, after `attended`, on the same CPU."""
    append.page_kernel = stand_in(append.page_kernel)
    append.machine = lambda device: TARGETS["sm_90"]
    (ctypes.c_int * 128).in_dll(STUB, "stub_sizes")[0] = 0
    k, v = (torch.zeros(600, 8, 128, dtype=torch.bfloat16) for _ in "kv")
    rows = {}
    for name, num_pages in (("grows", None), ("fixed", 8)):

        def call(num_pages=num_pages):
            PagedKVCache(8, 128, num_seqs=2, num_pages=num_pages).append(0, k, v)

        call()
        before, earlier = len(launches), MADE.value
        call()
        row = {"ordinary": len(launches) - before, "launches": MADE.value - earlier}
        with Made() as tensors:
            call()
        rows[name] = row | {"calls": called(call), "tensors": tensors.count}
    return rows


def dense(launches: list) -> dict:
    """Results of dense calls, after `prompted`, on the same CPU."""
    sdpa.find = _torch_ops.find
    q = torch.zeros(1, 1, 256, 128, dtype=torch.bfloat16)
    rows = {}
    for name, function, context in (
        ("own", scaled_dot_product_attention, contextlib.nullcontext()),
        (
            "in a context",
            torch.nn.functional.scaled_dot_product_attention,
            fp8_attention(AttentionPolicy(min_length=0)),
        ),
    ):
        call = partial(function, q, q, q)
        with context:
            call()
            before, earlier = len(launches), MADE.value
            call()
            row = {"ordinary": len(launches) - before, "launches": MADE.value - earlier}
            rows[name] = row | {"calls": called(call)}
    return rows


def warmed() -> dict:
    """Results of launches whose kernels `warmup` has compiled, after `prompted`. The kernels are in Triton's cache on
    disk, and none is in memory."""
    machine.plan_for(TARGETS["sm_90"])
    compiled_as, answers = [], []
    layer = Layer(
        12, 6, 64, dtype=torch.float16, key_dtype="e4m3", k_mean=True, attention=frozenset({"sinks"})
    )  # as no other call here
    calls = [
        lambda: attend(layer, 2, 3, 1), lambda: attend(layer, 33, 3, 1, leftpad=True, ragged=50),
        lambda: attend(layer, 1, 256, 0), lambda: attend(layer, 1, 128, 64),
        lambda: from_dense(layer, 300), lambda: from_dense(replace(layer, k_mean=False), 300),
    ]  # fmt: skip
    with recording(dry=True) as launches:
        for call in calls:
            call()
    for made in launches:
        program = compile.compiled(made.kernel, made.args, made.constants)
        compile.build_launcher(program)
        compiled_as.append(program.hash)
    folders = set(os.listdir(knobs.cache.dir))
    knobs.compilation.listener = lambda **noted: answers.append([noted["metadata"]["hash"], noted["cache_hit"]])
    empty = torch.empty
    on_cpu = patch.object(torch, "empty", lambda *shape, **options: empty(*shape, **{**options, "device": "cpu"}))
    hopper = [patch.object(module, "machine", lambda device: TARGETS["sm_90"]) for module in (append, combine)]
    with on_cpu, hopper[0], hopper[1]:
        for call in calls:
            call()
    knobs.compilation.listener = None
    return {"compiled": compiled_as, "looked up": answers, "new": sorted(set(os.listdir(knobs.cache.dir)) - folders)}


def planned() -> dict:
    """The launches of calls that differ in one thing: first each with its own plan, then with the plans of all the
    others in the cache.
    """
    launches = []

    def plain(x: Any) -> Any:
        x = x.view.__dict__ if isinstance(x, Tiles) else x.dtype if isinstance(x, torch.Tensor) else x
        return repr(x) if not isinstance(x, Counters) else "counter"

    def noting(kernel, grid, args, given) -> None:
        launches.append([kernel.__name__, *grid, *map(plain, args), repr(sorted(given.items()))])

    prefill.launch = combine.launch = noting
    plain_params = AttentionParams(cu_seqlens_q=None, max_seqlen_q=64, causal=True, softmax_scale=0.1, return_lse=True)
    q, pages = torch.zeros(128, 8, 128, dtype=torch.bfloat16), KVPages.empty(64, 2, 128, 2, 32)
    table, wide = pages.page_table, torch.zeros(2, 64, dtype=torch.int32)
    off = torch.zeros(128, 8, 129, dtype=torch.bfloat16)[..., 1:]
    dense = q.unflatten(0, (2, 64))
    cases = {
        "plain": {}, "heads first": {"q": torch.zeros(8, 128, 128, dtype=torch.bfloat16).transpose(0, 1)},
        "misaligned": {"q": off},
        "dense": {"q": dense}, "dense, heads first": {"q": torch.zeros(2, 8, 64, 128, dtype=torch.bfloat16).transpose(1,
        2)},
        "more queries": {"q": torch.zeros(256, 8, 128, dtype=torch.bfloat16), "max_seqlen_q": 128},
        "fewer KV heads": {"pages": KVPages.empty(64, 1, 128, 2, 32)},
        "more pages": {"pages": KVPages.empty(65, 2, 128, 2, 32)},
        "table's width": {"pages": replace(pages, page_table=wide)},
        "table's stride": {"pages": replace(pages, page_table=wide[:, :32])},
        "not in parts": {"pages": replace(pages, page_table=table[:, :8])},
        "no LSE": {"pages": replace(pages, page_table=table[:, :8]), "return_lse": False},
        "ragged": {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)},
        "longest": {"cu_seqlens_q": torch.zeros(3), "max_seqlen_q": 5000},
        "full": {"causal": False}, "window": {"window": 1}, "wider window": {"window": 3000},
        "softcap": {"softcap": 5.0},
        "scale": {"softmax_scale": 0.2}, "sinks": {"sinks": torch.zeros(8)},
        "leftpad": {"leftpad_k": torch.zeros(2, dtype=torch.int32)},
    }  # fmt: skip

    def launched(name: str) -> list:
        launches.clear()
        given = {"q": q, "pages": pages} | cases[name]
        prefill.prefill_attention(given.pop("q"), given.pop("pages"), plain_params._replace(**given))
        return list(launches)

    rows = {}
    for name in cases:
        for kept in (prefill.plan.make_prefill_plan, combine._plan):
            kept.cache_clear()
        rows[name] = {"alone": launched(name)}
    for name in 2 * [*cases]:
        rows[name]["among others"] = launched(name)
    return rows


def main() -> None:
    triton.runtime.driver.set_active(Driver())
    torch.accelerator.device_index = lambda index: contextlib.nullcontext()
    ordinary = []
    compiled = {}
    run = triton.JITFunction.run

    def counted(self, *args, **options):
        ordinary.append(1)
        compiled["last"] = run(self, *args, **options)
        return compiled["last"]

    triton.JITFunction.run = counted
    pool = torch.zeros(4, 2, 128, 64, dtype=torch.uint8).view(FP8)
    x, y = torch.zeros(256), torch.zeros(256)

    def arguments(**changed) -> list:
        given = {
            "x": x, "stride": 16, "k": Tiles(pool, ROWS), "absent": None,
            "v": Tiles(pool, View((512, 128), (128, 1), (64, 128), swizzled=False)), "y": y, "count": 77, "scale": 0.5,
        }  # fmt: skip
        return list((given | changed).values())

    def done(constants: Constants, args: list) -> dict:
        before = len(ordinary)
        launch(kernel, (3, 2), args, constants)
        return noted(compiled["last"]) | {"ordinary": len(ordinary) > before}

    constants = Constants(DEVICE, D=128, FLAG=True, num_warps=4)
    launch(kernel, (3, 2), arguments(), constants)
    expect(compiled["last"])
    twin = Tiles(pool.clone(), ROWS)
    fresh = {"x": torch.ones(256), "y": torch.ones(256), "stride": 32, "count": 1, "scale": 2.0, "k": twin}
    same = {"again": arguments(), "others of a kind": arguments(**fresh)}
    others = {
        "dtype": arguments(x=x.half()),
        "address": arguments(x=x[1:]),
        "stride": arguments(stride=3),
        "stride 1": arguments(stride=1),
        "wide stride": arguments(stride=2**32),
        "present": arguments(absent=y),
        "wide number": arguments(count=2**32),
        "integer for a float": arguments(scale=2),
        "float for an integer": arguments(count=77.0),
        "block": arguments(k=Tiles(pool, replace(ROWS, block=(64, 64)))),
        "swizzle": arguments(k=Tiles(pool, replace(ROWS, swizzled=False))),
    }
    rows = {}
    for name, args in (same | others).items():
        direct = done(constants, args)
        rows[name] = {"direct": direct, "ordinary": done(Constants(DEVICE, **constants), args)}
    early = {**constants, "launch_pdl": True}
    early_constants = Constants(DEVICE, **early)
    launch(kernel, (3, 2), same["again"], early_constants)
    rows["begins early"] = {
        "direct": done(early_constants, same["again"]), "ordinary": done(Constants(DEVICE, **early), same["again"])
    }  # fmt: skip
    again = done(constants, others["dtype"])
    rows["dtype again"] = {"direct": again, "ordinary": rows["dtype"]["ordinary"]}
    rows["watched"] = watched(lambda: done(constants, same["again"]))
    number = len(constants.compiled)
    rows["refused"] = refused(lambda: launch(kernel, (3, 2), same["again"], constants))
    rows["refused"]["learned"] = len(constants.compiled) - number
    earlier = MADE.value
    launch(kernel, (0, 2), same["again"], constants)
    rows["no programs"] = MADE.value - earlier
    with recording() as notes:
        done(constants, same["again"])
    with recording(dry=True) as dry:
        earlier = len(ordinary)
        launch(kernel, (3, 2), same["again"], Constants(DEVICE, **constants))
    rows["recorded"] = {
        "compiled": [note.compiled is constants.compiled[0].program for note in notes],
        "dry": [note.compiled for note in dry],
        "equal": notes[0][:3] == dry[0][:3], "made": len(ordinary) - earlier,
    }  # fmt: skip
    rows["attended"] = attended(ordinary, compiled)
    rows["prompted"] = prompted(ordinary)
    rows["dense"] = dense(ordinary)
    rows["warmed"] = warmed()
    rows["planned"] = planned()
    print(
        json.dumps(
            {
                "same": [*same, "begins early"],
                "others": list(others),
                "learned": len(constants.compiled) > 0,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
