"""The peers, as callables: FlashAttention-3 and vLLM's build of it, cuDNN's FP8 graph, torch's cuDNN attention, torchao's FP8 attention.

Binaries come from `.peers/` (`make peers`). What is not there, or cannot do a case, is left out with the reason printed. Scales are one:
FP8 data of spread one needs no others.

| name | is | accumulates FP8 products |
|---|---|---|
| `fa3-fp8`, `fa3-bf16` | FlashAttention-3 (`fa3-fwd`), the kernel behind PyTorch's quantized SDPA | in the tensor core |
| `vllm-fa3-fp8`, `vllm-fa3-bf16` | vLLM's FlashAttention-3 | in two levels |
| `cudnn-fp8` | cuDNN's FP8 graph; its output is FP8 too | in the tensor core |
| `cudnn-bf16` | `scaled_dot_product_attention` by cuDNN | |
| `torchao` | torchao's FP8 attention over `fa3-fp8`'s kernel: BF16 in and out, quantization included | in the tensor core |
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import lzma
import os
import sys
import types
import zipfile
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fp8attn.kernels import fa3 as fa3_builds
from fp8attn.layout import FP8

from .get_peers import FOLDER
from .measure import left_out
from .problem import DEVICE, Run, Shape, offsets

UNPACKED = Path("/tmp/fp8attn-peers")


@lru_cache
def available() -> frozenset[str]:
    """Which of `fa3`, `vllm-fa3`, `cudnn` and `torchao` load here; why another does not is printed once."""
    found = {"fa3": _library("fa3_fwd"), "vllm-fa3": _library("vllm_fa3"), "cudnn": _wheel("cudnn", "nvidia_cudnn_frontend")}
    found["torchao"] = found["fa3"] or _wheel("torchao", "torchao") or _activate_fa3()
    for name, problem in found.items():
        if problem:
            print(f"without {name}, which `make peers` collects: {problem}", flush=True)
    return frozenset(name for name, problem in found.items() if problem is None)


def _library(name: str) -> str | None:
    """Load a library of torch ops; the reason if that fails."""
    try:
        torch.ops.load_library(
            unpacked(f"{name}.so", lambda path: path.write_bytes(lzma.decompress((FOLDER / f"{name}.so.xz").read_bytes())))
        )
    except OSError as problem:
        return str(problem)
    return None


def _wheel(module: str, name: str) -> str | None:
    """Import a module, from its wheel if it is not installed; the reason if that fails."""
    if wheels := sorted(FOLDER.glob(f"{name}-*.whl")):
        sys.path.append(str(unpacked(wheels[-1].stem, lambda path: zipfile.ZipFile(wheels[-1]).extractall(path))))
    try:
        importlib.import_module(module)
    except ImportError as problem:
        return str(problem)
    return None


def unpacked(name: str, unpack: Callable[[Path], object]) -> Path:
    """A file or folder of `UNPACKED`, which `unpack` writes once: it is complete or not there, however many processes unpack it."""
    UNPACKED.mkdir(exist_ok=True)
    path = UNPACKED / name
    if not path.exists():
        unfinished = UNPACKED / f"{name}.{os.getpid()}"
        unpack(unfinished)
        with contextlib.suppress(OSError):  # another process was first
            unfinished.rename(path)
    return path


_registered: list[torch.library.Library] = []


def _activate_fa3() -> str | None:
    """Make FlashAttention-3 torch's flash backend, for the whole process, as torchao asks of its users; the reason if that fails.

    torch looks for the package `flash_attn_interface` and calls `flash_attn_3::fwd`, which is `fa3_fwd::fwd` by another name.
    """
    try:
        schema = str(torch.ops.fa3_fwd.fwd.default._schema).split("::", 1)[1]
        library = torch.library.Library("flash_attn_3", "FRAGMENT")
        library.define(schema)
        library.define("bwd(Tensor x) -> Tensor")
        library.impl("fwd", lambda *args, **kwargs: torch.ops.fa3_fwd.fwd(*args, **kwargs), "CUDA")
        _registered.append(library)
        stand_in = types.ModuleType("flash_attn_interface")
        stand_in.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
        sys.modules["flash_attn_interface"] = stand_in
        torch.nn.attention.activate_flash_attention_impl("FA3")
        from torchao.prototype.attention.fp8_fa3.attention import fp8_fa3_sdpa  # noqa: F401
    except Exception as problem:
        return f"{type(problem).__name__}: {problem}"
    return None


def _forward(build: str, shape: Shape | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given) -> Callable[[], torch.Tensor]:
    """A call of a FlashAttention-3 by the names in its schema; scales are one in FP8.

    `shape`: of a prompt, whose keys one CTA reads; None: the build chooses how many CTAs read the keys.
    """
    found = fa3_builds.find({"fa3": "fa3_fwd_interface", "vllm": "vllm"}[build])
    args = list(found.neutral)
    if q.dtype == FP8:
        kv_heads, num_seqs = k.shape[-2], len(given["cu_seqlens_q"]) - 1 if "cu_seqlens_q" in given else len(q)
        given |= {f"{name}_descale": _ones(num_seqs, kv_heads) for name in "qkv"}
    given |= {"q": q, "k": k, "v": v, "softmax_scale": shape.softmax_scale if shape else q.shape[-1] ** -0.5}
    given["num_splits"] = 0 if shape is None or max(shape.queries) <= 16 else 1
    for name, x in given.items():
        args[found.positions[name]] = x
    return lambda: found.op(*args)[0]


def fa3(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """FlashAttention-3's forward.

    Args:
        q: `[T, num_q_heads, head_dim]`; k, v: `[tokens, num_kv_heads, head_dim]`; float8_e4m3fn or 16 bits.
    """
    lengths = {}
    if shape.uniform:
        q, k, v = (x.unflatten(0, (len(shape.keys), -1)) for x in (q, k, v))
    else:
        lengths = {"cu_seqlens_q": offsets(shape.queries), "cu_seqlens_k": offsets(shape.keys)}
        lengths |= {"max_seqlen_q": max(shape.queries), "max_seqlen_k": max(shape.keys)}
    call = _forward("fa3", shape, q, k, v, is_causal=shape.causal, **lengths)
    return lambda: call().reshape(-1, shape.q_heads, shape.dim)


def fa3_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """FlashAttention-3's KV-cache path in 16 bits, causal; `[batch, n, num_q_heads, head_dim]`.

    Args:
        q: `[batch, n, num_q_heads, head_dim]`, the last `n` tokens of each sequence.
        k, v: `[batch, capacity, num_kv_heads, head_dim]`, the last dimension contiguous.
        used: `[batch]` int32, how many of these tokens count.
    """
    return _forward("fa3", None, q, k, v, is_causal=True, seqused_k=used)()


def vllm_fa3(
    shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor | None = None
) -> Callable[[], torch.Tensor]:
    """vLLM's FlashAttention-3.

    Args:
        q: `[T, num_q_heads, head_dim]`.
        k, v: `[tokens, num_kv_heads, head_dim]`, or a cache of equal capacity for every sequence `[batch, capacity, num_kv_heads,
            head_dim]`, or pages `[pages, page_size, num_kv_heads, head_dim]` with their `table`.
        table: `[batch, columns]` int32.
    """
    lengths = {"cu_seqlens_q": offsets(shape.queries), "max_seqlen_q": max(shape.queries)}
    if k.dim() == 3:
        lengths |= {"cu_seqlens_k": offsets(shape.keys), "max_seqlen_k": max(shape.keys)}
    else:
        lengths["seqused_k"] = torch.tensor(shape.keys, dtype=torch.int32, device=DEVICE)
    if table is not None:
        lengths |= {"page_table": table, "max_seqlen_k": table.shape[1] * k.shape[1]}
    call = _forward("vllm", shape, q, k, v, is_causal=shape.causal, **lengths)
    return lambda: call().reshape(-1, shape.q_heads, shape.dim)


def vllm_cache(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor, used: torch.Tensor) -> torch.Tensor:
    """vLLM's paged path in FP8, causal, all on the device; `[batch, n, num_q_heads, head_dim]` bfloat16.

    Args:
        q: `[batch, n, num_q_heads, head_dim]`, the last `n` tokens of each sequence.
        k, v: `[pages, page_size, num_kv_heads, head_dim]`.
        table: `[batch, columns]` int32.
        used: `[batch]` int32, tokens of each sequence.
    """
    batch, n = q.shape[:2]
    lengths = {"cu_seqlens_q": _bounds(batch, n), "max_seqlen_q": n, "max_seqlen_k": table.shape[1] * k.shape[1]}
    out = _forward("vllm", None, q.flatten(0, 1), k, v, is_causal=True, page_table=table, seqused_k=used, **lengths)()
    return out.view(batch, n, *q.shape[2:])


@lru_cache
def _ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=DEVICE)


@lru_cache
def _bounds(batch: int, queries: int) -> torch.Tensor:
    return offsets((queries,) * batch)


def cudnn_fp8(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """cuDNN's FP8 attention over `[tokens, heads, head_dim]` of equal lengths; FP8 out.

    Raises:
        Exception: of a type of cuDNN's own, if it has no plan for this.
    """
    q, k, v = _dense(shape, q, k, v)
    graph, handle, inputs, output, ones, amaxes = _cudnn_graph(*(x for t in (q, k, v) for x in (t.shape, t.stride())), shape.causal)
    out = torch.empty_like(q)
    workspace = torch.empty(max(1, graph.get_workspace_size()), device=DEVICE, dtype=torch.uint8)
    one, *amax = (torch.ones(1, device=DEVICE) for _ in range(3))
    tensors = dict(zip((*inputs, output, *amaxes), (q, k, v, out, *amax), strict=True)) | dict.fromkeys(ones, one)
    buffers = {tensor: x.data_ptr() for tensor, x in tensors.items()}

    def call() -> torch.Tensor:
        graph.execute(buffers, workspace, handle=handle)
        return out.transpose(1, 2).reshape(-1, shape.q_heads, shape.dim)

    call.tensors = tensors  # pointers keep nothing alive
    return call


@lru_cache
def _cudnn_graph(q_shape, q_stride, k_shape, k_stride, v_shape, v_stride, causal: bool):
    """A built plan, for any data of these shapes: (graph, handle, inputs, output, scales that are one, what it writes besides)."""
    import cudnn

    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    fp8, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    graph = cudnn.pygraph(io_data_type=fp8, intermediate_data_type=fp32, compute_data_type=fp32, handle=handle)
    shapes = ("q", q_shape, q_stride), ("k", k_shape, k_stride), ("v", v_shape, v_stride)
    inputs = [graph.tensor(name=name, dim=list(shape), stride=list(stride), data_type=fp8) for name, shape, stride in shapes]
    names = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
    scales = {name: graph.tensor(name=name, dim=[1] * 4, stride=[1] * 4, data_type=fp32) for name in names}
    output, _, *amaxes = graph.sdpa_fp8(
        **dict(zip("qkv", inputs, strict=True)), **scales, is_inference=True, attn_scale=q_shape[-1] ** -0.5, use_causal_mask=causal
    )
    output.set_output(True).set_dim(list(q_shape)).set_stride(list(q_stride))
    for amax in amaxes:
        amax.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A])
    graph.check_support()
    graph.build_plans()
    return graph, handle, inputs, output, tuple(scales.values()), amaxes


def cudnn_bf16(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """torch's attention by cuDNN over `[tokens, heads, head_dim]` of equal lengths."""
    q, k, v = _dense(shape, q, k, v)

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.q_heads != shape.kv_heads)
        return out.transpose(1, 2).reshape(-1, shape.q_heads, shape.dim)

    return call


