"""Compiles the launches of the Triton kernels without a GPU, and reports spills and sizes.

`test_compile.py` calls this in a process where Triton compiles. By hand:

    python -m tests.kernels.compile_kernels [sm_90 | sm_80 | gfx942 ...] [case substring ...]
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any, NamedTuple

import torch
from triton.backends.compiler import GPUTarget

from fp8attn import AttentionParams, KVPages
from fp8attn.formats.codec import FP8
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.rope import DenseRope, Rope
from fp8attn.formats.spec import HEAD_DIMS, PageSpec
from fp8attn.kernels import append, combine, latent, portable
from fp8attn.kernels.compile import compiled
from fp8attn.kernels.launch import Launch
from fp8attn.kernels.machine import Machine
from fp8attn.params import Append
from tests.support.machine_code import build, dry

BF16, FP16 = torch.bfloat16, torch.float16


class Target(NamedTuple):
    """A GPU: the shared memory (bytes) of a program, and whether it converts E4M3."""

    gpu: GPUTarget
    shared_memory: int
    native: bool


TARGETS = {
    "sm_80": Target(GPUTarget("cuda", 80, 32), 166912, False),
    "sm_89": Target(GPUTarget("cuda", 89, 32), 101376, True),
    "sm_90": Target(GPUTarget("cuda", 90, 32), 232448, True),
    "sm_100": Target(GPUTarget("cuda", 100, 32), 232448, True),
    "sm_120": Target(GPUTarget("cuda", 120, 32), 101376, True),
    "gfx942": Target(GPUTarget("hip", "gfx942", 64), 65536, False),
    "gfx950": Target(GPUTarget("hip", "gfx950", 64), 163840, False),
}


def attention(head_dim: int, dtype, queries: int, key_dtype="int8", rotate=True, means=False, **features) -> None:
    """Attention of `queries` queries for each sequence, with 4 query heads for each KV head."""
    params = AttentionParams(
        **{"cu_seqlens_q": None, "max_seqlen_q": queries, "causal": True, "softmax_scale": 0.1} | features
    )
    q = torch.zeros(queries, 8, head_dim, dtype=dtype)
    mean = torch.zeros(2, head_dim) if means else None
    pages = KVPages.empty(48, 2, head_dim, 1, 48, key_dtype=key_dtype, rotate_keys=rotate, k_mean=mean, v_mean=mean)
    portable.portable_attention(q, pages, params)


def append_tokens(
    head_dim: int, dtype, tokens: int, ragged=False, key_dtype="int8", rotate=True, advance=True, static=False
) -> None:
    """Appends `tokens` new tokens to each of two sequences."""
    k = torch.zeros(2 * tokens, 8, head_dim, dtype=dtype)
    append.append(
        KVPages.empty(48, 8, head_dim, 2, 24, key_dtype=key_dtype, rotate_keys=rotate), k, k,
        Append(
            torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32) if ragged else None, tokens, static, advance,
        ),
    )  # fmt: skip


def from_dense(head_dim: int, dtype, rotary=0, interleaved=False, key_dtype="int8", rotate=True) -> None:
    """Quantizes dense K and V of two sequences, with RoPE on K and 32 heads of Q if `rotary`.

    K and V are transposed, and have means if keys are E4M3.
    """
    x = torch.zeros(2, 300, 8, head_dim, dtype=dtype).transpose(1, 2)
    angle = torch.zeros(2, 300, rotary // 2) if rotary else None
    mean = torch.zeros(8, head_dim) if key_dtype == "e4m3" else None
    form, rope = KVFormat(PageSpec.of(head_dim, key_dtype).name, rotate, mean, mean), None
    if angle is not None:
        q = torch.zeros(2, 32, 300, head_dim, dtype=dtype)
        rope = DenseRope(*2 * [Rope(angle, angle, interleaved)], q, torch.empty_like(q))
    append.from_dense(x, x, form, rope)


def latents(rank: int, rope: int, dtype, queries: int, static: bool, in_codes: bool) -> KVPages:
    """Pages of latents of two sequences, to which `queries` tokens each are appended. With RoPE in codes they have
    two KV heads.
    """
    more = {"v_mean": torch.zeros(1, rank), "factor": torch.ones(1, rank // 128)} if static else {}
    heads = 2 if in_codes else 1
    pages = KVPages.empty(48, heads, PageSpec.latent(rank, rope, in_codes), 2, 24, **more)
    x, key = (torch.zeros(2 * queries, heads, width, dtype=dtype) for width in (rank, rope))
    append.append(pages, x, key, Append(None, queries))
    return pages


def attend_latents(
    rank: int, rope: int, dtype, queries: int, heads: int, static: bool, *, in_codes: bool = False, **features
) -> None:
    """An append and attention of `queries` tokens of two sequences."""
    pages = latents(rank, rope, dtype, queries, static, in_codes)
    params = AttentionParams(None, queries, True, 0.1, **features)
    latent.latent_attention(torch.zeros(2 * queries, heads, rank + rope, dtype=dtype), pages, params)


def cases() -> dict[str, tuple]:
    """Launchers and their arguments: every head_dim with few, some and many rows, each dtype and feature somewhere.
    What appends and quantizes has the same tiles for 80 channels as for 96, and for 192 as for 256."""
    found: dict[str, tuple] = {}
    for i, head_dim in enumerate(HEAD_DIMS):
        dtype, other = (BF16, FP16) if i % 2 else (FP16, BF16)
        seeds, means = {"key_dtype": "e4m3", "rotate": False}, {"means": True}
        found |= {
            f"D{head_dim} rows4": (attention, head_dim, dtype, 1, means | {"splits": 4 if i % 3 else 33}),
            f"D{head_dim} rows64": (attention, head_dim, other, 16, {"splits": 1 + i % 2}),
            f"D{head_dim} rows128": (attention, head_dim, dtype, 512, means),
            f"D{head_dim} rows4 e4m3": (attention, head_dim, other, 1, seeds),
            f"D{head_dim} rows64 e4m3": (attention, head_dim, dtype, 16, seeds | means),
            f"D{head_dim} rows128 e4m3": (attention, head_dim, other, 512, seeds),
        }
        if head_dim in (80, 192):
            continue
        if head_dim == 512:
            found |= {
                f"D{head_dim} step": (append_tokens, head_dim, other, 16, {}),
                f"D{head_dim} prompt": (append_tokens, head_dim, dtype, 300, {}),
                f"D{head_dim} prompt static e4m3": (
                    append_tokens,
                    head_dim,
                    other,
                    300,
                    {"key_dtype": "e4m3", "static": True},
                ),
                f"D{head_dim} dense": (from_dense, head_dim, dtype, {}),
            }
            continue
        found |= {
            f"D{head_dim} step": (append_tokens, head_dim, other, 1 + i, {}),
            f"D{head_dim} prompt": (append_tokens, head_dim, dtype, 300, {}),
            f"D{head_dim} dense": (from_dense, head_dim, dtype, {}),
            f"D{head_dim} dense rope": (from_dense, head_dim, dtype, {"rotary": head_dim, "interleaved": i % 4 == 1}),
            f"D{head_dim} step e4m3": (append_tokens, head_dim, dtype, 1, {"key_dtype": "e4m3", "rotate": i % 2 == 1}),
            f"D{head_dim} dense e4m3": (from_dense, head_dim, other, {"key_dtype": "e4m3", "rotate": i % 2 == 0}),
        }
    found["D128 dense fp8"] = from_dense, 128, FP8, {}
    found["D96 dense fp8"] = from_dense, 96, FP8, {}  # a masked load of FP8
    found["D64 dense fp8"] = from_dense, 64, FP8, {}  # a row is half a line of the L2 cache
    leftpad, sinks = torch.zeros(1, dtype=torch.int32), torch.zeros(8)
    found |= {
        "D128 rows4 window sinks": (attention, 128, BF16, 1, {"window": 100, "sinks": sinks}),
        "D64 rows4 softcap leftpad": (
            attention,
            64,
            FP16,
            1,
            {"softcap": 30.0, "leftpad_k": leftpad, "key_dtype": "e4m3"},
        ),
        "D128 rows64 softcap": (attention, 128, BF16, 16, {"softcap": 30.0, "sinks": sinks, "rotate": False}),
        "D128 rows128 window sinks": (attention, 128, BF16, 512, {"window": 100, "sinks": sinks}),
        "D128 rows128 full leftpad": (
            attention,
            128,
            FP16,
            512,
            {"causal": False, "leftpad_k": leftpad, "key_dtype": "e4m3"},
        ),
        "D128 dense rope part": (from_dense, 128, BF16, {"rotary": 40, "key_dtype": "e4m3"}),
        "D256 dense rope interleaved": (from_dense, 256, FP16, {"rotary": 256, "interleaved": True}),
        "D128 prompt ragged": (append_tokens, 128, BF16, 300, {"ragged": True}),
        "D128 step ragged": (append_tokens, 128, BF16, 5, {"ragged": True}),
        "D128 step counted": (append_tokens, 128, BF16, 1, {"ragged": True, "advance": False}),
        "D128 prompt counted": (append_tokens, 128, BF16, 300, {"ragged": True, "advance": False}),
        "D128 step static": (append_tokens, 128, BF16, 5, {"static": True, "key_dtype": "e4m3"}),
        "D128 prompt static": (append_tokens, 128, BF16, 300, {"static": True}),
    }
    found |= {
        "L512 rows16": (attend_latents, 512, 64, BF16, 1, 16, True, {"splits": 33}),
        "L512 rows128": (attend_latents, 512, 64, FP16, 1, 128, False, {"splits": 4}),
        "L512 rows128 window": (attend_latents, 512, 0, BF16, 300, 16, True, {"window": 100, "leftpad_k": leftpad}),
        "L256 rows64": (attend_latents, 256, 32, BF16, 1, 40, False, {"splits": 4}),
        "L1024 rows16": (attend_latents, 1024, 128, BF16, 1, 16, False, {"splits": 4}),
        "L512 rows16 in codes": (attend_latents, 512, 128, BF16, 1, 16, False, {"in_codes": True, "splits": 33}),
        "L128 rows16": (attend_latents, 128, 64, FP16, 1, 8, True, {}),
    }
    return found


SAMPLE = (  # each kernel; of attention, tiles of few rows and of many
    *("D128 rows4", "D128 rows128 e4m3", "D256 rows4 e4m3"),
    *("D128 step", "D128 prompt", "L512 rows128"),
)
# Other forms of these kernels, and a GPU of each kind: without and with conversions of E4M3, and AMD's. In what else
# their code depends on the GPU, it is that of `SAMPLE`.
FORMS = ("D128 dense rope", "D96 dense fp8", "L512 rows128 window")
KINDS = ("sm_80", "sm_120", "gfx942")


def launches(target: str, name: str) -> list[Launch]:
    """The launches of a case on a GPU of `target`."""
    function, *arguments, options = cases()[name]
    splits = options.pop("splits", 1)
    gpu, shared_memory, native = TARGETS[target]
    with dry() as (found, patch):
        patch.setattr(torch.version, "hip", "7.0" if gpu.backend == "hip" else None)
        for module in (portable, combine, append, latent):
            patch.setattr(module, "machine", lambda device: Machine(132, shared_memory, native, hopper=gpu.arch == 90))
        patch.setattr(latent, "num_splits", lambda *_: splits)
        kept = append._step_plan, append._page_plan  # they keep what these gave
        for each in kept:
            each.cache_clear()
        patch.setattr(portable, "num_splits", lambda *_: splits)
        function(*arguments, **options)
        for each in kept:
            each.cache_clear()
    return found


def kernels(names: tuple[str, ...]) -> set[str]:
    """The kernels that the cases launch. Nothing is compiled."""
    return {launch.kernel.__name__.strip("_") for name in names for launch in launches("sm_90", name)}


def compile_case(target: str, name: str) -> list[dict[str, Any]]:
    """Compiles a case. Returns a row for each launch."""
    gpu, shared_limit, _ = TARGETS[target]
    said = _ptxas_says if gpu.backend == "cuda" else _amd_says
    return [
        {"case": name, "kernel": launch.kernel.__name__.strip("_"), **said(launch, gpu), "shared_limit": shared_limit}
        for launch in launches(target, name)
    ]


def _ptxas_says(launch: Launch, gpu: GPUTarget) -> dict[str, Any]:
    built = build(launch, gpu)
    return {
        "registers": built.registers, "spill_bytes": built.spill_stores + built.spill_loads, "warnings": built.warnings,
        "shared_bytes": built.kernel.metadata.shared, "num_warps": built.kernel.metadata.num_warps,
    }  # fmt: skip


def _amd_says(launch: Launch, gpu: GPUTarget) -> dict[str, Any]:
    kernel = compiled(launch.kernel, launch.args, launch.constants, gpu)
    count = {
        name: int(n)
        for name, n in re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", kernel.asm["amdgcn"])
    }
    return {
        "registers": count["vgpr_count"], "spill_bytes": count["private_segment_fixed_size"], "warnings": "",
        "shared_bytes": kernel.metadata.shared, "num_warps": kernel.metadata.num_warps,
    }  # fmt: skip


def main() -> None:
    target, *words = sys.argv[1:] or ["sm_90"]
    for name in cases():
        if not words or any(word in name for word in words):
            for row in compile_case(target, name):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
