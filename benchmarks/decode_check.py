"""The Hopper decode kernel against float64 on the same bytes: the smallest case first, then lengths, shapes, options, graphs.

    PYTHONPATH=src python -m benchmarks.decode_check [group ...] [--jobs N] [--list]

Each group of cases is a process with a time limit, so a hang or a crash is one line of the report and stops nothing else. Outputs and
partial sums are NaN before the call; pages that no sequence holds, empty sequences' pages and K behind a sequence's end are 0x7F, with NaN
scales where nobody may look. A case that fails says where, and `probe` then asks simpler questions of the same shape.
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

from fp8attn import PagedKVCache, layout, reference
from fp8attn.kernels import counters, decode

DEVICE = "cuda"
KERNEL = 3e-4  # allowed relative error beyond the rounding of the output
TOTAL = {torch.float16: 5e-4, torch.bfloat16: 2.5e-3}
LSE = 1e-4
SECONDS = 110  # for a group, compilation included


def make_pages(lengths, heads=1, dim=128, v_mean=0.0, seed=0, gain=1.0) -> layout.KVPages:
    """Random bytes in shuffled pages, random powers of two for scales, random means; what must not be read is poison."""
    torch.manual_seed(seed)
    counts = [max(-(-n // 128), 1) for n in lengths]
    spare = 3
    pages = layout.KVPages.empty(sum(counts) + spare, heads, dim, len(lengths), max(counts) + 2, DEVICE)
    order, used = torch.randperm(pages.num_pages, device=DEVICE), 0
    pages.page_table.fill_(int(order[-1]))
    for part in range(0, pages.num_pages, 1024):  # FP8 from FP16, piece by piece: a million tokens need not be held in FP32
        some = slice(part, part + 1024)
        for pool, mean in ((pages.k, 0.0), (pages.v, v_mean)):
            pool[some] = (torch.randn(pool[some].shape, device=DEVICE, dtype=torch.float16) * gain + mean).to(layout.FP8)
    for scale in (pages.k_scale, pages.v_scale):
        scale.copy_(2.0 ** torch.randint(-2, 2, scale.shape, device=DEVICE))
    pages.k_mean.normal_()
    pages.v_mean.normal_()
    pages.cache_seqlens.copy_(torch.tensor(lengths))
    k, v = pages.k.view(torch.uint8), pages.v.view(torch.uint8)
    for seq, (count, length) in enumerate(zip(counts, lengths, strict=True)):
        ids = order[used : used + count]
        pages.page_table[seq, :count] = ids.int()
        used += count
        if not length:
            k[ids], v[ids] = 0x7F, 0x7F
        elif length % 128:
            k[ids[-1], :, length % 128 :] = 0x7F
    k[order[used:]], v[order[used:]] = 0x7F, 0x7F
    pages.k_scale[order[used:]], pages.v_scale[order[used:]] = torch.nan, torch.nan
    return pages


def run(q, pages, **options):
    """The kernel, into outputs and partial sums that held NaN."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        x = empty(*args, **kwargs)
        return x.fill_(torch.nan) if x.is_floating_point() else x

    with mock.patch.object(torch, "empty", poisoned):
        out = decode.attention(q, pages, **options)
    torch.cuda.synchronize()
    return out


def options_for(pages, queries=1, bounds=None, causal=True, scale=None, window=0, softcap=0.0, sinks=None, leftpad=None) -> dict:
    as_int = lambda x: None if x is None else torch.tensor(x, dtype=torch.int32, device=DEVICE)  # noqa: E731
    return {
        "cu_seqlens_q": as_int(bounds), "max_seqlen_q": queries, "causal": causal,
        "softmax_scale": pages.head_dim**-0.5 if scale is None else scale, "window": window, "softcap": softcap, "sinks": sinks,
        "leftpad_k": as_int(leftpad),
    }  # fmt: skip


def place(x: torch.Tensor) -> str:
    return str(tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape)))


