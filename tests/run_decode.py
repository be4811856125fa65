"""Compiles the Hopper decode kernel for sm_90 without a GPU, and runs it on the CPU (`ptx.py`); prints JSON.

A process of its own (`test_decode.py` runs it), because a process with TRITON_INTERPRET=1 cannot compile. The launcher itself runs, on CPU
tensors, with the kernel replaced: what is compiled or emulated is what it asks for.

    python tests/run_decode.py compile [case substring ... | --exact case ...] [--table]
    python tests/run_decode.py emulate [case substring ... | --exact case ...]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from ptx import Machine, Memory, TensorMap
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from fp8attn import KVPages, kernels, reference
from fp8attn.kernels import decode
from fp8attn.kernels.gluon import TensorDescriptor
from fp8attn.layout import FP8

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", FP8: "fp8e4nv"}
PLAIN = {
    "lengths": [1], "heads": 1, "group": 4, "head_dim": 128, "queries": 1, "bounds": None, "dtype": torch.float16, "causal": True,
    "scale": None, "window": 0, "softcap": 0.0, "sinks": False, "leftpad": None, "sms": 4, "v_mean": 0.0,
    "late": (),
}  # fmt: skip
EVERYTHING = {"bounds": [0, 1, 4, 6, 8], "queries": 3, "window": 300, "softcap": 5.0, "sinks": True, "leftpad": [100, 600, 300, 0]}
COMPILED = {
    **{f"D{d} rows{rows}": {"head_dim": d, "group": rows} for d in (64, 80, 96, 128, 192, 256) for rows in (4, 16)},
    "D128 rows1": {"group": 1},
    "D128 rows32": {"queries": 8},
    "D128 many": {"lengths": [1] * 33},
    "D128 everything": dict(lengths=[1] * 4, **EVERYTHING),
    "D256 everything": dict(lengths=[1] * 4, head_dim=256, dtype=torch.bfloat16, **EVERYTHING),
}
EMULATED = {
    "ragged": {"lengths": [1, 0, 127, 300, 128, 129], "heads": 2},
    "split": {"lengths": [2700, 1, 0, 700], "heads": 2, "v_mean": 1.0},
    "D64 rows16": {"lengths": [1100, 30], "head_dim": 64, "group": 16},
    "D96": {"lengths": [1100, 30], "head_dim": 96, "group": 8, "dtype": torch.bfloat16},
    "D256": {"lengths": [900, 30], "head_dim": 256, "group": 2},
    "queries": {"lengths": [700, 129, 128, 5], "queries": 8},
    "everything": dict(lengths=[700, 1200, 300, 50], **EVERYTHING),
    "idle": {"lengths": [300], "sms": 8},
    "parts": {"lengths": [5000, 10], "sms": 20},
    "many": {"lengths": [37 * i % 150 for i in range(40)], "sms": 8},
    "late consumer": {"lengths": [700, 1200], "late": (0, 1, 2, 3)},
    "late producer": {"lengths": [700, 1200], "late": (4, 5, 6, 7)},
}


def build(lengths: list[int], heads: int, head_dim: int, v_mean: float) -> KVPages:
    """A cache as mean as can be: pages in any order, unused ones and K's tails NaN, scales and means at random."""
    counts = [max(-(-n // 128), 1) for n in lengths]
    pages = KVPages.empty(sum(counts) + 3, heads, head_dim, len(lengths), max(counts) + 1)
    order, used = torch.randperm(pages.num_pages), 0
    pages.page_table.fill_(int(order[-1]))
    for seq, count in enumerate(counts):
        pages.page_table[seq, :count] = order[used : used + count]
        used += count
    pages.k.copy_(torch.randn(pages.k.shape).to(FP8))
    pages.v.copy_((torch.randn(pages.v.shape) + v_mean).to(FP8))
    for scale in (pages.k_scale, pages.v_scale):
        scale.copy_(2.0 ** torch.randint(-3, 3, scale.shape))
    for mean in (pages.k_mean, pages.v_mean):
        mean.normal_()
    pages.cache_seqlens.copy_(torch.tensor(lengths))
    k, v = pages.k.view(torch.uint8), pages.v.view(torch.uint8)
    empty = [int(pages.page_table[seq, 0]) for seq, n in enumerate(lengths) if not n]
    k[order[used:]], v[order[used:]], k[empty], v[empty] = (0x7F,) * 4
    for seq, n in enumerate(lengths):
        if n % 128:
            k[pages.page_table[seq, n // 128], :, n % 128 :] = 0x7F
    return pages


def launch(case: dict, kernel_stand_in) -> tuple:
    """Runs the launcher on a case; returns its result and float64's."""
    c = PLAIN | case
    torch.manual_seed(0)
    pages = build(c["lengths"], c["heads"], c["head_dim"], c["v_mean"])
    tokens = c["queries"] * len(c["lengths"]) if c["bounds"] is None else c["bounds"][-1] + 2
    q = torch.randn(tokens, c["heads"] * c["group"], c["head_dim"]).to(c["dtype"])
    options = {
        "cu_seqlens_q": torch.tensor(c["bounds"], dtype=torch.int32) if c["bounds"] else None,
        "max_seqlen_q": c["queries"],
        "causal": c["causal"],
        "softmax_scale": c["scale"] or c["head_dim"] ** -0.5,
        "window": c["window"],
        "softcap": c["softcap"],
        "sinks": torch.randn(q.shape[1]) if c["sinks"] else None,
        "leftpad_k": torch.tensor(c["leftpad"], dtype=torch.int32) if c["leftpad"] else None,
    }
    decode.num_sms = lambda device: c["sms"]
    decode.plan.cache_clear()  # a plan keeps what that gave
    kernels.launch.counters = lambda device, stream, count: kernel_stand_in.state[:count]
    decode.decode, original = kernel_stand_in, decode.decode
    try:
        result = decode.attention(q, pages, **options)
    finally:
        decode.decode = original
    return result, reference.attention(q, pages, **options, compute_dtype=torch.float64, out_dtype=torch.float64)


class Kernel:
    """Stands in for the jitted kernel: compiles what it is called with and, if asked, runs it."""

    jitted = decode.decode

    def __init__(self, run: bool, late: tuple[int, ...] = ()) -> None:
        self.run, self.late, self.state = run, late, torch.zeros(1024, dtype=torch.int32)

    def __getitem__(self, grid):
        return lambda *args, **options: self._launch(grid[0], args, options)

    def _launch(self, grid: int, args: tuple, options: dict) -> None:
        values = dict(zip(self.jitted.arg_names, args, strict=False)) | options
        signature, constants, attributes, arguments, memory = {}, {}, {}, [], Memory()
        addresses = {}

        def address(tensor: torch.Tensor) -> int:
            base = tensor._base if tensor._base is not None and not self._owned(tensor) else tensor
            if base.data_ptr() not in addresses:
                addresses[base.data_ptr()] = memory.add(base)
            return addresses[base.data_ptr()] + tensor.data_ptr() - base.data_ptr()

        for i, param in enumerate(self.jitted.params):
            value = values[param.name]
            if param.is_constexpr or value is None:
                signature[param.name], constants[(i,)] = "constexpr", value
            elif isinstance(value, TensorDescriptor):
                signature[param.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
                arguments.append(value)
                arguments += [*value.shape, *value.strides]
            elif isinstance(value, torch.Tensor):
                signature[param.name] = "*" + TYPES[value.dtype]
                attributes[(i,)] = [["tt.divisibility", 16]]
                arguments.append(address(value) if self.run else 0)
            else:
                signature[param.name] = "i32" if isinstance(value, int) else "fp32"
                if param.name.startswith("q_stride") and value % 16 == 0:
                    attributes[(i,)] = [["tt.divisibility", 16]]
                arguments.append(value)
        source = GluonASTSource(self.jitted, signature, constants, attributes)
        options = {k: options[k] for k in ("num_warps", "maxnreg") if k in options}
        self.compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        if self.run:
            metas = iter(self.compiled.metadata.tensordesc_meta)
            for i, value in enumerate(arguments):
                if isinstance(value, TensorDescriptor):
                    meta, base = next(metas), value.base
                    about = base.itemsize, value.shape, value.strides, meta["block_size"], 16 << meta["swizzle"]
                    arguments[i] = TensorMap(memory, address(base), *about)
            machine = Machine(self.compiled.asm["ptx"], self.compiled.metadata.shared, memory, [*arguments, 0, 0], grid)
            machine.run(late=self.late)

    @staticmethod
    def _owned(tensor: torch.Tensor) -> bool:
        return tensor.numel() == tensor._base.numel()


def emulate(name: str) -> dict:
    kernel = Kernel(run=True, late=(PLAIN | EMULATED[name])["late"])
    (out, lse), (ref, ref_lse) = launch(EMULATED[name], kernel)
    rounded = ref.to(out.dtype).double()
    scale = ref.norm()
    return {
        "case": name, "rel_err": float((out.double() - ref).norm() / scale), "rounding": float((rounded - ref).norm() / scale),
        "lse_err": float((lse - ref_lse).nan_to_num(0.0, 0.0, 0.0).abs().max()), "counters": int(kernel.state.abs().sum()),
        "same_inf": bool((lse.isinf() == ref_lse.isinf()).all()), "nan": bool(out.isnan().any() | lse.isnan().any()),
    }  # fmt: skip


def compile_case(name: str) -> dict:
    kernel = Kernel(run=False)
    kernel.compiled = None
    launch(COMPILED[name], kernel)
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "x.ptx", Path(folder) / "x.cubin"
        # Newer Tritons name a PTX version that the ptxas beside it (the one for Hopper) does not know, and use nothing of it.
        ptx.write_text(re.sub(r"\.version 9\.\d", ".version 8.7", kernel.compiled.asm["ptx"]))
        log = subprocess.run([TOOLS / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin], capture_output=True, text=True, check=True).stderr
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
    loop, loop_spills = hot_loop(sass)
    return {
        "case": name, "registers": max(int(r) for r in re.findall(r"\bR(\d+)\b", sass)) + 1,
        "spill_bytes": int(re.search(r"(\d+) bytes spill stores", log)[1]), "shared_bytes": kernel.compiled.metadata.shared,
        "loop": loop, "loop_spills": loop_spills, "warnings": " ".join(sorted(set(re.findall(r"\bC75\d\d\b|warning.*", log)))),
    }  # fmt: skip


def hot_loop(sass: str) -> tuple[int, int]:
    """Instructions of the loop over pages, and how many of them are spills: the innermost loop with MMAs."""
    code, labels, spans = [], {}, []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    for i, instruction in enumerate(code):
        branch = re.search(r"BRA\b.*`\((\.L_x_\d+)\)", instruction)
        if branch and labels.get(branch[1], i) < i and sum("HMMA" in x for x in code[labels[branch[1]] : i]) >= 8:
            spans.append(code[labels[branch[1]] : i + 1])
    loop = min(spans, key=len)
    return len(loop), sum("STL" in x or "LDL" in x for x in loop)


def main() -> None:
    mode, *words = [a for a in sys.argv[1:] if not a.startswith("--")]
    function, cases = (compile_case, COMPILED) if mode == "compile" else (emulate, EMULATED)
    matches = str.__eq__ if "--exact" in sys.argv else str.__contains__
    chosen = [name for name in cases if not words or any(matches(name, word) for word in words)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        rows = list(pool.map(function, chosen))
    if "--table" in sys.argv:
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        print("\n".join("| " + " | ".join(str(x) for x in row.values()) + " |" for row in rows))
    else:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
