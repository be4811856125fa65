"""Compiles, without a GPU, what the launchers of the Triton kernels would launch, and prints what ptxas says of it as JSON.

A process of its own (`test_compile.py` runs it), because a process with TRITON_INTERPRET=1 cannot compile. The launchers themselves run, on
CPU tensors, with the kernels replaced by recorders: what is compiled is what they ask for.

    python tests/compile_kernels.py [sm_90 | sm_80 | sm_89 ...] [case substring]
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fp8attn import KVPages
from fp8attn.kernels import append, combine, portable
from fp8attn.kernels import quantize_rows as rows
from fp8attn.layout import FP8, HEAD_DIMS

SHARED_MEMORY = {80: 166912, 86: 101376, 89: 101376, 90: 232448}  # bytes one program may have
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion", "launch_pdl")
TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.uint8: "*u8",
    torch.float8_e4m3fn: "*fp8e4nv",
}


@dataclass
class Compiled:
    case: str
    kernel: str
    head_dim: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    shared_limit: int
    num_warps: int
    warnings: str


class Recorder:
    """Stands in for a jitted kernel: `recorder[grid](...)` notes the arguments."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((args, options))


def compile_launch(kernel, args, options, arch: int):
    """`triton.compile` of one recorded launch, specialised as Triton would: returns (metadata, ptxas's log, asm)."""
    values = dict(zip(kernel.arg_names, args, strict=False)) | {k: v for k, v in options.items() if k not in OPTIONS}
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = values[param.name]
        special = not param.do_not_specialize
        if param.is_constexpr or value is None or (special and isinstance(value, int) and value == 1):
            signature[param.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, torch.Tensor):
            signature[param.name] = TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        elif isinstance(value, int):
            signature[param.name] = "i32"
            if special and value % 16 == 0:
                attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "fp32"
    log = io.StringIO()
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), contextlib.redirect_stdout(log):
        knobs.cache.dir = cache
        knobs.nvidia.dump_ptxas_log = True
        source = ASTSource(kernel, signature, constants, attributes)
        compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={k: options[k] for k in OPTIONS if k in options})
    return compiled.metadata, log.getvalue(), compiled.asm


def _pages(head_dim: int, max_pages: int = 48) -> KVPages:
    return KVPages.empty(48, 2, head_dim, 1, max_pages)


def attention_case(name: str, head_dim: int, dtype, queries: int, group: int = 4, causal=True, splits=1, device_arch: int = 90, **features):
    """What `portable.attention` launches for `queries` queries of a sequence."""
    options = {"window": 0, "softcap": 0.0, "sinks": None, "leftpad_k": None} | features
    portable._attention_kernel, combine._combine_kernel = Recorder(ATTENTION), Recorder(COMBINE)
    portable.is_native = combine.is_native = lambda device: device_arch >= 89
    portable._device = lambda device: (132, SHARED_MEMORY[device_arch])
    portable.num_splits = lambda *_: splits
    q = torch.zeros(queries, 2 * group, head_dim, dtype=dtype)
    portable.attention(
        q, _pages(head_dim), cu_seqlens_q=None, max_seqlen_q=queries, causal=causal, softmax_scale=0.1, **options,
    )  # fmt: skip
    return [(name, r.kernel, *launch) for r in (portable._attention_kernel, combine._combine_kernel) for launch in r.launches]


def append_case(name: str, head_dim: int, dtype, tokens: int, rotary=0, interleaved=False, q_heads=0, ragged=False, device_arch: int = 90):
    """What `append.append` launches for `tokens` new tokens of each of two sequences."""
    heads = 8
    recorders = [Recorder(kernel) for kernel in APPEND]
    append._step_kernel, append._page_kernel, append._queries_kernel, append._means_kernel, append._bytes_kernel = recorders
    append.is_native = lambda device: device_arch >= 89
    k = torch.zeros(2 * tokens, heads, head_dim, dtype=dtype)
    q = torch.zeros(2 * tokens, q_heads, head_dim, dtype=dtype) if q_heads else None
    angle = torch.zeros(2 * tokens, rotary // 2) if rotary else None
    append.append(
        KVPages.empty(48, heads, head_dim, 2, 24), k, k, q=q, q_out=q, max_seqlen=tokens, rope_cos=angle, rope_sin=angle,
        cu_seqlens=torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32) if ragged else None, rope_interleaved=interleaved,
        static_scales=False, fix_means=tokens > append.MAX_TOKENS,
    )  # fmt: skip
    return [(name, r.kernel, *launch) for r in recorders for launch in r.launches]


