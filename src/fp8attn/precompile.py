"""Compiles every kernel that a model can use, before it serves: `warmup`, and the command `fp8attn warmup`.

Triton compiles a kernel when it is first launched with arguments of new types or constants. `warmup` runs the package's own functions on
tensors without memory (the device "meta"), for a grid of prompts, chunks, steps and batches. Launches are recorded and not run. Several
processes then compile each different kernel once. Triton's cache on disk (`TRITON_CACHE_DIR`) keeps the results. The first call in any
process then loads its kernel from there and compiles nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import torch

from .backends import load, select_backend
from .errors import UsageError
from .kernels.machine import Machine, machine, plan_for
from .layout import DEFAULT_KEY_DTYPE, HEAD_DIMS, PAGE_SIZE, KeyDtype, KVPages, key_type, page_bytes
from .params import AttentionParams, BackendName

if TYPE_CHECKING:
    from .kernels.launch import Launch

# The properties of a GPU that plans use, for targets that are compiled for without a GPU.
TARGETS = {
    "sm_80": Machine(108, 166912, False),
    "sm_86": Machine(84, 101376, False),
    "sm_89": Machine(142, 101376, True),
    "sm_90": Machine(132, 232448, True, hopper=True),
    "sm_100": Machine(148, 232448, True),
    "sm_120": Machine(188, 101376, True),
}
AttentionOption = Literal["window", "softcap", "sinks", "exact"]
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}

# The grid: new tokens of a sequence, sequences, and pages before the new tokens. `_calls` combines them.
STEPS = range(1, 17)
PROMPTS = (
    17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 193, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
)  # fmt: skip
BATCHES = 1, 2, 4, 8, 64
HELD = 0, 8, 64, 512
MOST = 1 << 17  # new tokens of a call
WINDOWS = 128, 1024, 4096  # tokens

SERVE = f"from {__name__} import serve; serve()"  # the program of the process that compiles
SLOWEST_FIRST = "prefill", "append", "decode", "portable"  # parts of `kernels`, then the others


@dataclass(frozen=True)
class Layer:
    """The properties of an attention layer and its cache that determine the kernels.

    Attributes:
        num_q_heads, num_kv_heads, head_dim: the layer's shape.
        dtype: the dtype of queries, keys and values: `"bfloat16"` or `"float16"`.
        backend: `"hopper"` or `"triton"`.
        key_dtype, rotate_keys: as `PagedKVCache` takes them.
        k_mean, v_mean: whether there are static means.
        static_scales: whether scales are calibrated.
        advance: whether appends advance the lengths, as `fp8attn.append` takes it.
        overflows: whether appends count overflows.
        window, softcap, sinks: whether attention has them.
        exact: whether attention is exact (`AttentionParams.exact`).
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    backend: BackendName = "hopper"
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE
    rotate_keys: bool = True
    k_mean: bool = False
    v_mean: bool = False
    static_scales: bool = False
    advance: bool = True
    overflows: bool = False
    window: bool = False
    softcap: bool = False
    sinks: bool = False
    exact: bool = False

    def __post_init__(self) -> None:
        if self.head_dim not in HEAD_DIMS or self.num_kv_heads < 1 or self.num_q_heads < 1 or self.num_q_heads % self.num_kv_heads:
            raise UsageError(
                f"num_q_heads must be a multiple of num_kv_heads, and head_dim one of {HEAD_DIMS}; "
                f"got {self.num_q_heads}, {self.num_kv_heads}, {self.head_dim}"
            )
        key_type(self.key_dtype)  # raises ValueError


class Kernel(NamedTuple):
    """A kernel that `warmup` compiled, or found in Triton's cache.

    Attributes:
        name: the name of its function.
        seconds: compile time in seconds, on one core.
    """

    name: str
    seconds: float


