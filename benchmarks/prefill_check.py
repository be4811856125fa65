"""The Hopper prefill kernel against float64 on the same bytes: small cases first, then every option and head_dim.

    PYTHONPATH=src python -m benchmarks.prefill_check [group ...] [--jobs N]

Each group of cases is a process with a time limit, so a hang or a crash is one line of the report. Outputs are NaN before the call,
pages that no sequence holds (and K behind a sequence's end) are 0x7F, their scales NaN. Queries are rounded to FP8 beforehand, per row:
what is left is the kernel's own error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import traceback
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import torch

from fp8attn import layout, numerics, reference
from fp8attn.kernels import counters, prefill

FP8 = layout.FP8
NORMAL, MEAN = 0.035, 0.004  # allowed relative error: V without a mean (all of it P's rounding), V with one
LSE = 2**-4  # sums are of weights rounded to 3 bits, which may all go one way; and a thousandth: large scores are summed in 13 bits
DEVICE = "cuda"


def make_pages(lengths, heads, dim, k_offset=0.0, v_offset=0.0, means=False, spread=0, k_gain=1.0, spare=3) -> layout.KVPages:
    """Sequences of random tokens in shuffled pages, the rest poisoned. `spread`: pages differ in scale by up to 2^spread either way."""
    counts = [-(-n // 128) for n in lengths]
    pages = layout.KVPages.empty(sum(counts) + spare, heads, dim, len(lengths), max(*counts, 1), DEVICE)
    for pool in (pages.k, pages.v):
        pool.view(torch.uint8).fill_(0x7F)
    pages.k_scale.fill_(torch.nan)
    pages.v_scale.fill_(torch.nan)
    order = torch.randperm(pages.num_pages, device=DEVICE)
    pages.page_table.fill_(int(order[-1]))
    taken = 0
    for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        pages.cache_seqlens[seq] = length
        if means:
            pages.k_mean[seq] = torch.randn(heads, dim, device=DEVICE) * k_offset
            pages.v_mean[seq] = torch.randn(heads, dim, device=DEVICE) + v_offset
        if not count:
            continue
        ids = order[taken : taken + count]
        taken += count
        pages.page_table[seq, :count] = ids.int()
        k, v = (torch.randn(count * 128, heads, dim, device=DEVICE) for _ in range(2))
        if not means:
            k, v = k + k_offset * torch.randn(heads, dim, device=DEVICE), v + v_offset
        if spread:
            gain = 2.0 ** torch.randint(-spread, spread + 1, (count, heads), device=DEVICE)
            v = v * gain.repeat_interleave(128, 0)[..., None]
        k = k * k_gain
        for x, pool, scale, pack in ((k, pages.k, pages.k_scale, layout.pack_k), (v, pages.v, pages.v_scale, layout.pack_v)):
            s = numerics.power_of_two_scale(x.abs().unflatten(0, (-1, 128)).amax((1, 3)))
            x8 = numerics.quantize(x, s.repeat_interleave(128, 0)[..., None]).view(torch.uint8)
            x8[length:] = 0x7F if pool is pages.k else 0
            pool.view(torch.uint8)[ids] = pack(x8)
            scale[ids] = s
    return pages


def make_queries(tokens, heads, dim, dtype, gain=1.0) -> torch.Tensor:
    """Random rows that per-row power-of-two FP8 holds exactly."""
    q = torch.randn(tokens, heads, dim, device=DEVICE) * gain
    scale = numerics.power_of_two_scale(q.abs().amax(-1))[..., None]
    q = numerics.dequantize(numerics.quantize(q, scale), scale)
    return numerics.quantize(q) if dtype == FP8 else q.to(dtype)


def run(q, pages, splits=1, **options):
    """The kernel, into outputs that held NaN; its items cut into `splits` parts."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() and x.element_size() > 1 else x

    cuts = mock.patch.object(prefill, "_cuts", lambda width, *_: [(prefill.SHAPES[width][0], splits)])
    with mock.patch.object(torch, "empty", poisoned), cuts:
        prefill.plan.cache_clear()  # which keeps what `_cuts` gave
        out, lse = prefill.attention(q, pages, **options)
        prefill.plan.cache_clear()
    torch.cuda.synchronize()
    return out, lse