def quantize_case(name: str, head_dim: int, dtype, rotary=0, interleaved=False, device_arch: int = 90):
    """What `append.quantize` and `append.rotate` launch for two sequences of dense K, V and Q, transposed."""
    recorders = [Recorder(kernel) for kernel in APPEND]
    append._step_kernel, append._page_kernel, append._queries_kernel, append._means_kernel, append._bytes_kernel = recorders
    append.is_native, append.overlaps = lambda device: device_arch >= 89, lambda device: device_arch >= 90
    x = torch.zeros(2, 300, 8, head_dim, dtype=dtype).transpose(1, 2)
    angle = torch.zeros(2, 300, rotary // 2) if rotary else None
    append.quantize(x, x, rope_cos=angle, rope_sin=angle, rope_interleaved=interleaved, means=dtype != FP8)
    if rotary:
        append.rotate(x, angle, angle, interleaved)
    return [(name, r.kernel, *launch) for r in recorders for launch in r.launches]


def rows_case(name: str, head_dim: int, dtype, rotary=0, interleaved=False, device_arch: int = 90):
    """What `quantize_rows.quantize_rows` launches for dense K, without a mean if it is not rotated."""
    recorders = [Recorder(kernel) for kernel in ROWS]
    rows._statistics_kernel, rows._scales_kernel, rows._rows_kernel = recorders
    rows.is_native = lambda device: device_arch >= 89
    x = torch.zeros(2, 8, 300, head_dim, dtype=dtype)
    angle = torch.zeros(2, 300, rotary // 2) if rotary else None
    options = dict(rope_cos=angle, rope_sin=angle, rope_interleaved=interleaved, means=rotary > 0, heads_per_scale=4)
    rows.quantize_rows(x, **options)
    return [(name, r.kernel, *launch) for r in recorders for launch in r.launches]


ATTENTION, COMBINE = portable._attention_kernel, combine._combine_kernel
APPEND = append._step_kernel, append._page_kernel, append._queries_kernel, append._means_kernel, append._bytes_kernel
ROWS = rows._statistics_kernel, rows._scales_kernel, rows._rows_kernel


def cases(arch: int) -> list[tuple]:
    """Every head_dim with few, some and many rows, each dtype and feature somewhere; the whole list for sm_90, a sample elsewhere."""
    bf16, fp16 = torch.bfloat16, torch.float16
    found = []
    for i, head_dim in enumerate(HEAD_DIMS if arch == 90 else (128, 256) if arch == 80 else (256,)):
        dtype, other = (bf16, fp16) if i % 2 else (fp16, bf16)
        found += attention_case(f"D{head_dim} rows4", head_dim, dtype, 1, splits=4 if i % 3 else 33, device_arch=arch)
        found += attention_case(f"D{head_dim} rows64", head_dim, other, 16, splits=1 + i % 2, device_arch=arch)
        found += attention_case(f"D{head_dim} rows128", head_dim, dtype, 512, device_arch=arch)
        rope = {"rotary": head_dim, "q_heads": 32, "device_arch": arch}
        found += append_case(f"D{head_dim} step rope", head_dim, other, 1 + i, **rope)
        found += append_case(f"D{head_dim} prompt rope", head_dim, dtype, 300, **rope, interleaved=i % 2 == 1)
        found += quantize_case(f"D{head_dim} dense", head_dim, dtype, i % 2 * head_dim, device_arch=arch)
        found += rows_case(f"D{head_dim} rows", head_dim, other, i % 2 * head_dim, interleaved=i % 4 == 3, device_arch=arch)
    found += quantize_case("D128 dense fp8", 128, FP8, device_arch=arch)
    found += quantize_case("D96 dense fp8", 96, FP8, device_arch=arch)  # a masked load of FP8
    if arch == 90:
        leftpad, sinks = torch.zeros(1, dtype=torch.int32), torch.zeros(8)
        found += attention_case("D128 rows4 window sinks", 128, bf16, 1, window=100, sinks=sinks)
        found += attention_case("D64 rows4 softcap leftpad", 64, fp16, 1, softcap=30.0, leftpad_k=leftpad)
        found += attention_case("D128 rows64 softcap", 128, bf16, 16, softcap=30.0, sinks=sinks)
        found += attention_case("D128 rows128 window sinks", 128, bf16, 512, window=100, sinks=sinks)
        found += attention_case("D128 rows128 full leftpad", 128, fp16, 512, causal=False, leftpad_k=leftpad)
        found += append_case("D128 prompt", 128, bf16, 300)
        found += quantize_case("D128 dense rope", 128, bf16, 128)
        found += append_case("D128 prompt ragged", 128, bf16, 300, 128, ragged=True)
        found += append_case("D128 step ragged", 128, bf16, 5, 40, q_heads=40, ragged=True)
    return found


def run(arch: int, index: int) -> Compiled:
    name, kernel, args, options = cases(arch)[index]
    metadata, log, _ = compile_launch(kernel, args, options, arch)
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", log)]
    spills = [int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log)]
    warnings = "\n".join(line for line in log.splitlines() if re.search(r"C75\d\d|warning", line))
    return Compiled(
        name, kernel.__name__.strip("_"), options["D"], max(registers), sum(spills), metadata.shared, SHARED_MEMORY[arch],
        metadata.num_warps, warnings,
    )  # fmt: skip


def main() -> None:
    arch = int(sys.argv[1].removeprefix("sm_")) if len(sys.argv) > 1 else 90
    wanted = [i for i, case in enumerate(cases(arch)) if len(sys.argv) < 3 or sys.argv[2] in f"{case[0]} {case[1].__name__}"]
    with ProcessPoolExecutor(max_workers=2, mp_context=get_context("spawn")) as pool:
        for result in pool.map(run, [arch] * len(wanted), wanted):
            print(json.dumps(asdict(result)), flush=True)


if __name__ == "__main__":
    main()