def warmup(
    config: Any = None,
    *,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    backend: BackendName = "auto",
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    means: bool = False,
    static_scales: bool = False,
    advance: bool = True,
    overflows: bool = False,
    attention: Collection[AttentionOption] = (),
    target: str | None = None,
    load_kernels: bool = False,
    processes: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Kernel]:
    """Compile all kernels that a model's attention layers and their caches use, in parallel, into Triton's cache on disk.

    Kernels are compiled for:

    - prompts of 1 to 32,768 tokens, whole or in chunks;
    - decode and verification steps of 1 to 16 tokens;
    - batches of up to 64 sequences of equal lengths, with padding on the left, or of different lengths (`cu_seqlens_q`);
    - the appends of `FP8Cache` for all of these;
    - dense calls (`scaled_dot_product_attention`, `fp8_attention`), if there are no softcap, sinks or calibrated scales.

    Kernels are not compiled for calls that return the LSE, that pass tables of RoPE, or that have few queries and are not causal. Such a
    call works, and compiles its kernel when it runs.

    `warmup` uses no memory of the GPU and runs nothing on it. Kernels that are in Triton's cache already take milliseconds. Any process,
    also this one, loads the kernels from the cache when it first launches them.

    Args:
        config: a transformers config, which has the shape, softcap and sinks. None: give the shape.
        num_q_heads, num_kv_heads, head_dim: the shape of a layer, if there is no config.
        device: the GPU to compile for.
        dtype: the model's dtype, bfloat16 or float16.
        backend: `"auto"`, `"hopper"` or `"triton"`, as in the calls.
        key_dtype, rotate_keys: the options of the cache (`PagedKVCache`).
        means: also compile for static means of K, of V and of both (`FP8Cache.for_model`), four times as many kernels.
        static_scales: compile for calibrated scales and their means (`scales=` of a cache), and not for the pages' own scales.
        advance: False: compile the appends of an engine that keeps the lengths itself (`fp8attn.append(advance=False)`), and not those of
            `FP8Cache`. Attention has the same kernels, with and without `out`.
        overflows: compile the appends that count overflows (`count_overflows=True` of a cache), and not the others.
        attention: what attention has, besides what `config` says: `"window"` (these kernels, too; sliding layers of an `FP8Cache` are in 16
            bits and do not use them), `"softcap"`, `"sinks"`, `"exact"` (instead of attention that is not exact).
        target: an architecture to compile for without a GPU, such as `"sm_90"`. The folder of Triton's cache can then be copied to a
            machine with the same versions of Triton and of this package. (Triton 3.6 also builds a small C function for each kernel at its
            first launch, which needs the GPU's driver.)
        load_kernels: also load the kernels in this process, so that no later call reads them from disk. Needs the GPU.
        processes: number of processes that compile in parallel. Default: one for each core that this process may use.
        progress: called with (kernels done, number of kernels).
    Returns:
        The kernels.
    Raises:
        TypeError: `config` is not the config of a model.
        UsageError: the shape is missing, or there are no kernels for the device, target, dtype or shape.
        RuntimeError: a kernel did not compile; the message is the compiler's.
    """
    given = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    given = {name: value for name, value in given.items() if value is not None}
    if len(given) != (3 if config is None else 0):
        raise UsageError(f"give a transformers config, or all of num_q_heads, num_kv_heads and head_dim; got {given or 'neither'}")
    if config is not None:
        (num_q_heads, num_kv_heads, head_dim), has_softcap, has_sinks = _read(config)
        attention = [*attention, *(("softcap",) if has_softcap else ()), *(("sinks",) if has_sinks else ())]
    assert num_q_heads is not None and num_kv_heads is not None and head_dim is not None
    if unknown := sorted({*attention} - {*get_args(AttentionOption)}):
        raise UsageError(f"attention may have {', '.join(get_args(AttentionOption))}; got {', '.join(unknown)}")
    if load_kernels and target is not None:
        raise UsageError(f"kernels for another GPU cannot be loaded here: leave out load_kernels or target={target!r}")
    names = {value: name for name, value in DTYPES.items()}
    if dtype not in names:
        raise UsageError(f"the kernels take bfloat16 and float16, not {dtype}: pass the dtype that the model runs in")
    with _compiler() as process:  # it imports modules while this process queries the GPU
        backend, triton_target, numbers = _aim(device, dtype, backend, target)
        layer = Layer(
            num_q_heads, num_kv_heads, head_dim, dtype=names[dtype], backend=backend, key_dtype=key_dtype, rotate_keys=rotate_keys,
            static_scales=static_scales, advance=advance, overflows=overflows, softcap="softcap" in attention,
            sinks="sinks" in attention, exact="exact" in attention,
        )  # fmt: skip
        of_k_and_v = [(True, True)] if static_scales else [(False, False), (False, True), (True, False), (True, True)]
        layers = [
            asdict(replace(layer, k_mean=k_mean, v_mean=v_mean, window=windowed))
            for k_mean, v_mean in (of_k_and_v if means else of_k_and_v[:1])
            for windowed in ((False, True) if "window" in attention else (False,))
        ]
        assert process.stdin is not None and process.stdout is not None
        request = {"layers": layers, "target": triton_target, "machine": numbers, "processes": processes or _cores()}
        json.dump(request | {"ptxas": _ptxas_version(triton_target)}, process.stdin)
        process.stdin.close()
        kernels: list[Kernel] = []
        for line in process.stdout:
            total, *kernel = json.loads(line)
            if kernel:
                kernels.append(Kernel(*kernel))
            if progress is not None:
                progress(len(kernels), total)
    if load_kernels:
        _load(layers, machine(_indexed(device)))
    return kernels


