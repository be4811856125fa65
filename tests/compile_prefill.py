"""Compiles, without a GPU, what `kernels.prefill.attention` would launch, and prints what ptxas and the machine code say of it as JSON.

A process of its own (`test_compile_prefill.py` runs it), because a process with TRITON_INTERPRET=1 cannot compile. The launcher itself
runs, on CPU tensors, with the kernel replaced by a recorder: what is compiled is what it asks for.

    python tests/compile_prefill.py [case substring ... | --exact case ...] [--table] [--keep DIR]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from fp8attn import KVPages, kernels
from fp8attn.kernels import prefill

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.float8_e4m3fn: "fp8e4nv"}
EVERYTHING = {"window": 300, "softcap": 30.0, "sinks": True, "leftpad_k": True, "cu_seqlens_q": True}
CASES = {f"d{d}": {"head_dim": d} for d in (64, 80, 96, 128, 192, 256)} | {
    "d128-fp16": {"head_dim": 128, "dtype": torch.float16},
    "d128-q8": {"head_dim": 128, "dtype": torch.float8_e4m3fn},
    "d128-long": {"head_dim": 128, "long": True},
    "d128-q8-long": {"head_dim": 128, "long": True, "dtype": torch.float8_e4m3fn},
    "d128-no-lse": {"head_dim": 128, "lse": False},
    "d128-q8-no-lse": {"head_dim": 128, "lse": False, "dtype": torch.float8_e4m3fn},
    "d128-long-no-lse": {"head_dim": 128, "lse": False, "long": True},
    "d128-q8-long-no-lse": {"head_dim": 128, "lse": False, "long": True, "dtype": torch.float8_e4m3fn},
    "d128-long-ragged-no-lse": {"head_dim": 128, "lse": False, "long": True, "cu_seqlens_q": True},
    "d128-split": {"head_dim": 128, "splits": 2},
    "d128-long-split": {"head_dim": 128, "splits": 2, "long": True},
    "d128-q8-long-split": {"head_dim": 128, "splits": 2, "long": True, "dtype": torch.float8_e4m3fn},
    "d128-ragged": {"head_dim": 128, "cu_seqlens_q": True},
    "d128-long-ragged": {"head_dim": 128, "long": True, "cu_seqlens_q": True},
    "d128-q8-long-ragged": {"head_dim": 128, "long": True, "dtype": torch.float8_e4m3fn, "cu_seqlens_q": True},
    "d256-q8": {"head_dim": 256, "dtype": torch.float8_e4m3fn},
    "d256-no-lse": {"head_dim": 256, "lse": False},
    "d256-q8-no-lse": {"head_dim": 256, "lse": False, "dtype": torch.float8_e4m3fn},
    "d256-ragged": {"head_dim": 256, "cu_seqlens_q": True},
    "d256-ragged-no-lse": {"head_dim": 256, "lse": False, "cu_seqlens_q": True},
    "d64-window": {"head_dim": 64, "window": 300},
    "d128-window": {"head_dim": 128, "window": 300},
    "d256-window": {"head_dim": 256, "window": 300},
    "d64-rope": {"head_dim": 64, "rotary": 64},
    "d80-rope": {"head_dim": 80, "rotary": 80},
    "d128-rope": {"head_dim": 128, "rotary": 128},
    "d128-rope-pairs": {"head_dim": 128, "rotary": 64, "interleaved": True},
    "d128-long-rope": {"head_dim": 128, "long": True, "rotary": 128},
    "d256-rope": {"head_dim": 256, "rotary": 256},
    "d256-rope-pairs": {"head_dim": 256, "rotary": 256, "interleaved": True},
    "d64-all": dict(head_dim=64, **EVERYTHING),
    "d128-all": dict(head_dim=128, **EVERYTHING),
    "d128-long-all": dict(head_dim=128, long=True, **EVERYTHING),
    "d256-all": dict(head_dim=256, **EVERYTHING),
}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


@dataclass
class Compiled:
    case: str
    triton: str
    registers: int = 0  # what ptxas starts from; a multiplying thread has Shape.regs
    spill_bytes: int = 0  # stored, in the whole kernel
    shared_bytes: int = 0
    instructions: int = 0
    loop: int = 0  # instructions of the hot loop (the longest of the warpgroups')
    loop_spills: int = 0  # spill loads and stores in it
    serialized: str = ""  # ptxas's C75xx
    unset: str = ""  # the first MMA or uniform instruction that reads a uniform register which not every path to it has written


def launch(head_dim: int, dtype=torch.bfloat16, window=0, softcap=0.0, sinks=False, leftpad_k=False, cu_seqlens_q=False, splits=1,
           long=False, rotary=0, interleaved=False, lse=True):  # fmt: skip
    """The arguments of one launch, by name."""
    recorded = []

    class Recorder:
        def __getitem__(self, grid):
            return lambda *args, **constants: recorded.append(dict(zip(kernel.arg_names, args, strict=False)) | constants)

    kernel, prefill._prefill = prefill._prefill, Recorder()
    prefill.num_sms = lambda device: 132
    prefill._cuts = lambda width, *_: [(prefill.SHAPES[width][1 if long else 0], splits)]
    prefill.combine = lambda *_: None
    kernels.launch.counters = lambda device, stream, count: torch.zeros(count, dtype=torch.int32)
    prefill.plan.cache_clear()  # a plan keeps what these gave
    pages = KVPages.empty(8, 2, head_dim, 2, 4)
    tables = torch.zeros(64, rotary // 2) if rotary else None
    prefill.attention(
        torch.zeros(64, 4, head_dim).to(dtype), pages, cu_seqlens_q=torch.zeros(3, dtype=torch.int32) if cu_seqlens_q else None,
        max_seqlen_q=32, causal=True, softmax_scale=head_dim**-0.5, window=window, softcap=softcap,
        sinks=torch.zeros(4) if sinks else None, leftpad_k=torch.zeros(2, dtype=torch.int32) if leftpad_k else None,
        rope_cos=tables, rope_sin=tables, rope_interleaved=interleaved, return_lse=lse,
    )  # fmt: skip
    prefill._prefill = kernel
    return kernel, recorded[0]


def compile_case(case: str, keep: str | None = None) -> Compiled:
    kernel, values = launch(**CASES[case])
    signature, constants, attributes = {}, {}, {}
    for i, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or value is None:
            signature[param.name] = "constexpr"
            constants[(i,)] = value
        elif isinstance(value, TensorDescriptor):
            signature[param.name] = f"tensordesc<{TYPES[value.base.dtype]}{list(value.block_shape)},{value.layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[param.name] = "*" + TYPES[value.dtype]
            attributes[(i,)] = [["tt.divisibility", 16]]
        else:
            signature[param.name] = "i32" if isinstance(value, int) else "fp32"
    source = GluonASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    result = Compiled(case, triton.__version__, shared_bytes=compiled.metadata.shared)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(keep or scratch)
        ptx, cubin = folder / f"{case}.ptx", folder / f"{case}.cubin"
        # Newer Tritons name a PTX version that the ptxas beside it (the one for Hopper) does not know, and use nothing of it.
        ptx.write_text(re.sub(r"\.version 9\.\d", ".version 8.7", compiled.asm["ptx"]))
        log = subprocess.run([TOOLS / "ptxas", "-v", "-arch=sm_90a", ptx, "-o", cubin], capture_output=True, text=True, check=True).stderr
        sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], capture_output=True, text=True, check=True).stdout
        if keep:
            (folder / f"{case}.sass").write_text(sass)
    result.registers = int(re.search(r"Used (\d+) registers", log)[1])
    result.spill_bytes = int(re.search(r"(\d+) bytes spill stores", log)[1])
    result.serialized = " ".join(sorted(set(re.findall(r"\bC75\d\d\b", log))))
    read_loops(sass, result)
    result.unset = unset_register(sass)
    return result


def unset_register(sass: str) -> str:
    """ptxas 12.8 shares what it computes of a wgmma descriptor between two branches, and may compute it in one of them only."""
    code, labels = [], {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(line[line.index(instruction[1]) :].replace(".reuse", ""))
    reads, writes, follow = [], [], []
    for i, text in enumerate(code):
        predicate, name, operands = re.match(r"(@\S+\s+)?([\w.]+)\s*(.*?)\s*;", text).groups()
        operands = [x for x in re.split(r",\s*(?![^\[]*\])", operands) if not re.fullmatch(r"!?U?P[T\d]", x)]
        numbers = [[int(n) for n in re.findall(r"\bUR(\d+)", x)] for x in operands]
        written = re.match(r"U(?!TMA|BLK|SYNC|CGA)|R2UR|S2UR|VOTEU|REDUX", name) is not None
        wide = 2 if ".64" in name or ".WIDE" in name else 1
        writes.append({n + k for n in (numbers[:1] or [[]])[0] for k in range(wide)} if written else set())
        if name.startswith("QGMMA"):  # of its four registers those of a left operand in registers count for nothing
            first = 2 if re.match(r"R\d", operands[1]) else 0
            reads.append({numbers[1 + first // 2][0] + k for k in range(first, 4)})
        else:
            wide = 2 if ".64" in name else 1
            reads.append({n + k for x in numbers[1:] for n in x for k in range(wide)} if written else set())
        ends = name.split(".")[0] in ("BRA", "BRX", "EXIT", "RET") and not predicate
        jumps = [] if name == "BSSY" else re.findall(r"\.L_x_\d+", text)  # that one says where branches meet again
        follow.append([labels[x] for x in jumps if x in labels] + ([] if ends else [i + 1]))
    known = {0: set()}
    todo = [0]
    while todo:
        i = todo.pop()
        after = known[i] | writes[i]
        for j in follow[i]:
            if j < len(code) and (j not in known or not known[j] <= after):
                known[j] = known[j] & after if j in known else after
                todo.append(j)
    return next((code[i].split(";")[0] for i in sorted(known) if not reads[i] <= known[i]), "")


def read_loops(sass: str, result: Compiled) -> None:
    """The hot loops are the innermost that multiply and do not mask."""
    code, labels, spans = [], {}, set()
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(code)
        elif instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            code.append(instruction[1])
    for i, instruction in enumerate(code):
        branch = re.search(r"BRA\b.*`\((\.L_x_\d+)\)", instruction)
        if branch and labels.get(branch[1], i) < i:
            spans.add((labels[branch[1]], i))
    result.instructions = len(code)
    for start, end in spans:
        body = code[start : end + 1]
        # Waits whose retries ptxas moved to the end of the code look like loops too; they enclose exits.
        if any("EXIT" in x or "USETMAXREG" in x for x in body) or not any("QGMMA" in x for x in body):
            continue
        if any(start <= a and b <= end and (a, b) != (start, end) and b - a > 100 for a, b in spans):
            continue
        if sum("FSEL" in x for x in body) < 32:
            result.loop = max(result.loop, len(body))
            result.loop_spills = max(result.loop_spills, sum("STL" in x or "LDL" in x for x in body))


if __name__ == "__main__":
    words = [a for a in sys.argv[1:] if not a.startswith("--")]
    keep = words.pop() if "--keep" in sys.argv else None
    matches = str.__eq__ if "--exact" in sys.argv else str.__contains__
    chosen = [case for case in CASES if not words or any(matches(case, word) for word in words)]
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(compile_case, chosen, [keep] * len(chosen)))
    if "--table" in sys.argv:
        print("| case | regs | spilled bytes | shared | instructions | hot loop | spills in it | C75xx | unset |\n|" + "---|" * 9)
        for r in results:
            cells = ["none" if cell == "" else str(cell) for field, cell in asdict(r).items() if field != "triton"]
            print("| " + " | ".join(cells) + " |")
    else:
        print(json.dumps([asdict(r) for r in results]))