def compare(name: str, q, pages, result, options, quiet=False) -> bool:
    """One line; more, about where, if it is wrong."""
    out, lse = result
    ref, ref_lse = reference.attention(q, pages, compute_dtype=torch.float64, out_dtype=torch.float64, **options)
    size = ref.norm().clamp_min(1e-30)
    diff = torch.nan_to_num(out.double() - ref, nan=1e3, posinf=1e3, neginf=-1e3)
    total, rounding = float(diff.norm() / size), float((ref.to(q.dtype).double() - ref).norm() / size)
    kernel = max(total**2 - rounding**2, 0) ** 0.5
    lse_right = (lse == ref_lse) | ((lse - ref_lse).abs() < LSE)
    finite = (lse - ref_lse)[ref_lse.isfinite()].abs()
    bad = ~torch.isfinite(out)
    ok = kernel <= KERNEL and total <= TOTAL[q.dtype] and bool(lse_right.all()) and not bad.any()
    lse_error = float(finite.max()) if finite.numel() else 0.0
    if not quiet or not ok:
        print(f"  {'ok  ' if ok else 'FAIL'} {name}: err {total:.2e} (kernel {kernel:.1e}) lse {lse_error:.1e}", flush=True)
    if not ok:
        rows = (diff.norm(dim=-1) / ref.norm(dim=-1).clamp_min(1e-6)).cpu()  # [token, head]
        wrong = (rows > 10 * TOTAL[q.dtype]).nonzero().tolist()
        at = int(diff.abs().argmax())
        print(f"       worst (token, head, channel) {place(diff.abs())}: {float(out.flatten()[at]):.6g} for {float(ref.flatten()[at]):.6g}")
        print(f"       {int(bad.sum())} not finite; {len(wrong)} of {rows.numel()} (token, head) wrong, first {wrong[:10]}")
        channels = (diff.square().sum((0, 1)) / ref.square().sum((0, 1)).clamp_min(1e-9)).sqrt().unflatten(0, (-1, 16)).mean(1)
        print(f"       error by 16 channels: {' '.join(f'{x:.1e}' for x in channels.tolist())}")
        off = (~lse_right).nonzero().tolist()
        print(f"       lse wrong in {len(off)}: {[(i, float(lse[tuple(i)]), float(ref_lse[tuple(i)])) for i in off[:5]]}", flush=True)
    return ok