def _ptxas_version(triton_target: tuple[Any, ...]) -> str:
    """`compile.ptxas_version`; for the arguments of a `GPUTarget`."""
    from triton.backends.compiler import GPUTarget

    from .kernels.compile import ptxas_version

    return ptxas_version(GPUTarget(*triton_target))


def _load(layers: list[dict[str, Any]], of: Machine) -> None:
    """Load the kernels of these layers, which are in Triton's cache on disk, on the current device."""
    from .kernels.compile import loaded

    plan_for(of)
    for layer in layers:
        for made in launches(Layer(**layer)).values():
            loaded(made.kernel, made.args, made.given)


def _read(config: Any) -> tuple[tuple[int, int, int], bool, bool]:
    """From a transformers config: `(num_q_heads, num_kv_heads, head_dim)` of its 8-bit layers, whether they have a softcap, and sinks."""
    from .integrations.transformers.config import FULL, has_sinks, has_softcap, layers_of, shape_of

    shape = shape_of(config)
    num_q_heads = next(layer.num_q_heads for layer in layers_of(config) if layer.kind == FULL)
    return (num_q_heads, shape.num_kv_heads, shape.head_dim), has_softcap(config), has_sinks(config)


def _aim(
    device: torch.device | str, dtype: torch.dtype, backend: BackendName, target: str | None
) -> tuple[BackendName, tuple[Any, ...], Machine]:
    """The backend, the arguments of Triton's `GPUTarget`, and the properties of the machine that plans use."""
    if target is not None:
        if target not in TARGETS:
            raise UsageError(f"target must be one of {', '.join(TARGETS)}; got {target!r}")
        if backend == "auto":
            backend = "hopper" if target == "sm_90" else "triton"
        if backend not in ("hopper", "triton") or (backend == "hopper" and target != "sm_90"):
            raise UsageError(f"backend {backend!r} has no kernels for {target}; use 'auto'")
        return backend, ("cuda", int(target.removeprefix("sm_")), 32), TARGETS[target]
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        found = f"{device} is not a GPU" if device.type != "cuda" else "PyTorch finds no GPU"
        raise UsageError(
            f"warmup compiles for a GPU, and {found}. Run it on the machine that will serve, or name the architecture to compile for: "
            "target='sm_90'"
        )
    device = _indexed(device)
    backend = select_backend(backend, device, dtype)
    if backend == "reference":
        raise UsageError("the backend 'reference' has no kernels to compile; use 'auto'")
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return backend, ("cuda", 10 * major + minor, 32), machine(device)
    properties = torch.cuda.get_device_properties(device)
    return backend, ("hip", properties.gcnArchName.split(":")[0], properties.warp_size), machine(device)


