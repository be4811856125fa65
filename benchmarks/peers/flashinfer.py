"""FlashInfer: XQA for decode steps and fmha_v2 for prompts, both of TensorRT-LLM, over pages in FP8.

`make peers` compiles the two modules that FlashInfer's JIT would compile for these shapes; they are called with the
arguments of `flashinfer.decode.xqa_batch_decode_with_kv_cache` and `flashinfer.prefill.trtllm_fmha_v2_prefill`. XQA
takes Q in BF16, rounds it itself, and has one scale for K and V together; fmha_v2 takes Q in FP8 and one scale for each
of Q, K and V. Both sum all tokens in the tensor core.
"""

from __future__ import annotations

import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import torch

from ..measure import MOST_DECODED
from ..problem import DEVICE, Run, Shape, offsets
from . import pages
from .peer import TVM_FFI, Call, Peer, Source, Wheel, import_wheel, library
from .rounded import Rounded, by_heads

RELEASE = "flashinfer-python==0.7.4"
FMHA_DIMS = (128, 256)  # the head_dims that FlashInfer tests in FP8 on SM90
SEMAPHORES = 8 << 20  # bytes, zero, before XQA's workspace
WORKSPACE = 256 << 20
GROUP = 4  # query heads a KV head, for which XQA is compiled


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """A decode step, or prompts."""
    return (decode if max(shape.queries) <= MOST_DECODED else prefill)(shape, q, k, v)


