"""FlashAttention-4 for Hopper at head_dim 512, with which vLLM serves Gemma 4. It reads pages of 64 tokens in BF16, or
in E4M3, which it dequantizes to FP16 in shared memory. Sums are in FP32.

It is written in CuTe DSL. `make peers` compiles its kernels without a GPU, as vLLM does when it starts, and they are
called with the arguments of `vllm_flash_attn.cute.interface._flash_attn_fwd`, without the DSL. They are for 32 query
heads and 4 KV heads, those of Gemma 4's 31B.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from textwrap import dedent

import torch

from ..measure import MOST_DECODED
from ..problem import DEVICE, Run, Shape, offsets
from . import pages
from .peer import TVM_FFI, Call, Peer, Source, Wheel, import_wheel, library
from .rounded import by_heads

HEADS, KV_HEADS, DIM = 32, 4, 512
SPLITS = {32: 5, 64: 6}  # parts of a sequence, at most, for which a kernel that combines them is compiled


def fp8(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """Over K and V in E4M3, with a scale for each KV head."""
    (k8, k_scale), (v8, v_scale) = (by_heads(x, shape.kv_heads) for x in (k, v))
    scales = [x.expand(len(shape.keys), -1).contiguous() for x in (torch.ones_like(k_scale), k_scale, v_scale)]
    return Run(attention("fp8", shape, q, k8.bits, v8.bits, tuple(scales)), q, shape.split(k8, v8))


def bf16(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    return Run(attention("bf16", shape, q, k, v), q, shape.split(k, v))


def attention(
    cache: str, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scales: tuple | None = None
) -> Callable[[], torch.Tensor]:
    """A call over shuffled pages.

    Args:
        cache: `fp8` or `bf16`.
        scales: of Q, K and V in FP8, `[batch, num_kv_heads]` each.
    """
    if (shape.q_heads, shape.kv_heads, shape.dim) != (HEADS, KV_HEADS, DIM) or not shape.causal:
        raise ValueError(f"compiled for {HEADS} and {KV_HEADS} heads of {DIM}, causal")
    held, bounds, out = pages.fill(shape, k, v, heads_first=False), offsets(shape.queries), torch.empty_like(q)
    rest = (shape.softmax_scale, bounds, None, None, held.used, None, held.table, None, None, None, None, (None, None))
    rest = (*rest, scales, None, None, None)
    if max(shape.queries) > MOST_DECODED:
        return partial(_called, f"{cache}_prompt", out, q, held.k, held.v, out, None, *rest)
    sms = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    parts = min(sms // (len(shape.keys) * KV_HEADS), -(-max(shape.keys) // pages.SIZE))  # as its heuristic
    if parts <= 1:
        return partial(_called, f"{cache}_step", out, q, held.k, held.v, out, None, *rest)
    partial_out = torch.empty(parts, *q.shape, dtype=torch.float32, device=DEVICE)
    lse = torch.empty(parts, HEADS, len(q), dtype=torch.float32, device=DEVICE)
    most = next(count for count in SPLITS if parts <= count)

    def split() -> torch.Tensor:
        _called(f"{cache}_parts", out, q, held.k, held.v, partial_out, lse, *rest)
        return _called(f"combine_{most}", out, partial_out, lse.mT, out, None, bounds, *[None] * 5)

    return split


def _called(kernel: str, out: torch.Tensor, *args: object) -> torch.Tensor:
    _kernel(kernel)(*args)
    return out


@cache
def _kernel(name: str) -> Callable:
    import tvm_ffi

    return getattr(tvm_ffi.load_module(str(library("vllm_fa4"))), name)


# How it is compiled

# What vLLM 0.33 asks for; installed for the Python that compiles.
DSL = (
    *(f"nvidia-cutlass-dsl{part}==4.8.0" for part in ("", "-libs-base", "-libs-core", "-libs-cu13")),
    "quack-kernels==0.6.5", TVM_FFI, "torch-c-dlpack-ext", "einops", "cuda-bindings==13.0.3", "cuda-pathfinder",
    "typing_extensions", "protobuf",
)  # fmt: skip
RUNTIME = "nvidia_cutlass_dsl/cu13/lib/libcuda_dialect_runtime_static.a"

# `interface` makes tensors for the compiler of those of torch, which it wants on a GPU: here they are made of shapes.
COMPILE = dedent("""
    import os, sys
    from contextlib import contextmanager
    site, folder = sys.argv[1:]
    sys.path[:0] = [site, f"{site}/nvidia_cutlass_dsl/dsl_packages"]
    os.environ.update(FLASH_ATTENTION_ARCH="sm_90", CUTE_DSL_ARCH="sm_90a", FLASH_ATTENTION_NUM_SMS="132")
    import cutlass, torch
    from cutlass import cute
    from quack.compile_utils import make_fake_tensor
    from torch._subclasses.fake_tensor import FakeTensorMode
    from vllm.vllm_flash_attn.cute import interface
    from vllm.vllm_flash_attn.cute.cute_dsl_utils import torch2cute_dtype_map

    TYPES = {**torch2cute_dtype_map, torch.int32: cutlass.Int32}
    HEADS, KV_HEADS, DIM, BATCH = @HEADS, @KV_HEADS, @DIM, 2

    def described(x, assumed_align=16, leading_dim=-1):
        if x is not None:
            kind, shape = TYPES[x.dtype], tuple(cute.sym_int() for _ in x.shape)
            divisible = max(1, assumed_align * 8 // kind.width)
            return make_fake_tensor(kind, shape, divisible, x.ndim - 1 if leading_dim == -1 else leading_dim)

    def empty(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype)

    @contextmanager
    def saved(name, function):
        before = set(function.compile_cache.cache)
        yield
        [key] = set(function.compile_cache.cache) - before
        kernel = function.compile_cache.cache[key]
        kernel.export_to_c(object_file_path=f"{folder}/{name}.o", function_name=name)

    interface.to_cute_tensor, interface._validate_tensor = described, lambda *_: None
    forward, combine = interface._flash_attn_fwd, interface._flash_attn_fwd_combine
    with FakeTensorMode():
        bounds, used, table = (empty(*s, dtype=torch.int32) for s in ((BATCH + 1,), (BATCH,), (BATCH, 4)))
        for count in @SPLITS:
            with saved(f"combine_{count}", combine):
                parts = empty(count, BATCH, HEADS, DIM, dtype=torch.float32)
                combine(parts, parts[..., 0], empty(BATCH, HEADS, DIM), cu_seqlens=bounds)
        scale = empty(BATCH, KV_HEADS, dtype=torch.float32)
        for cache, dtype in (("fp8", torch.float8_e4m3fn), ("bf16", torch.bfloat16)):
            options = dict(cu_seqlens_q=bounds, seqused_k=used, page_table=table, max_seqlen_k=256, causal=True)
            if cache == "fp8":
                options |= dict(k_descale=scale, v_descale=scale, fp8_kv_dequant=True)
            pages = empty(8, 2, @PAGE, KV_HEADS, DIM, dtype=dtype).unbind(1)
            for name, queries, splits in (("step", 1, 1), ("parts", 1, 2), ("prompt", 256, 1)):
                with saved(f"{cache}_{name}", forward):
                    q = empty(BATCH * queries, HEADS, DIM)
                    forward(q, *pages, max_seqlen_q=queries, num_splits=splits, **options)
""")


def compiled(source: Path, folder: Path) -> list[Path]:
    """Object files of the kernels, and the library that loads them into a GPU."""
    site, package = folder / "site", folder / "site/vllm/vllm_flash_attn"
    shutil.copytree(source / "vllm/vllm_flash_attn/cute", package / "cute")
    for each in (package, package.parent):
        (each / "__init__.py").touch()
    text = COMPILE.replace("@HEADS", str(HEADS)).replace("@KV_HEADS", str(KV_HEADS)).replace("@DIM", str(DIM))
    text = text.replace("@PAGE", str(pages.SIZE)).replace("@SPLITS", str(list(SPLITS)))
    for command in (["-m", "pip", "install", "-q", "--no-deps", "--target", site, *DSL], ["-c", text, site, folder]):
        made = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if made.returncode:
            raise LookupError(f"CuTe DSL: {made.stderr.strip().splitlines()[-1]}")
    return [*sorted(folder.glob("*.o")), site / RUNTIME]


SOURCE = Source(
    name="vllm_fa4",
    source="vllm==0.33.0",
    files=(),
    includes=(),
    flags=(),
    needs=("tvm_ffi",),
    missing="CuteDSLRT_",  # reports a launch that fails
    prepare=compiled,
    package="vllm/vllm_flash_attn/cute/",
)


def load() -> None:
    import_wheel("tvm_ffi", "apache_tvm_ffi")
    library(SOURCE.name)


PEER = Peer(
    calls={
        "vllm-fa4-fp8": Call(fp8, "vLLM's FA4 FP8", "#e07a5f"),
        "vllm-fa4-bf16": Call(bf16, "vLLM's FA4 BF16", "#7d8597"),
    },
    needs=(Wheel(TVM_FFI), SOURCE),
    load=load,
    release=lambda: SOURCE.source,
)