def where(x: torch.Tensor) -> str:
    """Index of the largest element: (token, head, channel)."""
    return str(tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape)))


def compare(name, q, pages, out, lse, options, limit) -> bool:
    q = q.float() if q.dtype == FP8 else q
    ref, ref_lse = reference.attention(q, pages, compute_dtype=torch.float64, out_dtype=torch.float64, **options)
    bad = out.isnan()
    note = ""
    if bad.any():
        rows = bad.any(-1).nonzero()
        note = f" NaN in {int(bad.sum())} of {bad.numel()}, {len(rows)} rows: (token, head) {rows[0].tolist()} to {rows[-1].tolist()};"
    diff = torch.nan_to_num(out.double() - ref, nan=1e3)
    error = float(diff.norm() / ref.norm().clamp_min(1e-30))
    row_error = diff.norm(dim=-1) / ref.norm(dim=-1).clamp_min(1e-6)
    same = (lse == ref_lse) | ((lse - ref_lse).abs() < LSE + ref_lse.abs() / 1024)
    ok = error < limit and bool(same.all()) and not bad.any()
    if not ok:
        blocks = row_error.amax(1)
        wrong = [i for i in range(0, len(blocks), 64) if float(blocks[i : i + 64].max()) > 4 * limit][:12]
        at = diff.abs().argmax()
        note += f" worst element {where(diff.abs())}: {float(out.flatten()[at]):.5g} for {float(ref.flatten()[at]):.5g},"
        note += f" worst row {where(row_error)}, blocks of 64 rows in error: {wrong};"
        delta = torch.nan_to_num((lse - ref_lse).abs(), nan=0.0, posinf=1e9).masked_fill(same, 0)
        note += f" lse off in {int((~same).sum())} rows, worst {where(delta)}: {float(lse.flatten()[delta.argmax()]):.5g}"
        note += f" for {float(ref_lse.flatten()[delta.argmax()]):.5g}"
    finite = (lse - ref_lse)[ref_lse.isfinite()].abs()
    lse_error = float(finite.max()) if finite.numel() else 0.0
    print(f"{'ok  ' if ok else 'FAIL'} {name:34s} err {error:.5f} (limit {limit}) lse {lse_error:.2g}{note}", flush=True)
    return ok


def case(name, lengths, q_lens=None, hq=2, hkv=1, dim=128, dtype=torch.bfloat16, causal=True, window=0, softcap=0.0, sinks=False,
         leftpad=None, limit=None, extra=0, varlen=None, strided=False, q_gain=1.0, edit=None, splits=1, **data) -> bool:  # fmt: skip
    """One comparison; `q_lens` None: as many queries as keys; `extra`: rows behind the last sequence; `edit`: changes q and pages first."""
    try:
        torch.manual_seed(0)
        q_lens = lengths if q_lens is None else q_lens
        pages = make_pages(lengths, hkv, dim, **data)
        tokens = sum(q_lens) + extra
        q = make_queries(tokens, hq, dim, dtype, q_gain)
        if strided:  # heads first in memory
            q = q.transpose(0, 1).contiguous().transpose(0, 1)
        if edit:
            q = edit(q, pages)
        varlen = varlen if varlen is not None else len(set(q_lens)) > 1 or extra > 0
        options = {
            "cu_seqlens_q": torch.tensor([0, *q_lens], device=DEVICE).cumsum(0).int() if varlen else None, "max_seqlen_q": max(q_lens),
            "causal": causal, "softmax_scale": dim**-0.5, "window": window, "softcap": softcap,
            "sinks": torch.randn(hq, device=DEVICE) * 2 if sinks else None,
            "leftpad_k": None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32, device=DEVICE),
        }  # fmt: skip
        out, lse = run(q, pages, splits, **options)
        return compare(name, q, pages, out, lse, options, limit or (MEAN if data.get("v_offset") else NORMAL))
    except Exception:
        print(f"FAIL {name:34s} raised\n{traceback.format_exc(limit=-3)}", flush=True)
        return False


