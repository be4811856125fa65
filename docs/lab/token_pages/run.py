"""Checks and times decode over token scales, the copy and the append beside the product: `python -m docs.lab.token_pages.run [parts]`, on a
Hopper GPU, about a minute. Parts are `decode`, `copy` and `append`. `--dry` compiles without a GPU.

Outputs are NaN before a call, and compared with float64 on what is stored, or bit for bit. Times are medians of interleaved CUDA graphs.
"""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from unittest import mock

import torch
import triton

from benchmarks.append import ceiling
from benchmarks.measure import error, graph_of, interleaved, poisoned
from benchmarks.problem import DEVICE, K, Run, Shape, ours, steps
from docs.lab.int8_pv import run as int8_pv
from fp8attn import AttentionParams, KVPages
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.kernels import append as kernels_append
from fp8attn.kernels import decode, prefill
from fp8attn.kernels.compile import compiled
from fp8attn.kernels.decode import plan
from fp8attn.kernels.launch import recording
from fp8attn.params import Append

from .append import append
from .check import appended_to, errors, uneven, wrong_copies, wrong_rows
from .copy import copy, target_of
from .decode import token_decode
from .layout import TokenPages, nbytes, store

MOST_ERROR = 4e-4  # FP16 outputs: 3e-4 of the kernel's, 2e-4 of rounding
SMALL = {  # lengths, KV heads, group, head_dim, query tokens, window
    "D128 group 4": ([300, 1, 129, 5000], 2, 4, 128, 1, 0),
    "D128 group 8": ([3000, 0, 128, 77], 2, 8, 128, 1, 0),
    "D128 group 1": ([3000, 40], 4, 1, 128, 1, 0),
    "D128 group 4, 4 queries": ([3000, 131, 4], 2, 4, 128, 4, 0),
    "D128 group 4, 8 queries": ([700, 131, 9], 2, 4, 128, 8, 0),
    "D128 window": ([900, 130], 1, 4, 128, 2, 200),
    "D64 group 7": ([7000, 5], 2, 7, 64, 1, 0),
    "D64 group 4, 3 queries": ([700, 5], 2, 4, 64, 3, 0),
    "D256 group 8": ([3000, 128], 2, 8, 256, 1, 0),
    "D256 group 8, 4 queries": ([300, 128], 2, 8, 256, 4, 0),
}
TIMED = {
    "1 x 8k": steps(8 * K), "1 x 128k": steps(128 * K), "8 x 32k": steps(*(32 * K,) * 8), "16 x 8k": steps(*(8 * K,) * 16),
    "64 x 8k": steps(*(8 * K,) * 64), "128 x 2k": steps(*(2 * K,) * 128), "16 x 8k, 4 queries": steps(*(8 * K,) * 16, queries=4),
    "16 x 8k, group 1": steps(*(8 * K,) * 16, group=1), "16 x 8k, D64 14/2": steps(*(8 * K,) * 16, kv_heads=2, group=7, dim=64),
    "64 x 8k, D64 14/2": steps(*(8 * K,) * 64, kv_heads=2, group=7, dim=64),
    "16 x 8k, D256 16/2": steps(*(8 * K,) * 16, kv_heads=2, group=8, dim=256),
    "64 x 8k, D256 16/2": steps(*(8 * K,) * 64, kv_heads=2, group=8, dim=256),
}  # fmt: skip
PREFILL = {
    "16k causal": Shape((16 * K,), (16 * K,), 32, 8, 128, True), "2k on 128k": Shape((128 * K,), (2 * K,), 32, 8, 128, True),
    "512 on 128k": Shape((128 * K,), (512,), 32, 8, 128, True), "4 x 64 on 16k": Shape((16 * K,) * 4, (64,) * 4, 32, 8, 128, True),
    "4 x 16k causal": Shape((16 * K,) * 4, (16 * K,) * 4, 32, 8, 128, True),
}  # fmt: skip
APPENDS = {"1 x 64k": (1, 64 * K, 0), "8 x 4k after 100": (8, 4 * K, 100), "1 x 8k": (1, 8 * K, 0)}
ROUNDS = 30


def parameters(queries: int, head_dim: int, window: int = 0) -> AttentionParams:
    return AttentionParams(None, queries, True, head_dim**-0.5, window=window, return_lse=True)


def biased(pages: TokenPages) -> TokenPages:
    """The same pages with V's codes plus 128."""
    other = TokenPages(pages.pool.clone(), pages.page_table, pages.lengths, pages.head_dim)
    other.v.view(torch.uint8).bitwise_xor_(0x80)
    return other