def probe(lengths, heads, group, dim, queries, dtype) -> None:
    """What is it that goes wrong? The same shape with K, V or Q made simple."""
    pages = make_pages(lengths, heads, dim)
    tokens = queries * len(lengths)
    q = torch.randn(tokens, heads * group, dim, device=DEVICE).to(dtype)
    options = options_for(pages, queries)
    zero = torch.zeros_like(q)
    compare("  probe, q = 0: every weight alike, so this is V's layout and the sums", zero, pages, run(zero, pages, **options), options)
    pages.k_mean.zero_()
    pages.v_mean.zero_()
    compare("  probe, no means", q, pages, run(q, pages, **options), options)
    pages.k_scale[pages.k_scale.isfinite()] = 1.0
    pages.v_scale[pages.v_scale.isfinite()] = 1.0
    compare("  probe, no means or scales", q, pages, run(q, pages, **options), options)
    v = pages.v.view(torch.uint8)
    v.zero_()
    for seq, length in enumerate(lengths):  # output channel c: the weight of the keys in the c-th page
        for i in range(min(-(-length // 128), dim)):
            v[pages.page_table[seq, i], :, :, i] = 0x38  # 1.0
    compare("  probe, V marks pages: channel = page", q, pages, run(q, pages, **options), options)
    v.zero_()
    for seq, length in enumerate(lengths):  # output channel c: the weight of the keys that are c modulo dim in their page
        for i in range(-(-length // 128)):
            for token in range(128):
                group, t = divmod(token, layout.V_GROUP)
                v[pages.page_table[seq, i], :, group, token % dim, layout.V_POSITION[t]] = 0x38
    compare("  probe, V marks tokens: channel = token", q, pages, run(q, pages, **options), options)


def case(name, lengths, heads=1, group=4, dim=128, dtype=torch.float16, v_mean=0.0, seed=0, sinks=False, gain=1.0, **given) -> bool:
    pages = make_pages(lengths, heads, dim, v_mean, seed, gain)
    queries, bounds = given.get("queries", 1), given.get("bounds")
    tokens = queries * len(lengths) if bounds is None else bounds[-1] + 2
    q = torch.randn(tokens, heads * group, dim, device=DEVICE).to(dtype)
    options = options_for(pages, **given, sinks=torch.randn(heads * group, device=DEVICE) if sinks else None)
    try:
        first = run(q, pages, **options)
        ok = compare(name, q, pages, first, options)
        again = [run(q, pages, **options) for _ in range(3)]
        if not all(torch.equal(x, y) for other in again for x, y in zip(first, other, strict=True)):
            ok = False
            print(f"  FAIL {name}: not the same bits from run to run", flush=True)
        for zeros in counters._streams.values():
            if int(zeros.abs().sum()):
                ok = False
                print(f"  FAIL {name}: counters left at {zeros.nonzero().flatten().tolist()[:10]}", flush=True)
                zeros.zero_()
    except Exception:
        print(f"  FAIL {name}:\n{traceback.format_exc(limit=6)}", flush=True)
        return False
    if not ok and not any(k in given for k in ("bounds", "window", "softcap", "leftpad")) and not sinks:
        probe(lengths, heads, group, dim, queries, dtype)
    return ok


def first() -> list[bool]:
    """One page, then one page less a bit, then two: if this fails, nothing else need be looked at."""
    return [
        case("one page", [128]),
        case("one token", [1]),
        case("100 tokens", [100]),
        case("two pages", [256]),
        case("four pages: longest that is not split", [512]),
        case("split, two CTAs", [1024]),
        case("split, many CTAs, two heads", [20000], heads=2),
        case("no tokens", [0]),
    ]


def lengths() -> list[bool]:
    odd = [1, 2, 15, 16, 17, 127, 128, 129, 0, 255, 256, 257, 1000, 4097, 22939]  # 113 x 203
    return [
        case("odd lengths", odd, heads=2),
        case("odd lengths, V mean 1", odd, heads=8, v_mean=1.0),
        case("odd lengths, BF16", odd, heads=2, dtype=torch.bfloat16),
        case("100 sequences", [37 * i % 1500 for i in range(100)], heads=4),
        case("300 short sequences", [i % 300 for i in range(300)], heads=8),
        case("1000 sequences, one token each but one", [1] * 999 + [30000], heads=2),
        case("8 x 8k", [8192] * 8, heads=8),
        case("scores over a wide range", [5000, 300], heads=2, gain=4.0),
    ]


def shapes() -> list[bool]:
    return [case(f"D{dim} G{group}", [3000, 130, 0, 700], heads=2, group=group, dim=dim) for dim in (64, 128, 256) for group in (1, 4, 16)]


def more_shapes() -> list[bool]:
    more = [case(f"D{dim} G{group}", [3000, 130, 0, 700], heads=2, group=group, dim=dim) for dim in (80, 96, 192) for group in (2, 8)]
    return more + [case(f"D128 G{group}", [3000, 130], heads=3, group=group) for group in (3, 7, 12)]


def queries() -> list[bool]:
    found = [
        case(f"{n} queries, G{g}", [3000, 130, 128, 129, 8], heads=2, group=g, queries=n) for n, g in ((2, 4), (4, 4), (8, 4), (8, 16))
    ]
    return [
        *found,
        case("8 queries, not causal", [3000, 130], heads=2, queries=8, causal=False),
        case("more queries than keys", [3, 1, 0, 700], heads=2, queries=8),
        case("ragged queries", [700, 1200, 0, 129, 300], heads=2, queries=6, bounds=[0, 1, 1, 4, 10, 12]),
        case("D256, 8 queries", [3000, 130], heads=2, queries=8, dim=256),
    ]


def features() -> list[bool]:
    everything = {"bounds": [0, 1, 4, 6, 8], "queries": 3, "window": 300, "softcap": 5.0, "leftpad": [100, 600, 300, 0], "sinks": True}
    return [
        case("window", [3000, 1200, 40, 0], heads=2, window=1000),
        case("window, 5 queries", [3000, 1200, 40], heads=2, window=130, queries=5),
        case("softcap", [3000, 1200, 0], heads=2, softcap=3.0),
        case("sinks", [3000, 1200, 0], heads=2, sinks=True),
        case("leftpad", [3000, 1200, 300, 50], heads=2, leftpad=[100, 600, 300, 0]),
        case("negative scale", [3000], heads=2, scale=-0.1),
        case("everything", [700, 1200, 300, 50], heads=2, **everything),
        case("everything, D256, BF16", [700, 1200, 300, 50], heads=2, dim=256, dtype=torch.bfloat16, **everything),
    ]


def long() -> list[bool]:
    return [
        case("128k, 8 heads", [131072], heads=8),
        case("1M", [1 << 20], heads=1),
        case("1M, V mean 1", [(1 << 20) - 77], heads=1, v_mean=1.0),
        case("ragged to 1M", [1 << 20, 0, 1, 5000, 100000], heads=1, group=8, dim=64),
    ]


def graph() -> list[bool]:
    """One graph, lengths that change between replays; and two streams at once."""
    found = []
    pages = make_pages([9000, 9000, 9000, 9000], heads=8)
    pages.k.view(torch.uint8)[pages.k.view(torch.uint8) == 0x7F] = 0  # lengths will grow into what was behind the end
    q = torch.randn(4, 32, 128, device=DEVICE).half()
    options = options_for(pages)
    run(q, pages, **options)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = decode.attention(q, pages, **options)
    for lengths in ([9000, 9000, 9000, 9000], [1, 0, 129, 4000], [0, 0, 0, 0], [8999, 17, 9000, 1], [512, 512, 512, 512]):
        pages.cache_seqlens.copy_(torch.tensor(lengths))
        for x in result:
            x.fill_(torch.nan)
        captured.replay()
        torch.cuda.synchronize()
        ok = compare(f"graph, lengths {lengths}", q, pages, result, options)
        direct = run(q, pages, **options)
        if not all(torch.equal(x, y) for x, y in zip(result, direct, strict=True)):
            ok = False
            print("  FAIL the graph's bits are not the call's", flush=True)
        found.append(ok)
    pages.cache_seqlens.copy_(torch.tensor([9000, 8000, 7000, 6000]))
    expected = run(q, pages, **options)
    streams = [torch.cuda.Stream() for _ in range(3)]
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(decode.attention(q, pages, **options))
    torch.cuda.synchronize()
    same = all(torch.equal(x, y) for result in results for x, y in zip(result, expected, strict=True))
    print(f"  {'ok  ' if same else 'FAIL'} three streams at once", flush=True)
    return [*found, same]


def cache() -> list[bool]:
    """What the cache writes, after every operation it has."""
    torch.manual_seed(0)
    store = PagedKVCache(2, 128, num_seqs=3, device=DEVICE, backend="reference")

    def add(*lengths):
        k, v = (torch.randn(sum(lengths), 2, 128, device=DEVICE) * 3 + 2 for _ in range(2))
        store.append(k.bfloat16(), v.bfloat16(), lengths=list(lengths))

    def check(name):
        q = torch.randn(store.num_seqs, 8, 128, device=DEVICE).half()
        options = options_for(store.pages)
        return compare(f"cache, {name}", q, store.pages, run(q, store.pages, **options), options)

    add(700, 30, 0)
    found = [check("prompts")]
    for _ in range(3):
        add(1, 1, 1)
    found.append(check("appended"))
    store.select([1, 0, 0])
    add(5, 600, 2)
    found.append(check("selected"))
    store.copy(1, 0, 650)
    store.truncate([650, 131, 64])
    add(1, 0, 100)
    return [*found, check("copied and truncated")]


GROUPS = {f.__name__: f for f in (first, lengths, shapes, more_shapes, queries, features, graph, cache, long)}


def run_group(name: str) -> tuple[str, str, bool]:
    start = time.time()
    command = [sys.executable, "-m", "benchmarks.decode_check", "--run", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        text, ok = done.stdout, done.returncode == 0
        if not ok:
            text += done.stderr[-1500:]
    except subprocess.TimeoutExpired as expired:
        text, ok = (
            (expired.stdout or b"").decode() + f"  FAIL {name}: no answer in {SECONDS} s: the case after the last line hangs\n",
            False,
        )
    return name, f"{name} ({time.time() - start:.0f} s)\n{text}", ok


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; none: all")
    parser.add_argument("--jobs", type=int, default=5)
    parser.add_argument("--run", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.run:
        sys.exit(0 if all(GROUPS[args.run]()) else 1)
    start = time.time()
    names = args.groups or list(GROUPS)
    results = []
    if "first" in names:  # alone: if it hangs, nothing else is worth the wait
        results.append(run_group("first"))
        print(results[0][1], flush=True)
        if "no answer" in results[0][1]:
            sys.exit("the smallest cases hang; the rest was not run")
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(run_group, [name for name in names if name != "first"]):
            print(result[1], flush=True)
            results.append(result)
    failed = [name for name, _, ok in results if not ok]
    print(
        f"{len(results) - len(failed)} of {len(results)} groups pass in {time.time() - start:.0f} s"
        + (f"; FAILED: {failed}" if failed else "")
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
