"""What the launchers of the Triton kernels would launch, compiled without a GPU: what ptxas says of it.

`test_compile.py` calls this in a process where Triton compiles. By hand:

    python tests/compile_kernels.py [sm_90 | sm_80 | sm_89 ...] [case substring ...]
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from machine_code import build, dry
from triton.backends.compiler import GPUTarget

from fp8attn import KVPages
from fp8attn.kernels import append, combine, portable
from fp8attn.kernels import quantize_rows as rows
from fp8attn.kernels.launch import Launch
from fp8attn.layout import FP8, HEAD_DIMS

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448}  # bytes one program may have
BF16, FP16 = torch.bfloat16, torch.float16


def attention(head_dim: int, dtype, queries: int, key_dtype=torch.int8, rotate=True, means=False, **features) -> None:
    """`queries` queries of a sequence; 4 query heads a KV head."""
    options = {"causal": True, "window": 0, "softcap": 0.0, "sinks": None, "leftpad_k": None} | features
    q = torch.zeros(queries, 8, head_dim, dtype=dtype)
    mean = torch.zeros(2, head_dim) if means else None
    pages = KVPages.empty(48, 2, head_dim, 1, 48, key_dtype=key_dtype, rotate_keys=rotate, k_mean=mean, v_mean=mean)
    portable.attention(q, pages, cu_seqlens_q=None, max_seqlen_q=queries, softmax_scale=0.1, **options)


def append_tokens(
    head_dim: int, dtype, tokens: int, rotary=0, interleaved=False, q_heads=0, ragged=False, key_dtype=torch.int8, rotate=True
) -> None:
    """`tokens` new tokens of each of two sequences."""
    k = torch.zeros(2 * tokens, 8, head_dim, dtype=dtype)
    q = torch.zeros(2 * tokens, q_heads, head_dim, dtype=dtype) if q_heads else None
    angle = torch.zeros(2 * tokens, rotary // 2) if rotary else None
    append.append(
        KVPages.empty(48, 8, head_dim, 2, 24, key_dtype=key_dtype, rotate_keys=rotate), k, k, q=q, q_out=q, max_seqlen=tokens,
        rope_cos=angle, rope_sin=angle,
        cu_seqlens=torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32) if ragged else None, rope_interleaved=interleaved,
        static_scales=False,
    )  # fmt: skip


def quantize(head_dim: int, dtype, rotary=0, key_dtype=torch.int8, rotate=True) -> None:
    """Dense K, V and Q of two sequences, transposed, with means where keys are E4M3."""
    x = torch.zeros(2, 300, 8, head_dim, dtype=dtype).transpose(1, 2)
    angle = torch.zeros(2, 300, rotary // 2) if rotary else None
    mean = torch.zeros(8, head_dim) if key_dtype == FP8 else None
    append.quantize(
        x, x, rope_cos=angle, rope_sin=angle, rope_interleaved=False, k_mean=mean, v_mean=mean, key_dtype=key_dtype, rotate_keys=rotate
    )
    if rotary:
        append.rotate(x, angle, angle, False)


def quantize_rows(head_dim: int, dtype, rotary=0, interleaved=False) -> None:
    """Dense K; rotated, in INT8 and with a mean if it has RoPE."""
    angle = torch.zeros(2, 300, rotary // 2) if rotary else None
    options = dict(
        rope_cos=angle, rope_sin=angle, rope_interleaved=interleaved, rotate_keys=rotary > 0, means=rotary > 0, heads_per_scale=4,
        dtype=torch.int8 if rotary else FP8,
    )  # fmt: skip
    rows.quantize_rows(torch.zeros(2, 8, 300, head_dim, dtype=dtype), **options)


def cases(arch: int) -> dict[str, tuple]:
    """Launchers and their arguments: every head_dim with few, some and many rows, each dtype and feature somewhere; the whole list for
    sm_90, a sample elsewhere. What appends and quantizes has the same tiles for 80 channels as for 96, and for 192 as for 256."""
    found: dict[str, tuple] = {}
    for i, head_dim in enumerate(HEAD_DIMS if arch == 90 else (128, 256) if arch == 80 else (256,)):
        dtype, other = (BF16, FP16) if i % 2 else (FP16, BF16)
        rope, some = {"rotary": head_dim, "q_heads": 32}, i % 2 * head_dim
        seeds, means = {"key_dtype": FP8, "rotate": False}, {"means": True}
        found |= {
            f"D{head_dim} rows4": (attention, head_dim, dtype, 1, means | {"splits": 4 if i % 3 else 33}),
            f"D{head_dim} rows64": (attention, head_dim, other, 16, {"splits": 1 + i % 2}),
            f"D{head_dim} rows128": (attention, head_dim, dtype, 512, means),
            f"D{head_dim} rows4 e4m3": (attention, head_dim, other, 1, seeds),
            f"D{head_dim} rows64 e4m3": (attention, head_dim, dtype, 16, seeds | means),
            f"D{head_dim} rows128 e4m3": (attention, head_dim, other, 512, seeds),
        }
        if head_dim in (80, 192) or (arch, head_dim) == (80, 256):
            continue
        found |= {
            f"D{head_dim} step rope": (append_tokens, head_dim, other, 1 + i, rope),
            f"D{head_dim} prompt rope": (append_tokens, head_dim, dtype, 300, rope | {"interleaved": i % 2 == 1}),
            f"D{head_dim} dense": (quantize, head_dim, dtype, {"rotary": some}),
            f"D{head_dim} step e4m3": (append_tokens, head_dim, dtype, 1, {"key_dtype": FP8, "rotate": i % 2 == 1}),
            f"D{head_dim} dense e4m3": (quantize, head_dim, other, {"key_dtype": FP8, "rotate": i % 2 == 0}),
            f"D{head_dim} rows": (quantize_rows, head_dim, other, {"rotary": some, "interleaved": i % 4 == 3}),
        }
    found["D128 dense fp8"] = quantize, 128, FP8, {}
    found["D96 dense fp8"] = quantize, 96, FP8, {}  # a masked load of FP8
    if arch == 90:
        leftpad, sinks = torch.zeros(1, dtype=torch.int32), torch.zeros(8)
        found |= {
            "D128 rows4 window sinks": (attention, 128, BF16, 1, {"window": 100, "sinks": sinks}),
            "D64 rows4 softcap leftpad": (attention, 64, FP16, 1, {"softcap": 30.0, "leftpad_k": leftpad, "key_dtype": FP8}),
            "D128 rows64 softcap": (attention, 128, BF16, 16, {"softcap": 30.0, "sinks": sinks, "rotate": False}),
            "D128 rows128 window sinks": (attention, 128, BF16, 512, {"window": 100, "sinks": sinks}),
            "D128 rows128 full leftpad": (attention, 128, FP16, 512, {"causal": False, "leftpad_k": leftpad, "key_dtype": FP8}),
            "D128 prompt": (append_tokens, 128, BF16, 300, {}),
            "D128 dense rope": (quantize, 128, BF16, {"rotary": 128}),
            "D128 prompt ragged": (append_tokens, 128, BF16, 300, {"rotary": 128, "ragged": True}),
            "D128 step ragged": (append_tokens, 128, BF16, 5, {"rotary": 40, "q_heads": 40, "ragged": True}),
        }
    return found


def launches(arch: int, name: str) -> list[Launch]:
    """What a case launches on a GPU of that architecture."""
    function, *arguments, options = cases(arch)[name]
    splits = options.pop("splits", 1)
    with dry() as (found, patch):
        for module in (portable, combine, append, rows):
            patch.setattr(module, "is_native", lambda device: arch >= 89)
        patch.setattr(append, "num_sms", lambda device: 132)
        patch.setattr(portable, "_device", lambda device: (132, SHARED_MEMORY[arch]))
        patch.setattr(portable, "num_splits", lambda *_: splits)
        function(*arguments, **options)
    return found


def kernels(arch: int) -> dict[str, list[str]]:
    """The kernels that each case launches; nothing is compiled."""
    return {name: [launch.kernel.__name__.strip("_") for launch in launches(arch, name)] for name in cases(arch)}


def compile_cases(arch: int, head_dim: int) -> list[dict[str, Any]]:
    """A row for each launch of that head_dim's cases."""
    return [row for name in cases(arch) if name.split()[0] == f"D{head_dim}" for row in compile_case(arch, name)]


def compile_case(arch: int, name: str) -> list[dict[str, Any]]:
    """A row for each launch."""
    found = []
    for launch in launches(arch, name):
        built = build(launch, GPUTarget("cuda", arch, 32))
        metadata = built.kernel.metadata
        found.append({
            "case": name, "kernel": launch.kernel.__name__.strip("_"), "head_dim": int(name.split()[0][1:]), "registers": built.registers,
            "spill_bytes": built.spill_stores + built.spill_loads, "shared_bytes": metadata.shared, "shared_limit": SHARED_MEMORY[arch],
            "num_warps": metadata.num_warps, "warnings": built.warnings,
        })  # fmt: skip
    return found


def main() -> None:
    arch, *words = sys.argv[1:] or ["sm_90"]
    arch = int(arch.removeprefix("sm_"))
    for name in cases(arch):
        if not words or any(word in name for word in words):
            for row in compile_case(arch, name):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