def no_scores(q, pages):
    return torch.zeros_like(q)


def ones(q, pages):
    pages.v.copy_(torch.ones_like(pages.v, dtype=torch.float32).to(FP8))
    pages.v_scale.fill_(1.0)
    return q


# Groups: each a list of calls, in the order in which to read failures


def simple(dim=128):
    """Which half is wrong? Then tile and block counts, one head."""
    one = {"hq": 1, "hkv": 1, "dim": dim}
    yield case(f"{dim} q=0: P V alone", [128], causal=False, edit=no_scores, limit=0.003, **one)
    yield case(f"{dim} v=1: sums alone", [128], causal=False, edit=ones, limit=0.003, **one)
    yield case(f"{dim} one tile", [128], causal=False, **one)
    yield case(f"{dim} two tiles", [256], [128], causal=False, **one)
    yield case(f"{dim} three tiles", [384], [128], causal=False, **one)
    yield case(f"{dim} nine tiles (ring wraps)", [1152], [128], causal=False, **one)
    yield case(f"{dim} causal one tile", [128], **one)
    yield case(f"{dim} causal two blocks", [256], **one)
    yield case(f"{dim} causal 640", [640], **one)
    yield case(f"{dim} one query one key", [1], **one)
    yield case(f"{dim} tail: 200 keys", [200], [64], causal=False, **one)
    yield case(f"{dim} odd 333", [333], **one)
    yield case(f"{dim} causal unaligned 100 on 357", [357], [100], **one)
    yield case(f"{dim} full 77 on 1000", [1000], [77], causal=False, **one)


def general(dim=128):
    """Heads, batches, persistence, data."""
    yield case(f"{dim} heads 4/4", [300], hq=4, hkv=4, dim=dim)
    yield case(f"{dim} gqa 8/2", [300], hq=8, hkv=2, dim=dim)
    yield case(f"{dim} gqa 6/2 (no multiple of 4)", [300], hq=6, hkv=2, dim=dim)
    yield case(f"{dim} batch 3", [257] * 3, hq=4, hkv=2, dim=dim)
    yield case(f"{dim} items > SMs", [1000] * 4, hq=16, hkv=4, dim=dim)
    yield case(f"{dim} items > SMs, full", [700] * 4, hq=16, hkv=4, dim=dim, causal=False)
    yield case(f"{dim} v mean 1", [2000], dim=dim, v_offset=1.0)
    yield case(f"{dim} v mean 1 full", [2000], [300], dim=dim, v_offset=1.0, causal=False)
    yield case(f"{dim} means restored", [700], dim=dim, means=True, k_offset=3.0, v_offset=2.0)
    yield case(f"{dim} page scales 2^+-6", [1500], hq=4, hkv=2, dim=dim, spread=6)
    yield case(f"{dim} page scales 2^+-20", [1500], hq=4, hkv=2, dim=dim, spread=20)
    yield case(f"{dim} tiny K, large Q", [400], dim=dim, k_gain=2.0**-20, q_gain=2.0**18)
    yield case(f"{dim} peaked", [1000], dim=dim, q_gain=8.0, limit=0.06)
    yield case(f"{dim} varlen", [300, 1, 128, 1000, 65], hq=4, hkv=2, dim=dim)
    yield case(f"{dim} varlen chunks", [300, 900, 128, 1000, 65], [1, 200, 128, 77, 0], hq=4, hkv=2, dim=dim)
    yield case(f"{dim} empty among others", [0, 300, 0, 130, 0], hq=4, hkv=2, dim=dim)
    yield case(f"{dim} no keys for queries", [0, 200, 5], [3, 100, 40], hq=2, hkv=2, dim=dim)
    yield case(f"{dim} rows behind the last", [100, 200], hq=4, hkv=2, dim=dim, extra=150)