def torchao(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable[[], torch.Tensor]:
    """torchao's attention over `[tokens, heads, head_dim]` of equal lengths in BF16."""
    from torchao.prototype.attention.fp8_fa3.attention import fp8_fa3_sdpa

    q, k, v = _dense(shape, q, k, v)
    return lambda: fp8_fa3_sdpa(q, k, v, is_causal=shape.causal).transpose(1, 2).reshape(-1, shape.q_heads, shape.dim)


KERNELS = ("fa3-fp8", "cudnn-fp8", "vllm-fa3-fp8", "fa3-bf16", "cudnn-bf16")  # torchao is no kernel: it quantizes too
PEERS = {  # name: (what it needs, its callable, whether it takes FP8, and dense batches alone)
    "fa3-fp8": ("fa3", fa3, True, False),
    "cudnn-fp8": ("cudnn", cudnn_fp8, True, True),
    "vllm-fa3-fp8": ("vllm-fa3", vllm_fa3, True, False),
    "fa3-bf16": ("fa3", fa3, False, False),
    "cudnn-bf16": (None, cudnn_bf16, False, True),
    "torchao": ("torchao", torchao, False, True),
}


def runs(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, names: Iterable[str] = KERNELS) -> dict[str, Run]:
    """Those peers that are here and take such a problem, over one `q`, `k` and `v` in BF16 that each gets in its own dtype."""
    found = {}
    low = [x.to(FP8) for x in (q, k, v)] if any(PEERS[name][2] for name in names) else []
    for name in names:
        need, make, fp8, dense = PEERS[name]
        if need is not None and need not in available():
            continue
        if dense and not shape.uniform:
            left_out(name, "no ragged batches")
            continue
        if dense and shape.causal and shape.queries != shape.keys:
            left_out(name, "its causal mask is aligned to the start")
            continue
        given = low if fp8 else [q, k, v]
        try:
            found[name] = Run(make(shape, *given), given[0], partial(_held, shape, *given[1:]))
        except Exception as problem:  # cuDNN's graphs raise types of their own
            left_out(name, problem)
    return found


def _dense(shape: Shape, *xs: torch.Tensor) -> list[torch.Tensor]:
    """`[tokens, heads, head_dim]` of equal lengths as `[batch, heads, length, head_dim]`."""
    return [x.unflatten(0, (len(shape.keys), -1)).transpose(1, 2) for x in xs]


def _held(shape: Shape, k: torch.Tensor, v: torch.Tensor, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
    return k.split(shape.keys)[seq], v.split(shape.keys)[seq]
