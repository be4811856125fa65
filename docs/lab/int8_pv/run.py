"""Checks and times every variant beside the product on a Hopper GPU: `python -m docs.lab.int8_pv.run [words of variants]`. One table.

Kernels are compiled first, in a process each. Outputs are NaN before a call, and compared with float64 on what is stored. Times are medians
of interleaved CUDA graphs. `--dry` compiles without a GPU. A kernel that hangs ends the process after `HANG` seconds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from threading import Thread
from unittest import mock

import torch
import triton

from benchmarks.measure import exact, graph_of, interleaved, relative
from fp8attn import AttentionParams, KVPages, ops
from fp8attn.kernels import prefill
from fp8attn.kernels.compile import compiled
from fp8attn.kernels.launch import recording
from fp8attn.kernels.prefill import cut, plan

from .host import VARIANTS, LabPages, call, store, unsigned

HEADS = 32, 8
MOST = 0.02  # kernel error: 1.0 to 1.3% in the emulator
SMALL = {"1000 causal": (1, 1000, 1000), "70 on 900": (2, 70, 900), "64 on 5000": (1, 64, 5000), "3000 causal": (1, 3000, 3000)}
TIMED = {"16k causal": (1, 16384, 16384), "4 x 4k causal": (4, 4096, 4096), "4 x 64 on 16k": (4, 64, 16384)}
PRODUCT = "product"
HANG = 30.0
WATCHED = (
    PRODUCT,
    "G token in storage, page, mma",
    "G only K, page, mma",
    "D page, page, mma",
    "SDPA BF16",
)  # at which clock and power they run


class Progress:
    """Prints what is being done, and ends the process if that takes longer than `HANG`."""

    def __init__(self) -> None:
        self.start = self.last = time.perf_counter()
        self.what = "begin"
        Thread(target=self._watch, daemon=True).start()

    def __call__(self, what: str, quiet: bool = False) -> None:
        self.last, self.what = time.perf_counter(), what
        if not quiet:
            print(f"{self.last - self.start:5.1f} s: {what}", flush=True)

    def _watch(self) -> None:
        while True:
            time.sleep(1.0)
            if time.perf_counter() - self.last > HANG and self.what != "compile":
                print(f"hangs: {self.what}", flush=True)
                os._exit(1)


def inputs(seqs: int, queries: int, keys: int, device: str, heads: tuple[int, int] = HEADS):
    torch.manual_seed(0)
    q = torch.randn(seqs, queries, heads[0], 128, device=device).bfloat16()
    k, v = (torch.randn(seqs, keys, heads[1], 128, device=device).bfloat16() for _ in "kv")
    return q, k, v


def product_pages(k: torch.Tensor, v: torch.Tensor) -> KVPages:
    seqs, keys, heads, _ = k.shape
    count = -(-keys // 128)
    pages = KVPages.empty(seqs * count, heads, 128, seqs, count, k.device)
    if k.is_cuda:
        pages.page_table.copy_(torch.randperm(seqs * count, device=k.device).int().view(seqs, count))
        ops.append(pages, k.flatten(0, 1), v.flatten(0, 1))
    return pages


def product(q: torch.Tensor, pages: KVPages, out: torch.Tensor) -> torch.Tensor:
    params = AttentionParams(None, q.shape[1], True, 128**-0.5, return_lse=False)
    return prefill.prefill_attention(q, pages, params, out)[0]


def compile_one(task: tuple[str, bool, str]) -> tuple[str, float, str]:
    """Compile what a variant launches: for whole prompts, or for few queries of many keys."""
    name, few, ptxas = task
    if ptxas:
        os.environ["TRITON_PTXAS_PATH"] = ptxas
    start = time.perf_counter()
    try:
        q, k, v = inputs(1, 64 if few else 256, 5000 if few else 256, "cpu", (4, 2))
        out = torch.empty_like(q)
        with recording(dry=True) as launches, mock.patch.object(plan, "num_sms", return_value=132):
            if name == PRODUCT:
                for shape in cut.SHAPES[128]:
                    with mock.patch.object(cut, "cuts", lambda *_, shape=shape: [(shape, 2 if few else 1)]):
                        plan.make_prefill_plan.cache_clear()
                        product(q, product_pages(k, v), out)
            else:
                call(q, store(k, v, VARIANTS[name]), VARIANTS[name], True, out)
        if name == PRODUCT:
            for made in launches:
                compiled(made.kernel, made.args, made.constants)
        else:
            with unsigned():
                compiled(launches[0].kernel, launches[0].args, launches[0].constants)
            for made in launches[1:]:
                compiled(made.kernel, made.args, made.constants)
    except Exception as problem:
        return name, time.perf_counter() - start, f"{type(problem).__name__}: {problem}"[:300]
    return name, time.perf_counter() - start, ""


def precompile(names: list[str]) -> list[str]:
    """The variants that compile."""
    tasks = [(name, few, "") for few in (False, True) for name in (PRODUCT, *names)]
    broken = set()
    with ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1), get_context("spawn")) as pool:
        for name, _, problem in pool.map(compile_one, tasks):
            if problem:
                print(f"{name} does not compile: {problem}", flush=True)
                broken.add(name)
    return [name for name in names if name not in broken]


def error(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor) -> float:
    """Of some rows of the last sequence, against float64."""
    queries, keys = q.shape[1], k.shape[1]
    some = torch.tensor(sorted({i for start in (0, queries // 2, queries - 16) for i in range(max(start, 0), min(start + 16, queries))}))
    some = some.to(q.device)
    return relative([(out[-1, some], exact(q[-1, some], k[-1], v[-1], 128**-0.5, keys - queries + some))])


def check(names: list[str], device: str, progress: Progress) -> tuple[list[str], dict[str, list[str]]]:
    """The variants that are right, and the errors of all: of the kernel, and with storage."""
    rows: dict[str, list[str]] = {name: [] for name in (PRODUCT, *names)}
    right = dict.fromkeys(names, True)
    for case in SMALL.values():
        q, k, v = inputs(*case, device)
        pages = product_pages(k, v)
        out = product(q, pages, torch.full_like(q, torch.nan))
        held = [pages.read(case[0] - 1, case[2], torch.float64)[i][None] for i in range(2)]
        rows[PRODUCT].append(f"{100 * error(q, *held, out):.2f}/{100 * error(q, k, v, out):.2f}")
        for name in names:
            progress(f"check {name}, {case[1]} queries of {case[2]} keys", quiet=True)
            try:
                lab, out = store(k, v, VARIANTS[name]), torch.full_like(q, torch.nan)
                with unsigned():
                    call(q, lab, VARIANTS[name], True, out)
                torch.cuda.synchronize()
                off = error(q, lab.k, lab.v, out)
                same = all(torch.equal(out, call_again(q, lab, name)) for _ in range(3))
                right[name] &= off < MOST and same
                if not same:
                    print(f"{name}, {case[1]} queries of {case[2]} keys: other bits in a later run", flush=True)
                rows[name].append(f"{100 * off:.2f}/{100 * error(q, k, v, out):.2f}")
            except torch.AcceleratorError:
                raise  # nothing more can be measured in this process
            except Exception as problem:
                right[name] = False
                rows[name].append(f"{type(problem).__name__}: {problem}"[:80])
    return [name for name in names if right[name]], rows


def call_again(q: torch.Tensor, lab: LabPages, name: str) -> torch.Tensor:
    out = torch.full_like(q, torch.nan)
    with unsigned():
        return call(q, lab, VARIANTS[name], True, out)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Callable:
    """The fastest of torch's in BF16 that takes the case: cuDNN's, or FlashAttention-2."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    bias = None
    if q.shape[2] != k.shape[2]:
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(q.shape[2], k.shape[2])

    def run() -> torch.Tensor:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
            if bias is not None:
                k2, v2 = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
                return torch.nn.functional.scaled_dot_product_attention(q, k2, v2, bias)
            return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    run()
    return run