def _indexed(device: torch.device | str) -> torch.device:
    """A GPU's device with its index."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _compiler() -> Iterator[subprocess.Popen[str]]:
    """A process that runs `serve`. It does not initialize CUDA, so it can fork. Plans for the device "meta" stay out of this process."""
    path = os.pathsep.join(os.path.abspath(folder) for folder in sys.path)
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": path}
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], env=environment, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        except BrokenPipeError:  # the process has ended
            process.stdin = None
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)  # including the processes that it has forked
            raise
    if process.returncode:
        raise RuntimeError(f"the process that compiles ended with exit code {process.returncode}; its message is above")


# In the other process

_todo: tuple[list[Launch], Any]  # kernels and the target; processes inherit it, because kernels cannot be pickled


def serve() -> None:
    """Read a request of `warmup`, compile, and write a line for each kernel: how many there are, its name and its seconds."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other prints must not mix with the answers
    from triton.backends.compiler import GPUTarget

    from .kernels import append, compile, portable  # noqa: F401 - while the other process queries the GPU

    request = json.load(sys.stdin)
    target = GPUTarget(*request["target"])
    compile.use_ptxas(target, request["ptxas"])
    plan_for(Machine(*request["machine"]))
    found: dict[tuple, Launch] = {}
    for layer in request["layers"]:
        found |= launches(Layer(**layer))
    names = [made.kernel.fn.__name__ for made in found.values()]
    parts = [made.kernel.fn.__module__.removeprefix(f"{__package__}.kernels.").split(".")[0] for made in found.values()]
    order = sorted(range(len(names)), key=lambda i: SLOWEST_FIRST.index(parts[i]) if parts[i] in SLOWEST_FIRST else len(SLOWEST_FIRST))
    print(json.dumps([len(names)]), file=lines, flush=True)
    global _todo
    _todo = list(found.values()), target
    with ProcessPoolExecutor(request["processes"], mp_context=get_context("fork")) as pool:
        jobs = {pool.submit(_compile, i): names[i] for i in order}
        prepared = pool.submit(_prepare)
        try:
            for job in as_completed(jobs):
                print(json.dumps([len(names), jobs[job], job.result()]), file=lines, flush=True)
            prepared.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _compile(number: int) -> float:
    """Compile a kernel, and return the compile time in seconds."""
    from .kernels.compile import build_launcher, compiled

    begun = time.perf_counter()
    kernels, target = _todo
    made = kernels[number]
    build_launcher(compiled(made.kernel, made.args, made.given, target))
    return time.perf_counter() - begun


def _prepare() -> None:
    from .kernels.compile import build_driver

    build_driver(_todo[1])


def launches(layer: Layer) -> dict[tuple, Launch]:
    """One launch of each kernel that the layer's calls of the grid use, by its specialization, on the machine of `plan_for`."""
    from .kernels.compile import specialization
    from .kernels.launch import recording

    found: dict[tuple, Launch] = {}
    with recording(dry=True) as made:
        for call in _calls(layer):
            call()
            for launch in made:
                found.setdefault(specialization(launch), launch)
            made.clear()
    return found


def _calls(layer: Layer) -> Iterator[Callable[[], None]]:
    """The layer's calls of the grid."""
    # With few rows, the kernel depends on the exact number of tokens and on whether there are many sequences, but not on the pages.
    most_few = 128 * layer.num_kv_heads // layer.num_q_heads if layer.backend == "hopper" else 0
    for tokens in sorted({*STEPS, *range(1, most_few + 1), *PROMPTS}):
        few = tokens <= most_few
        for batch in (BATCHES[0], BATCHES[-1]) if few else BATCHES:
            if batch * tokens > MOST:
                break
            for held in HELD[:1] if few else HELD:
                yield partial(_attend, layer, batch, tokens, held)
                yield partial(_attend, layer, batch, tokens, held, leftpad=True)
                for ragged in {batch * tokens, tokens + batch - 1}:
                    yield partial(_attend, layer, batch, tokens, held, ragged=ragged)
            if not few or tokens == 1:
                yield partial(_attend, layer, batch, tokens, 0, causal=False)
            for causal in (True, False):
                yield partial(_attend_new, layer, batch, tokens, causal)
        for ragged in (False, True):
            yield partial(_append, layer, tokens, ragged)
        yield partial(_quantize, layer, tokens)
    # Few points of the grid combine parts of the keys, and the number of parts varies. Each of these kernels compiles in 0.5 s.
    for splits in (1 << bits for bits in range(1, 8)):
        for tokens in (1, 1024):
            yield partial(_combine, layer, splits, tokens)


def _empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def _pages(layer: Layer, batch: int, columns: int) -> KVPages:
    pool = _empty(batch * columns, layer.num_kv_heads, page_bytes(layer.head_dim), dtype=torch.uint8)
    table = _empty(batch, columns, dtype=torch.int32)
    lengths = torch.zeros(batch, dtype=torch.int32)  # `append` adds to them, and torch's `diff` on "meta" takes seconds to import
    return KVPages.trusted(pool, table, lengths, *_means(layer), key_type(layer.key_dtype), layer.rotate_keys)


