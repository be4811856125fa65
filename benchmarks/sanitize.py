"""NVIDIA's compute-sanitizer over the Hopper kernels and append: memory, races in shared memory, reads of what nobody wrote.

    PYTHONPATH=src python -m benchmarks.sanitize [tool-kernel substring ...] [--seconds N] [--out FILE]

A reduced grid, since every access is checked: ragged batches with empty sequences and lengths that are no multiple of anything, every
head_dim that has a kernel of its own, and all options at once. Every allocation is one of CUDA's own, so that an access behind a tensor's
end is one behind an allocation's. What the grid compiles is compiled before, outside the sanitizer.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from fp8attn import ops
from fp8attn.kernels import decode, prefill
from fp8attn.layout import FP8

from .problem import DEVICE, Shape, hold, ours
from .results import ROOT, write

SOURCES = ("src/fp8attn/kernels", "src/fp8attn/ops.py", "src/fp8attn/layout.py", "benchmarks/sanitize.py", "benchmarks/problem.py")
TOOLS = ("memcheck", "racecheck", "initcheck")
DIMS = (64, 128, 256)


def tokens(count: int, heads: int, dim: int) -> torch.Tensor:
    return torch.randn(count, heads, dim, device=DEVICE).bfloat16()


def held(shape: Shape):
    return hold(shape, *(tokens(sum(shape.keys), shape.kv_heads, shape.dim) for _ in "kv"))


def check_prefill() -> None:
    for dim in DIMS:
        shape = Shape((1, 300, 0, 130), (1, 77, 0, 130), 4, 2, dim, True)
        pages, q = held(shape), tokens(sum(shape.queries), 4, dim)
        ours(prefill.attention, shape, q, pages)()
        ours(prefill.attention, shape, q.to(FP8), pages)()
    shape = Shape((300, 200), (150, 150), 4, 2, 128, True)
    ops.attention(
        tokens(300, 4, 128), held(shape), window=100, softcap=20.0, sinks=torch.randn(4, device=DEVICE),
        leftpad_k=torch.tensor([5, 131], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


def check_decode() -> None:
    for dim in DIMS:
        for queries in (1, 3):
            shape = Shape((1, 1500, 0, 130), (queries,) * 4, 4, 2, dim, True)
            ours(decode.attention, shape, tokens(4 * queries, 4, dim).half(), held(shape))()
    shape = Shape((300, 200), (2, 2), 4, 2, 128, True)
    ops.attention(
        tokens(4, 4, 128), held(shape), window=100, softcap=20.0, sinks=torch.randn(4, device=DEVICE),
        leftpad_k=torch.tensor([5, 131], dtype=torch.int32, device=DEVICE),
    )  # fmt: skip


def check_append() -> None:
    for dim in DIMS:
        pages = held(Shape((1, 300, 0, 127), (0,) * 4, 4, 2, dim, True))
        # A step of the first two, whose last pages have room, with rotary embedding.
        angle = torch.rand(2, dim // 2, device=DEVICE)
        ends = torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32, device=DEVICE)
        ops.append(
            pages, *(tokens(2, 2, dim) for _ in "kv"), cu_seqlens=ends, max_seqlen=1, rope_cos=angle.cos(), rope_sin=angle.sin()
        )  # fmt: skip


KERNELS = {"prefill": check_prefill, "decode": check_decode, "append": check_append}


def parse(output: str) -> dict[str, int]:
    """What a tool counted: errors, and what racecheck calls warnings; nothing if it did not get to its summary."""
    if found := re.search(r"RACECHECK SUMMARY: \d+ hazards? displayed \((\d+) errors?, (\d+) warnings?\)", output):
        return {"errors": int(found[1]), "warnings": int(found[2])}
    if found := re.search(r"ERROR SUMMARY: (\d+) errors?", output):
        return {"errors": int(found[1])}
    return {}


def sanitizer() -> str:
    found = shutil.which("compute-sanitizer") or next((str(p) for p in Path("/usr/local").glob("cuda*/bin/compute-sanitizer")), None)
    if found is None:
        sys.exit("there is no compute-sanitizer here: it comes with the CUDA toolkit")
    return found


def run(tool: str, kernel: str, seconds: int) -> dict:
    command = [sanitizer(), "--tool", tool, "--report-api-errors", "no", "--print-limit", "20"]
    command += [sys.executable, "-m", "benchmarks.sanitize", "--run", kernel]
    start = time.time()
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        )
        output, finished = done.stdout + done.stderr, "grid done" in done.stdout
    except subprocess.TimeoutExpired as expired:
        output, finished = (expired.stdout or b"").decode(), False
    row = {"case": f"{tool}-{kernel}", "impl": "fp8attn", "finished": finished, **parse(output), "seconds": round(time.time() - start, 1)}
    if not finished or row.get("errors") or row.get("warnings"):
        print(f"== {tool} {kernel}\n{output[-6000:]}", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("which", nargs="*", help="substrings of tool-kernel; none: all")
    parser.add_argument("--seconds", type=int, default=150, help="for each")
    parser.add_argument("--out", type=Path, default=ROOT / "results/h100/sanitize.json")
    parser.add_argument("--run", choices=KERNELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        KERNELS[args.run]()
        torch.cuda.synchronize()
        print("grid done", flush=True)
        return
    chosen = [(t, k) for t in TOOLS for k in KERNELS if not args.which or any(word in f"{t}-{k}" for word in args.which)]
    with ThreadPoolExecutor() as pool:
        plain = [sys.executable, "-m", "benchmarks.sanitize", "--run"]
        list(pool.map(lambda kernel: subprocess.run([*plain, kernel], check=True), {kernel for _, kernel in chosen}))
        rows = list(pool.map(lambda which: run(*which, args.seconds), chosen))
    print(*rows, sep="\n", flush=True)
    write(args.out, rows, SOURCES)
    sys.exit(any(row.get("errors", 1) or row.get("warnings") or not row["finished"] for row in rows))


if __name__ == "__main__":
    main()