def todays(tokens: TokenPages) -> KVPages:
    """Pages of the same tokens in today's form, in random order."""
    made = target_of(tokens, int(tokens.lengths.max()))
    copy(tokens, made)
    order = torch.randperm(len(made.pool), device=DEVICE)
    table = torch.empty_like(made.page_table).view(-1)
    table[order] = made.page_table.view(-1)
    return made.with_pool(made.pool[order]).with_tables(table.view(made.page_table.shape), made.cache_seqlens)


# Compiling


def small_problem(name: str, device: str = DEVICE) -> tuple[TokenPages, torch.Tensor, AttentionParams]:
    lengths, heads, group, head_dim, queries, window = SMALL[name]
    torch.manual_seed(0)
    k, v = (uneven(sum(lengths), heads, head_dim, spread).to(device) for spread in (0.3, 1.0))
    q = torch.randn(len(lengths) * queries, heads * group, head_dim).half().to(device)
    return store(k, v, lengths), q, parameters(queries, head_dim, window)


def compile_one(task: tuple[str, str]) -> tuple[tuple[str, str], float, str]:
    kind, name = task
    torch.set_num_threads(1)
    start = time.perf_counter()
    if kind == "prefill":
        return task, *int8_pv.compile_one((int8_pv.PRODUCT, name == "few", ""))[1:]
    try:
        with (
            recording(dry=True) as launches, mock.patch.object(plan, "num_sms", return_value=132),
            mock.patch.object(kernels_append, "num_sms", return_value=132),
            mock.patch.object(kernels_append, "is_native", return_value=True),
        ):  # fmt: skip
            if kind in ("product", "token", "biased"):
                shape = TIMED[name]
                held = (1,) * len(shape.keys)
                q = torch.randn(sum(shape.queries), shape.q_heads, shape.dim).half()
                params = parameters(shape.queries[0], shape.dim)
                if kind == "product":
                    pages = KVPages.empty(len(held), shape.kv_heads, shape.dim, len(held), 1)
                    decode.decode_attention(q, pages, params)
                else:
                    k = torch.randn(len(held), shape.kv_heads, shape.dim)
                    token_decode(q, store(k, k, list(held)), params, kind == "biased")
            elif kind == "small":
                pages, q, params = small_problem(name, "cpu")
                token_decode(q, pages, params)
            else:
                head_dim = int(name)
                k = torch.randn(200, 8, head_dim).bfloat16()
                pages = store(k, k, [200])
                if kind == "copy":
                    copy(pages, target_of(pages, 200))
                elif kind == "append":
                    append(pages, k, k, 200)
                else:
                    kernels_append.append(KVPages.empty(2, 8, head_dim, 1, 2), k, k, Append(None, 200, advance=False))
        for made in launches:
            compiled(made.kernel, made.args, made.constants)
    except Exception as problem:
        return task, time.perf_counter() - start, f"{type(problem).__name__}: {problem}"[-600:]
    return task, time.perf_counter() - start, ""