def _means(layer: Layer) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    mean = _empty(layer.num_kv_heads, layer.head_dim, dtype=torch.float32)
    return mean if layer.k_mean else None, mean if layer.v_mean else None


def _attend(layer: Layer, batch: int, tokens: int, held: int, *, leftpad: bool = False, ragged: int = 0, causal: bool = True) -> None:
    """Attention of `tokens` new tokens of each sequence (of `ragged` tokens in all, if it is not 0) to a cache with older pages."""
    dtype = DTYPES[layer.dtype]
    q = _empty(ragged or batch * tokens, layer.num_q_heads, layer.head_dim, dtype=dtype)
    for window in WINDOWS if layer.window and causal else (0,):
        params = AttentionParams(
            cu_seqlens_q=_empty(batch + 1, dtype=torch.int32) if ragged else None,
            max_seqlen_q=tokens,
            causal=causal,
            softmax_scale=1.0,
            window=window,
            softcap=30.0 if layer.softcap else 0.0,
            sinks=_empty(layer.num_q_heads, dtype=dtype) if layer.sinks else None,
            leftpad_k=_empty(batch, dtype=torch.int32) if leftpad else None,
            exact=layer.exact,
        )
        load(layer.backend).attention(q, _pages(layer, batch, -(-tokens // PAGE_SIZE) + held), params)


def _attend_new(layer: Layer, batch: int, tokens: int, causal: bool) -> None:
    """Attention of a dense call, over pages that it has just written."""
    q = _empty(batch, tokens, layer.num_q_heads, layer.head_dim, dtype=DTYPES[layer.dtype])
    pages = _pages(replace(layer, k_mean=False, v_mean=False), batch, -(-tokens // PAGE_SIZE))
    load(layer.backend).attention(q, pages, AttentionParams(None, tokens, causal, 1.0), new_keys=tokens)


def _append(layer: Layer, tokens: int, ragged: bool) -> None:
    """Append to a cache of two sequences that has tokens."""
    x = _empty(2 * tokens, layer.num_kv_heads, layer.head_dim, dtype=DTYPES[layer.dtype])
    load(layer.backend).append(
        _pages(layer, 2, -(-tokens // PAGE_SIZE) + 1), x, x, q=None, q_out=None,
        cu_seqlens=torch.zeros(3, dtype=torch.int32) if ragged else None, max_seqlen=tokens,
        rope_cos=None, rope_sin=None, rope_interleaved=False, static_scales=layer.static_scales, advance=layer.advance,
        overflows=_empty(2, 3, dtype=torch.int64) if layer.overflows else None,
    )  # fmt: skip


def _quantize(layer: Layer, tokens: int) -> None:
    """Quantize the first tokens of a growing cache, or the keys of a dense call."""
    x = _empty(2, layer.num_kv_heads, tokens, layer.head_dim, dtype=DTYPES[layer.dtype])
    for k_mean, v_mean in (_means(layer), (None, None)):
        load(layer.backend).from_dense(
            x, x, rope_cos=None, rope_sin=None, rope_interleaved=False, k_mean=k_mean, v_mean=v_mean, key_dtype=key_type(layer.key_dtype),
            rotate_keys=layer.rotate_keys,
        )  # fmt: skip


def _combine(layer: Layer, splits: int, tokens: int) -> None:
    """Combine attention over parts of the keys."""
    from .kernels.combine import combine

    rows = tokens * layer.num_q_heads
    # `prefill` passes sinks in float32, the portable kernels in their own dtype.
    sinks = _empty(layer.num_q_heads, dtype=torch.float32 if layer.backend == "hopper" else DTYPES[layer.dtype])
    combine(
        _empty(splits, rows, layer.head_dim, dtype=torch.float32), _empty(2, splits, rows, dtype=torch.float32),
        sinks if layer.sinks else None, _empty(tokens, layer.num_q_heads, layer.head_dim, dtype=DTYPES[layer.dtype]),
        _empty(tokens, layer.num_q_heads, dtype=torch.float32),
    )  # fmt: skip