def prefill(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    if shape.dim not in FMHA_DIMS:
        raise ValueError(f"compiled for head_dim {FMHA_DIMS}")
    (q8, q_scale), (k8, k_scale), (v8, v_scale) = (by_heads(x, 1) for x in (q, k, v))
    cache = pages.fill(shape, k8.bits, v8.bits, heads_first=True)
    k_pages, v_pages = cache.pool.unbind(1)
    out = torch.empty_like(q)
    bounds = offsets(shape.queries), offsets(shape.keys)
    scales = float(q_scale * k_scale) * shape.softmax_scale, float(v_scale)
    mask, run, room = "causal" if shape.causal else "padding", _module("fmha").run, _workspace()

    def call() -> torch.Tensor:
        run(
            q8.bits, k_pages, v_pages, out, room, WORKSPACE, cache.table, pages.SIZE, cache.used, *bounds,
            "q_paged_kv_hnd",
            max(shape.queries), max(shape.keys), len(shape.keys), mask, 1.0, *scales, -1, 0, False, 0.0, 0.0, None,
            None,
        )  # fmt: skip
        return out

    return Run(call, q8, shape.split(k8, v8))


def decode(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    if set(shape.queries) != {1} or shape.q_heads != GROUP * shape.kv_heads or shape.dim != 128:
        raise ValueError(f"compiled for one query, {GROUP} query heads a KV head and head_dim 128")
    both, scale = by_heads(torch.stack((k, v), 1).flatten(1, 2), 1)
    k8, v8 = both.bits.unflatten(1, (2, -1)).unbind(1)
    cache = pages.fill(shape, k8, v8, heads_first=True)
    q = q.bfloat16()
    out, room, sms = torch.empty_like(q), _workspace(), torch.cuda.get_device_properties(DEVICE).multi_processor_count
    semaphores, scratch = room[:SEMAPHORES], room[SEMAPHORES:]
    q_scale, kv_scale, longest = shape.softmax_scale * shape.dim**0.5, float(scale), cache.table.shape[1] * pages.SIZE
    run = _module("xqa").xqa_wrapper

    def call() -> torch.Tensor:
        run(
            True, sms, shape.kv_heads, 0, q_scale, None, out[:, None], 1.0, q[:, None], None, cache.k, cache.v, None,
            None, cache.table,
            longest, cache.used[:, None], len(shape.keys), kv_scale, None, 1, None, None, semaphores, scratch, True,
        )  # fmt: skip
        return out

    return Run(call, q, shape.split(Rounded(k8, scale[None, None]), Rounded(v8, scale[None, None])))


@lru_cache
def _module(name: str):
    import tvm_ffi

    return tvm_ffi.load_module(str(library(f"flashinfer_{name}")))


@lru_cache
def _workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device=DEVICE)


# How it is compiled


def fmha_sources(source: Path, folder: Path) -> list[Path]:
    """The files that FlashInfer's generator writes for a kernel a head_dim: FP8 in, BF16 out, over pages."""
    made = subprocess.run(
        [sys.executable, "-c", GENERATE, source, folder, *map(str, FMHA_DIMS)], capture_output=True, text=True
    )
    if made.returncode:
        raise LookupError(f"FlashInfer's generator: {made.stderr.strip().splitlines()[-1]}")
    return sorted(folder.glob("*.cu"))


# FlashInfer's packages import all of its dependencies: this imports the generator alone.
GENERATE = """
import sys, types
from pathlib import Path
root, folder = Path(sys.argv[1]) / "flashinfer", Path(sys.argv[2])
def module(name, **contents):
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(contents)
for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention", "flashinfer.jit.attention.fmha_v2"):
    module(name, __path__=[str(root.joinpath(*name.split(".")[1:]))])
module("flashinfer.jit.env", FLASHINFER_CSRC_DIR=root / "data/csrc")
sys.modules["flashinfer.jit"].env = sys.modules["flashinfer.jit.env"]
module("flashinfer.compilation_context", CompilationContext=object)
module("flashinfer.jit.utils", write_if_different=lambda path, text: path.write_text(text))
from flashinfer.jit.attention.fmha_v2 import fmha_library as made
specs = []
for dim in map(int, sys.argv[3:]):
    layout = made.InputLayout.Q_PAGED_KV
    spec = made.generate_kernel_spec(90, dim, "e4m3", alibi=False, input_layout=layout, output_dtype="bf16")
    file, launcher, kernel = made.encode_name(spec)
    folder.joinpath(file).write_text(made.get_kernel_code(spec, kernel, launcher))
    specs.append((spec, file, launcher, kernel))
folder.joinpath("fmha_v2_api.h").write_text(made.get_api_code(specs))
"""


# As `flashinfer.jit.core.gen_jit_spec`.
FLASHINFER_FLAGS = (
    "-use_fast_math", "-DNDEBUG",
    *(f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")),
)  # fmt: skip
# As `flashinfer.jit.xqa.gen_xqa_module` for BF16 queries, FP8 pages of 64 tokens, head_dim 128 and 4 query heads a KV
# head.
XQA_FLAGS = tuple(
    f"-D{name}"
    for name in (
        "BEAM_WIDTH=1", "USE_INPUT_KV=0", "USE_CUSTOM_BARRIER=1", "TOKENS_PER_PAGE=64", "HEAD_ELEMS=128",
        "INPUT_FP16=0",
        "DTYPE=__nv_bfloat16", "CACHE_ELEM_ENUM=2", "HEAD_GRP_SIZE=4", "SLIDING_WINDOW=0", "LOW_PREC_OUTPUT=0",
        "SPEC_DEC=0",
        "MLA_WRAPPER=0", "USE_SM90_MHA=1",
    )
)  # fmt: skip
DATA = "flashinfer/data"
SOURCES = (
    Source(
        name="flashinfer_fmha",
        source=RELEASE,
        package="flashinfer/",
        files=(f"{DATA}/csrc/fmha_v2_run.cu", f"{DATA}/csrc/fmha_v2_jit_binding.cu"),
        includes=(f"{DATA}/csrc/fmha_v2", f"{DATA}/include", f"{DATA}/csrc"),
        flags=("-static-global-template-stub=false", *FLASHINFER_FLAGS),
        needs=("tvm_ffi", "cuda"),
        prepare=fmha_sources,
    ),
    Source(
        name="flashinfer_xqa",
        source=RELEASE,
        package="flashinfer/",
        files=tuple(
            f"{DATA}/csrc/{name}" for name in ("xqa/mha_sm90.cu", "xqa/xqa_wrapper.cu", "xqa/tensorMap.cpp",
            "flashinfer_xqa_binding.cu")
        ),
        includes=(f"{DATA}/include", f"{DATA}/csrc", f"{DATA}/cutlass/include"),
        flags=(*FLASHINFER_FLAGS, *XQA_FLAGS),
        needs=("tvm_ffi", "cuda"),
        missing="_Z19launchMHAFlashInfer",
    ),
)  # fmt: skip


def load() -> None:
    import_wheel("tvm_ffi", "apache_tvm_ffi")
    for source in SOURCES:
        library(source.name)


PEER = Peer(
    calls={"flashinfer": Call(attention, "FlashInfer", "#6c91bf", prefill=True, decode=True, levels=1)},
    needs=(Wheel(TVM_FFI), *SOURCES),  # that calls the modules
    load=load,
    release=lambda: RELEASE,
)