def options(dim=128):
    """Window and left padding."""
    yield case(f"{dim} window 1", [300], dim=dim, window=1, limit=0.01)
    yield case(f"{dim} window 100", [700], dim=dim, window=100)
    yield case(f"{dim} window 128", [700], hq=4, hkv=2, dim=dim, window=128)
    yield case(f"{dim} window 500", [2000], hq=4, hkv=2, dim=dim, window=500)
    yield case(f"{dim} window 300 chunk 150 on 900", [900], [150], dim=dim, window=300)
    yield case(f"{dim} leftpad", [500, 300], hq=4, hkv=2, dim=dim, leftpad=[130, 7])
    yield case(f"{dim} leftpad full", [500, 300], hq=4, hkv=2, dim=dim, leftpad=[260, 128], causal=False)
    yield case(f"{dim} leftpad beyond", [200, 300], hq=4, hkv=2, dim=dim, leftpad=[200, 0])


def extras(dim=128):
    """Sinks and softcap: each alone, then all options together."""
    yield case(f"{dim} sinks", [400], hq=4, hkv=2, dim=dim, sinks=True)
    yield case(f"{dim} sinks and means", [400], hq=4, hkv=2, dim=dim, sinks=True, means=True, k_offset=1.0, v_offset=2.0, limit=0.015)
    yield case(f"{dim} sinks, no keys", [0, 200], [30, 100], hq=4, hkv=2, dim=dim, sinks=True)
    yield case(f"{dim} softcap 30", [400], hq=4, hkv=2, dim=dim, softcap=30.0, q_gain=8.0)
    yield case(f"{dim} softcap 2 and means", [400], hq=4, hkv=2, dim=dim, softcap=2.0, q_gain=4.0, means=True, k_offset=1.0)
    yield case(f"{dim} all of them", [900, 400, 0, 70], [300, 400, 5, 70], hq=4, hkv=2, dim=dim, softcap=20.0, sinks=True, window=200,
               leftpad=[10, 140, 0, 3], means=True, k_offset=0.5, v_offset=1.0, q_gain=3.0, limit=0.02)  # fmt: skip


def parts(dim=128):
    """Items cut over their keys: fewer tiles than parts, ragged, empty, every option, long, and the same bits again."""
    yield case(f"{dim} full 77 on 1000 in 3", [1000], [77], causal=False, dim=dim, splits=3)
    yield case(f"{dim} 64 on 200 in 5", [200], [64], dim=dim, splits=5)
    yield case(f"{dim} causal 700 in 3", [700], hq=4, hkv=2, dim=dim, splits=3)
    yield case(f"{dim} page scales 2^+-20 in 4", [1500], [100], hq=4, hkv=2, dim=dim, spread=20, splits=4)
    yield case(f"{dim} varlen chunks in 3", [300, 900, 128, 1000, 65], [1, 200, 128, 77, 0], hq=4, hkv=2, dim=dim, splits=3)
    yield case(f"{dim} no keys for queries in 2", [0, 200, 5], [3, 100, 40], hq=2, hkv=2, dim=dim, splits=2)
    yield case(f"{dim} means restored in 3", [700], [200], dim=dim, means=True, k_offset=3.0, v_offset=2.0, splits=3)
    yield case(f"{dim} all options in 4", [900, 400, 0, 70], [300, 400, 5, 70], hq=4, hkv=2, dim=dim, softcap=20.0, sinks=True, window=200,
               leftpad=[10, 140, 0, 3], means=True, k_offset=0.5, v_offset=1.0, q_gain=3.0, limit=0.02, splits=4)  # fmt: skip
    yield case(f"{dim} 131072 keys in 66, v mean 1", [131072], [128], hq=2, hkv=1, dim=dim, v_offset=1.0, splits=66)
    yield attempt(f"{dim} equal bits in 4, 20 runs", lambda dim: repeats(dim, 4), dim)