def clock_and_power(run: Callable, seconds: float = 0.7) -> str:
    """MHz and W while a call repeats."""
    try:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "40"]
        watch = subprocess.Popen(query, stdout=subprocess.PIPE, text=True)
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            for _ in range(5):
                run()
            torch.cuda.synchronize()
        watch.terminate()
        found = [tuple(map(float, line.split(","))) for line in watch.communicate()[0].splitlines() if line.count(",") == 1]
        found = found[len(found) // 2 :]
        return "{:.0f} MHz, {:.0f} W".format(*(statistics.median(x) for x in zip(*found, strict=True)))
    except Exception as problem:
        return f"not known: {problem}"[:80]


def main() -> None:
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    names = [name for name in VARIANTS if not words or any(word in name for word in words)]
    progress = Progress()
    progress("compile")
    names = precompile(names)
    progress("check")
    if "--dry" in sys.argv:
        return
    right, rows = check(names, "cuda", progress)
    for name in names:
        if name not in right:
            print(f"not right, so not timed: {name}: {rows[name]}")
    times: dict[str, dict[str, float]] = {}
    for case, sizes in TIMED.items():
        progress(case)
        q, k, v = inputs(*sizes, "cuda")
        calls, kept = {}, []
        pages, out = product_pages(k, v), torch.empty_like(q)
        calls[PRODUCT], result = graph_of(lambda q=q, pages=pages, out=out: product(q, pages, out))
        kept += [pages, out, result]
        for name in right:
            lab, out = store(k, v, VARIANTS[name]), torch.empty_like(q)
            with unsigned():
                calls[name], result = graph_of(lambda q=q, lab=lab, name=name, out=out: call(q, lab, VARIANTS[name], True, out))
            lab.k = lab.v = None
            kept += [lab, out, result]
        if sizes[1] == sizes[2]:
            try:
                calls["SDPA BF16"] = sdpa(q, k, v)
            except Exception as problem:
                print(f"SDPA: {problem}"[:200])
        times[case] = interleaved(calls, 11, sample_ms=12)
        if case == next(iter(TIMED)):
            progress("clocks", quiet=True)
            for name in WATCHED:
                if name in calls:
                    print(f"       {name}: {clock_and_power(calls[name])}", flush=True)
        del calls, kept, pages
    progress("done")
    flops = {case: s * 4 * 128 * HEADS[0] * (n * m - n * n / 2) for case, (s, n, m) in TIMED.items()}
    print(f"\n{torch.cuda.get_device_name()}, Triton {triton.__version__}. Errors in %: of the kernel/with storage\n")
    print("| | " + " | ".join(SMALL) + " | " + " | ".join(f"{case}: us, TFLOPS, of the product" for case in TIMED) + " |")
    print("|" + "---|" * (1 + len(SMALL) + len(TIMED)))
    for name in (PRODUCT, *names, "SDPA BF16"):
        cells = [name, *rows.get(name, [""] * len(SMALL))]
        for case, found in times.items():
            ms = found.get(name)
            cells.append("" if ms is None else f"{1000 * ms:.1f}, {flops[case] / ms * 1e-9:.0f}, {found[PRODUCT] / ms:.3f}")
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