def precompile(parts: list[str]) -> None:
    tasks = []
    if "decode" in parts:
        kinds = {(x.dim, x.q_heads // x.kv_heads, x.queries[0], len(x.keys) > 32): name for name, x in TIMED.items()}
        tasks += [(kind, name) for name in kinds.values() for kind in ("product", "token", "biased")] + [("small", name) for name in SMALL]
    tasks += [("copy", name) for name in ("64", "128", "256")]
    if "copy" in parts:
        tasks = [("prefill", "few"), ("prefill", "whole"), *tasks]
    if "append" in parts:
        tasks += [("append", name) for name in ("64", "128", "256")] + [("product append", "128")]
    with ProcessPoolExecutor(min(len(tasks), os.cpu_count() or 1), get_context("spawn")) as pool:
        for task, seconds, problem in pool.map(compile_one, tasks):
            if problem or seconds > 20:
                print(f"compile {task}: {seconds:.0f} s {problem}", flush=True)


# Decode


def check_decode(progress: int8_pv.Progress) -> None:
    for name, (lengths, *_, queries, window) in SMALL.items():
        progress(f"check decode {name}", quiet=True)
        pages, q, params = small_problem(name)
        with poisoned():
            out, lse = token_decode(q, pages, params)
            again = [token_decode(q, pages, params)[0] for _ in range(3)]
        off = errors(pages, q, out, lse, queries, window)
        same = all(torch.equal(out, other) for other in again)
        print(f"decode, {name}, {lengths}: {off:.2e}{'' if same else ', OTHER BITS'}", flush=True)
        assert off < MOST_ERROR and same, name


def decode_row(name: str, shape: Shape) -> None:
    q, k, v = shape.inputs(dtype=torch.float16)
    for x in (k, v):
        x *= torch.exp(0.3 * torch.randn(len(x), 1, 1, device=DEVICE)).half()
    tokens = store(k, v, list(shape.keys), spare=1)
    pages = todays(tokens)
    plus, params = biased(tokens), parameters(shape.queries[0], shape.dim)
    call = ours(decode.decode_attention, shape, q, pages)
    calls = {
        "product": call, "again": call, "token": lambda q=q, x=tokens, p=params: token_decode(q, x, p)[0],
        "biased": lambda q=q, x=plus, p=params: token_decode(q, x, p, True)[0],
    }  # fmt: skip
    graphs = {key: graph_of(value) for key, value in calls.items()}
    us = {key: 1000 * ms for key, ms in interleaved({key: x[0] for key, x in graphs.items()}, ROUNDS, flush=True).items()}
    read = lambda seq: pages.read(seq, shape.keys[seq], torch.float64)  # noqa: E731
    off = error(shape, graphs["product"][1], Run(call, q, read)), error(shape, graphs["token"][1], Run(call, q, tokens.read))
    same = torch.equal(graphs["biased"][1], graphs["token"][1])
    ratio = (2 * PAGE_SIZE * shape.dim + 512) / (2 * PAGE_SIZE * shape.dim + 32)
    share = [us["product"] * ratio / us[key] for key in ("token", "biased")]
    print(f"| {name} | {ratio:.4f} | {us['product']:.2f} | {us['again']:.2f} | {off[0]:.1e} | {us['token']:.2f} | {off[1]:.1e} | "
          f"{share[0]:.3f} | {us['biased']:.2f}{'' if same else ' WRONG'} | {share[1]:.3f} |", flush=True)  # fmt: skip
    assert off[1] < MOST_ERROR, name


def time_decode(progress: int8_pv.Progress) -> None:
    print("\n| decode | bytes | product, us | again | error | token, us | error | of the share of bytes | biased, us | of the share |")
    print("|---" * 10 + "|")
    for name, shape in TIMED.items():
        progress(f"time {name}", quiet=True)
        decode_row(name, shape)


# The copy


def check_copy(progress: int8_pv.Progress) -> None:
    for head_dim in (64, 128, 256):
        progress(f"check copy {head_dim}", quiet=True)
        torch.manual_seed(0)
        lengths = [1000, 0, 128, 5, 3000]
        pages = store(*(uneven(sum(lengths), 3, head_dim, 1.0).to(DEVICE) for _ in "kv"), lengths)
        target = target_of(pages, 3000)
        target.pool.fill_(0x7F)
        copy(pages, target)
        wrong = wrong_copies(pages, target)
        print(f"copy, head_dim {head_dim}, {lengths}, wrong: {wrong}", flush=True)
        assert not wrong


def copy_row(name: str, shape: Shape) -> None:
    q, k, v = shape.inputs()
    for x in (k, v):
        x *= torch.exp(0.3 * torch.randn(len(x), 1, 1, device=DEVICE)).bfloat16()
    tokens = store(k, v, list(shape.keys), spare=1)
    pages = todays(tokens)
    target = target_of(tokens, max(shape.keys))
    params = parameters(shape.queries[0], shape.dim)._replace(return_lse=False)
    attend = lambda x, q=q, p=params: prefill.prefill_attention(q, x, p)[0]  # noqa: E731
    copy(tokens, target)
    wrong = wrong_copies(tokens, target, 2)
    assert not wrong, wrong
    calls = {
        "product": lambda: attend(pages), "again": lambda: attend(pages), "on the copy": lambda: attend(target),
        "both": lambda: (copy(tokens, target), attend(target))[1],
    }  # fmt: skip
    graphs = {key: graph_of(value) for key, value in calls.items()}
    us = {key: 1000 * ms for key, ms in interleaved({key: x[0] for key, x in graphs.items()}, 9, sample_ms=10).items()}
    source, other = tokens.pool.view(-1), torch.empty_like(tokens.pool.view(-1))
    alone = {"copy": graph_of(lambda: copy(tokens, target))[0], "memory": graph_of(lambda: other.copy_(source))[0]}
    us |= {key: 1000 * ms for key, ms in interleaved(alone, 21, flush=True).items()}
    moved = sum(-(-n // PAGE_SIZE) for n in shape.keys) * shape.kv_heads * (2 * nbytes(shape.dim) - 128 - 512)
    read = lambda seq: pages.read(seq, shape.keys[seq], torch.float64)  # noqa: E731
    off = error(shape, graphs["product"][1], Run(attend, q, read)), error(shape, graphs["both"][1], Run(attend, q, tokens.read))
    print(f"| {name} | {us['product']:.1f} | {us['again']:.1f} | {us['on the copy']:.1f} | {us['both']:.1f} | "
          f"{us['both'] / us['product']:.4f} | {us['copy']:.2f} | {moved / us['copy'] * 1e-3:.0f} | {us['memory']:.2f} | "
          f"{2 * source.numel() / us['memory'] * 1e-3:.0f} | {off[0]:.4f}, {off[1]:.4f} |", flush=True)  # fmt: skip
    assert off[1] < 0.06, name


def time_copy(progress: int8_pv.Progress) -> None:
    print("\n| prefill | product, us | again | on the copy | copy and prefill | of the product | copy alone, us | GB/s | memory copy, us "
          "| GB/s | error: product, copy |\n" + "|---" * 11 + "|")  # fmt: skip
    for name, shape in PREFILL.items():
        progress(f"time {name}", quiet=True)
        copy_row(name, shape)


# The append


def check_append(progress: int8_pv.Progress) -> None:
    for head_dim in (64, 128, 256):
        for held in (0, 40):
            progress(f"check append {head_dim}", quiet=True)
            torch.manual_seed(0)
            new, seqs = 300, 2
            k, v = (uneven(seqs * (held + new), 3, head_dim, 1.0).bfloat16().to(DEVICE) for _ in "kv")
            expected = store(k, v, [held + new] * seqs)
            pages = appended_to(expected, held)
            rest = [x.view(seqs, held + new, 3, head_dim)[:, held:].reshape(seqs * new, 3, head_dim) for x in (k, v)]
            append(pages, *rest, new)
            wrong = wrong_rows(pages, expected)
            print(f"append, head_dim {head_dim}, {new} tokens after {held}, wrong: {wrong}", flush=True)
            assert not wrong


def append_row(name: str, seqs: int, new: int, held: int) -> None:
    heads, head_dim = 8, 128
    torch.manual_seed(0)
    k, v = (torch.randn(seqs * new, heads, head_dim, device=DEVICE).bfloat16() for _ in "kv")
    columns = -(-(held + new) // PAGE_SIZE)
    pages = KVPages.empty(seqs * columns, heads, head_dim, seqs, columns, DEVICE)
    pages.page_table.copy_(torch.randperm(seqs * columns, device=DEVICE).view(seqs, columns))
    if held:
        pages.cache_seqlens.fill_(held)
        kernels_append.append(pages, k[: seqs * held], v[: seqs * held], Append(None, held, advance=False))
    pages.cache_seqlens.fill_(held + new)
    pool = torch.zeros(seqs * columns, heads, nbytes(head_dim), dtype=torch.uint8, device=DEVICE)
    tokens = TokenPages(pool, pages.page_table, torch.full_like(pages.cache_seqlens, held), head_dim)
    how = Append(None, new, advance=False)
    own = lambda: kernels_append.append(pages, k, v, how)  # noqa: E731
    floor = ceiling(3 * 2 * k.numel())
    calls = {"product": own, "again": own, "token": lambda: append(tokens, k, v, new), "ceiling": floor}
    replays = {key: graph_of(call)[0] for key, call in calls.items()}
    us = {key: 1000 * ms for key, ms in interleaved(replays, 21, flush=True).items()}
    print(f"| {name} | {us['product']:.2f} | {us['again']:.2f} | {us['token']:.2f} | {us['product'] / us['token']:.3f} | "
          f"{us['ceiling']:.2f} |", flush=True)  # fmt: skip


def time_append(progress: int8_pv.Progress) -> None:
    print("\n| append | product, us | again | token, us | of the product's speed | ceiling, us |\n" + "|---" * 6 + "|")
    for name, (seqs, new, held) in APPENDS.items():
        progress(f"time append {name}", quiet=True)
        append_row(name, seqs, new, held)


@torch.inference_mode()
def main() -> None:
    parts = [word for word in sys.argv[1:] if not word.startswith("--")] or ["decode", "copy", "append"]
    progress = int8_pv.Progress()
    progress("compile")
    precompile(parts)
    if "--dry" in sys.argv:
        progress("compiled")
        return
    progress("check")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}", flush=True)
    here = globals()
    for part in parts:
        here[f"check_{part}"](progress)
        progress(f"{part} is right")
    for part in parts:
        here[f"time_{part}"](progress)
        progress(f"{part} is timed")


if __name__ == "__main__":
    main()