def inputs(dim=128):
    """Query dtypes and strides; rounding of Q; equal bits; graphs."""
    yield case(f"{dim} fp16", [400], hq=4, hkv=2, dim=dim, dtype=torch.float16)
    yield case(f"{dim} fp8 queries", [400], hq=4, hkv=2, dim=dim, dtype=FP8)
    yield case(f"{dim} fp8 queries, means", [900], hq=4, hkv=2, dim=dim, dtype=FP8, means=True, k_offset=1.0, v_offset=1.0)
    yield case(f"{dim} heads first in memory", [400], hq=4, hkv=2, dim=dim, strided=True)
    small = torch.tensor([0.0, 2.0**-30], device=DEVICE, dtype=torch.bfloat16)[:, None]
    yield case(f"{dim} rows of zeros, tiny rows", [300], hq=2, hkv=2, dim=dim, edit=lambda q, pages: q * small)
    yield attempt(f"{dim} rows rounded as numerics", rounding, dim)
    yield attempt(f"{dim} equal bits, 20 runs", repeats, dim)
    yield attempt(f"{dim} CUDA graph, new lengths", graph, dim)
    yield attempt(f"{dim} NaN in K and Q", nans, dim)


def long(dim=128):
    """128k keys, V with a mean: two-level accumulation is what this shows."""
    for n in (8192, 131072):
        yield case(f"{dim} {n} keys, v mean 1", [n], [128], hq=1, hkv=1, dim=dim, causal=False, v_offset=1.0)
        yield case(f"{dim} {n} keys, v mean 1, causal", [n], [300], hq=1, hkv=1, dim=dim, v_offset=1.0)
    yield case(f"{dim} 131072 equal weights, V = 1", [131072], [64], hq=1, hkv=1, dim=dim, causal=False, limit=0.003,
               edit=lambda q, pages: ones(no_scores(q, pages), pages))  # fmt: skip


def attempt(name, test, dim) -> bool:
    try:
        note = test(dim)
        print(f"{'FAIL' if note else 'ok  '} {name:34s} {note or ''}", flush=True)
        return not note
    except Exception:
        print(f"FAIL {name:34s} raised\n{traceback.format_exc(limit=-3)}", flush=True)
        return False


def plain(q, pages, n, splits=1):
    return run(
        q, pages, splits, cu_seqlens_q=None, max_seqlen_q=n, causal=True, softmax_scale=0.09, window=0, softcap=0.0, sinks=None,
        leftpad_k=None,
    )  # fmt: skip


def rounding(dim) -> str:
    """Queries of any bits give what their rounded selves give, but where keys are few: there the rest of them counts."""
    pages = make_pages([500], 2, dim)
    q = (torch.randn(500, 4, dim, device=DEVICE) * torch.exp(3 * torch.randn(500, 4, 1, device=DEVICE))).bfloat16()
    scale = numerics.power_of_two_scale(q.float().abs().amax(-1))[..., None]
    rounded = numerics.dequantize(numerics.quantize(q.float(), scale), scale).bfloat16()
    a, b = (plain(x, pages, 500)[0][prefill.FEW.value :] for x in (q, rounded))
    return "" if torch.equal(a, b) else f"{int((a != b).any(-1).sum())} rows differ, first {(a != b).any(-1).nonzero()[0].tolist()}"


def repeats(dim, splits=1) -> str:
    keys, heads = (1500, 8) if splits == 1 else (300, 4)  # only launches that would not fill the GPU are split
    pages = make_pages([keys] * 3, heads // 2, dim)
    q = torch.randn(3 * keys, heads, dim, device=DEVICE).bfloat16()
    first = plain(q, pages, keys, splits)
    for i in range(20):
        again = plain(q, pages, keys, splits)
        if not (torch.equal(first[0], again[0]) and torch.equal(first[1], again[1])):
            return f"run {i} differs in {int((first[0] != again[0]).sum())} elements"
    counts = [n for counter in counters._streams.values() for n in counter.tolist()]
    return "" if not any(counts) else f"counters were left at {counts}"


def graph(dim) -> str:
    """Captured once, replayed with other lengths, other query counts and rows to spare."""
    pages = make_pages([900, 700], 2, dim)
    q = make_queries(1000, 4, dim, torch.bfloat16)
    cu = torch.tensor([0, 600, 1000], dtype=torch.int32, device=DEVICE)
    options = {
        "cu_seqlens_q": cu,
        "max_seqlen_q": 700,
        "causal": True,
        "softmax_scale": 0.09,
        "window": 0,
        "softcap": 0.0,
        "sinks": None,
        "leftpad_k": None,
    }
    prefill.attention(q, pages, **options)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        out, lse = prefill.attention(q, pages, **options)
    for lengths, bounds in (((900, 700), (0, 600, 1000)), ((300, 520), (0, 300, 820)), ((130, 0), (0, 1, 1)), ((900, 700), (0, 300, 1000))):
        pages.cache_seqlens.copy_(torch.tensor(lengths, dtype=torch.int32))
        cu.copy_(torch.tensor(bounds, dtype=torch.int32))
        out.fill_(torch.nan)
        for _ in range(3):
            captured.replay()
        torch.cuda.synchronize()
        if not compare(f"{dim} graph {lengths} {bounds}", q, pages, out, lse, options, NORMAL):
            return "see above"
    return ""


def nans(dim) -> str:
    """NaN in one K token reaches the rows that see it and no others; in one row of Q, that row."""
    pages = make_pages([600], 1, dim)
    q = torch.randn(600, 1, dim, device=DEVICE).bfloat16()
    page = pages.page_table[0, 2].long()  # tokens 256 to 383
    notes = []
    for token in range(300, 318):  # every place in a group of exponentials
        saved = pages.k.view(torch.uint8)[page, 0, token % 128, 0].clone()
        pages.k.view(torch.uint8)[page, 0, token % 128, 0] = 0x7F
        got = plain(q, pages, 600)[0].isnan().all(-1)[:, 0]
        want = torch.arange(600, device=DEVICE) >= token
        if not torch.equal(got, want):
            notes.append(f"K token {token}: {int((got != want).sum())} rows wrong")
        pages.k.view(torch.uint8)[page, 0, token % 128, 0] = saved
    q[77, 0, 3] = torch.nan
    got = plain(q, pages, 600)[0].isnan().all(-1)[:, 0].nonzero().flatten().tolist()
    if got != [77]:
        notes.append(f"NaN in query 77 reached rows {got[:8]}")
    return "; ".join(notes)


GROUPS = {f"{f.__name__}-{dim}": (f, dim) for dim in (128, 64, 256) for f in (simple, general, options, extras, parts, inputs, long)}
GROUPS |= {f"{f.__name__}-{dim}": (f, dim) for dim in (96, 192, 80) for f in (simple, general)}
LONG = "-as-long"  # in the shape that long prompts have
GROUPS |= {f"{f.__name__}-{dim}{LONG}": (f, dim) for dim in (128, 96) for f in (simple, general, options, extras, inputs)}


def child(name: str) -> None:
    build, dim = GROUPS[name]
    if name.endswith(LONG):
        prefill.SHAPES[128] = prefill.SHAPES[128][1:]
    start = time.time()
    results = list(build(dim))
    print(f"== {name}: {sum(results)} of {len(results)} ok, {time.time() - start:.0f} s", flush=True)
    sys.exit(0 if all(results) else 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; a prefix names several")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--timeout", type=int, default=100)
    parser.add_argument("--child")
    args = parser.parse_args()
    if args.child:
        child(args.child)
    chosen = [g for g in GROUPS if not args.groups or any(g.startswith(x) for x in args.groups)]
    start = time.time()

    def spawn(name: str) -> tuple[str, str, bool]:
        command = [sys.executable, "-m", "benchmarks.prefill_check", "--child", name]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout)
            crash = "" if "==" in run.stdout else f"FAIL {name}: died with {run.returncode} after the last line\n{run.stderr[-1500:]}"
            return name, run.stdout + crash, run.returncode == 0
        except subprocess.TimeoutExpired as stopped:
            text = stopped.stdout or ""
            text = text.decode() if isinstance(text, bytes) else text
            return name, text + f"FAIL {name}: HANG in the case after the last line\n", False

    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(spawn, chosen))
    failed = [name for name, _, ok in results if not ok]
    for _, text, ok in results:
        # What passed is one line a group; a group that failed is shown whole.
        print(text.strip() if not ok else text.strip().splitlines()[-1], flush=True)
    print(f"{len(results) - len(failed)} of {len(results)} groups ok, {time.time() - start:.0f} s; failed: {' '.join(failed) or 'none'}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
