"""The Hopper decode kernel without a GPU: compiled for sm_90, and run on the CPU (`tests/emulator`).

`test_decode.py` calls this in a process where Triton compiles. By hand:

    python -m tests.kernels.decode.run_decode compile [case substring ...] [--table]
    python -m tests.kernels.decode.run_decode emulate [case substring ...] [--table]
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from itertools import pairwise

import torch

from fp8attn import AttentionParams, KVPages, reference
from fp8attn.formats.codec import CODECS, FP8
from fp8attn.kernels import decode
from fp8attn.kernels.launch import Launch
from tests.emulator import emulate
from tests.support.kernel_cases import poison_empty
from tests.support.machine_code import Sass, build, dry

PLAIN = {
    "lengths": [1], "heads": 1, "group": 4, "head_dim": 128, "queries": 1, "bounds": None, "dtype": torch.float16,
    "causal": True,
    "scale": None, "window": 0, "softcap": 0.0, "sinks": False, "leftpad": None, "sms": 4, "v_mean": 0.0,
    "keys": "int8", "rotate": True,
    "means": True, "broken": False, "late": (), "out": False, "tile": 128,
}  # fmt: skip
PLAIN_E4M3 = {"keys": "e4m3", "rotate": False, "means": False}
EVERYTHING = {
    "bounds": [0, 1, 4, 6, 8],
    "queries": 3,
    "window": 300,
    "softcap": 5.0,
    "sinks": True,
    "leftpad": [100, 600, 300, 0],
}
COMPILED = {
    **{
        f"D{d} rows{rows} {keys}": {"head_dim": d, "group": rows, "keys": keys, "means": False}
        for d in (64, 80, 96, 128, 192, 256)
        for rows in (4, 16)
        for keys in CODECS
    },
    **{f"D{d} rows{rows} plain": {"head_dim": d, "group": rows} | PLAIN_E4M3 for d in (128, 256) for rows in (4, 16)},
    "D128 rows1": {"group": 1},
    "D128 rows32": {"queries": 8},
    "D128 many": {"lengths": [1] * 33},
    "D128 tile64": {"tile": 64},
    "D128 tile64 everything e4m3": dict(lengths=[1] * 4, keys="e4m3", tile=64, **EVERYTHING),
    "D128 everything": dict(lengths=[1] * 4, **EVERYTHING),
    "D128 everything e4m3": dict(lengths=[1] * 4, keys="e4m3", **EVERYTHING),
    "D256 everything": dict(lengths=[1] * 4, head_dim=256, dtype=torch.bfloat16, **EVERYTHING),
}
EMULATED = {  # those without means have kernels of `COMPILED`, so that each is compiled once
    "ragged": {"lengths": [1, 0, 127, 300, 128, 129], "heads": 2},
    "ragged e4m3": {"lengths": [1, 0, 127, 300, 128, 129], "heads": 2, "keys": "e4m3", "means": False},
    "split": {"lengths": [2700, 1, 0, 700], "heads": 2, "v_mean": 1.0, "out": True},
    "D64 rows16": {"lengths": [1100, 30], "head_dim": 64, "group": 16, "means": False},
    "D80": {"lengths": [1100, 30], "head_dim": 80, "group": 8},
    "D96": {"lengths": [1100, 30], "head_dim": 96, "group": 8, "dtype": torch.bfloat16, "keys": "e4m3"},
    "D256": {"lengths": [900, 30], "head_dim": 256, "group": 2},
    "queries": {"lengths": [700, 129, 128, 5], "queries": 8},
    "everything": dict(lengths=[700, 1200, 300, 50], **EVERYTHING),
    "everything e4m3": dict(lengths=[700, 1200, 300, 50], keys="e4m3", **EVERYTHING),
    "broken": {"lengths": [150, 140, 40], "head_dim": 64, "broken": True, "means": False},
    "idle": {"lengths": [300], "sms": 8, "head_dim": 192},
    "parts": {"lengths": [5000, 10], "sms": 20} | PLAIN_E4M3,
    "many": {"lengths": [37 * i % 150 for i in range(40)], "sms": 8},
    "tiles of 64 keys": dict(lengths=[700, 1200, 300, 50], tile=64, **EVERYTHING),
    "tiles of 64 keys, split": {"lengths": [2700, 1, 0, 700, 65, 128], "heads": 2, "tile": 64, "keys": "e4m3"},
    "late consumer": {"lengths": [700, 1200], "late": (0, 1, 2, 3), "rotate": False},
    "late producer": {"lengths": [700, 1200], "late": (4, 5, 6, 7)},
}


def filled_pages(
    lengths: list[int],
    heads: int,
    head_dim: int,
    v_mean: float,
    *,
    keys: str = "int8",
    rotate: bool = True,
    means: bool = True,
) -> KVPages:
    """A cache with the worst contents: pages in random order with random scales (and means). Unused pages are NaN,
    including their scales. The ends of K are NaN or -128."""
    counts = [max(-(-n // 128), 1) for n in lengths]
    k_mean, v_mean_off = (torch.randn(heads, head_dim) if means else None for _ in "kv")
    pages = KVPages.empty(
        sum(counts) + 3, heads, head_dim, len(lengths), max(counts) + 1, key_dtype=keys, rotate_keys=rotate,
        k_mean=k_mean,
        v_mean=v_mean_off,
    )  # fmt: skip
    order, used = torch.randperm(pages.num_pages), 0
    pages.page_table.fill_(int(order[-1]))
    for seq, count in enumerate(counts):
        pages.page_table[seq, :count] = order[used : used + count]
        used += count
    k = torch.randn(pages.k.shape)
    pages.k.copy_(CODECS[keys].encode(k, torch.tensor(32.0)) if CODECS[keys].is_integer else k)
    pages.v.copy_((torch.randn(pages.v.shape) + v_mean).to(FP8))
    for scale in (pages.k_scale, pages.v_scale):
        scale.copy_(2.0 ** torch.randint(-3, 3, scale.shape))
    if CODECS[keys].is_integer:  # any number
        pages.k_scale.mul_((1 + torch.rand(pages.k_scale.shape)) / 48)
    pages.cache_seqlens.copy_(torch.tensor(lengths))
    pages.pool[order[used:]] = 0xFF
    for seq, n in enumerate(lengths):
        if n % 128:
            pages.k.view(torch.uint8)[pages.page_table[seq, n // 128], :, n % 128 :] = (
                0x80 if CODECS[keys].is_integer else 0x7F
            )
        if not n:
            pages.pool[pages.page_table[seq, 0]] = 0xFF
    return pages


def poison_left_of_windows(pages: KVPages, lengths: list[int], queries: list[int], window: int) -> None:
    """Let the columns left of all windows name a page of NaN: in a ring they are pages of other tokens."""
    for seq, (length, new) in enumerate(zip(lengths, queries, strict=True)):
        if window:
            pages.page_table[seq, : max(0, length - new - window + 1) // 128] = pages.page_table[0, -1]


def attend(case: dict, run: Callable[[Launch, tuple[torch.Tensor, ...]], None]) -> tuple:
    """Runs the launcher on a case, and `run` on its launch and on what the launch before may have written. Returns the
    result, and the float64 result."""
    c = PLAIN | case
    torch.manual_seed(0)
    pages = filled_pages(
        c["lengths"], c["heads"], c["head_dim"], c["v_mean"], keys=c["keys"], rotate=c["rotate"], means=c["means"]
    )
    tokens = c["queries"] * len(c["lengths"]) if c["bounds"] is None else c["bounds"][-1] + 2
    new = [b - a for a, b in pairwise(c["bounds"])] if c["bounds"] else [c["queries"]] * len(c["lengths"])
    poison_left_of_windows(pages, c["lengths"], new, c["window"])
    q = torch.randn(tokens, c["heads"] * c["group"], c["head_dim"]).to(c["dtype"])
    if c["broken"]:  # a query, and a page
        q[0, 1, 5] = torch.nan
        pages.k_scale[pages.page_table[1, 0]] = torch.nan
    params = AttentionParams(
        cu_seqlens_q=torch.tensor(c["bounds"], dtype=torch.int32) if c["bounds"] else None,
        max_seqlen_q=c["queries"],
        causal=c["causal"],
        softmax_scale=c["scale"] or c["head_dim"] ** -0.5,
        window=c["window"],
        softcap=c["softcap"],
        sinks=torch.randn(q.shape[1]) if c["sinks"] else None,
        leftpad_k=torch.tensor(c["leftpad"], dtype=torch.int32) if c["leftpad"] else None,
    )
    out = torch.full_like(q, torch.nan) if c["out"] else None
    with dry() as (launches, patch):
        patch.setattr(decode.plan, "num_sms", lambda device: c["sms"])
        patch.setattr(decode.plan, "TILE", c["tile"])
        poison_empty(patch)
        decode.plan.make_decode_plan.cache_clear()  # a plan keeps what these gave
        result = decode.decode_attention(q, pages, params, out)
        assert out is None or result[0] is out
        decode.plan.make_decode_plan.cache_clear()
    (launch,) = launches
    written = pages.pool, pages.page_table, pages.cache_seqlens, q, params.cu_seqlens_q, params.leftpad_k
    run(launch, tuple(x for x in written if x is not None))
    return result, reference.attention(q, pages, params, compute_dtype=torch.float64, out_dtype=torch.float64)


def emulate_case(name: str) -> dict:
    left = []
    case = PLAIN | EMULATED[name]
    (out, lse), (ref, ref_lse) = attend(case, lambda *launch: left.append(emulate(launch[0], case["late"], launch[1])))
    same_nan = all(torch.equal(ours.isnan(), right.isnan()) for ours, right in ((out, ref), (lse, ref_lse)))
    out, ref = out.nan_to_num(), ref.nan_to_num()
    rounded = ref.to(out.dtype).double()
    scale = ref.norm()
    return {
        "case": name, "keys": case["keys"] + " rotated" * (case["keys"] == "e4m3" and case["rotate"]),
        "rel_err": float((out.double() - ref).norm() / scale), "rounding": float((rounded - ref).norm() / scale),
        "lse_err": float((lse - ref_lse).nan_to_num(0.0, 0.0, 0.0).abs().max()), "counters": left[0],
        "same_inf": bool((lse.isinf() == ref_lse.isinf()).all()), "same_nan": same_nan,
    }  # fmt: skip


def recorded(name: str) -> list[Launch]:
    """The launch of a compile case."""
    launches: list[Launch] = []
    attend(COMPILED[name], lambda launch, _: launches.append(launch))
    return launches


def compile_case(name: str) -> dict:
    (built,) = map(build, recorded(name))
    sass = built.sass()
    start, end = hot_loop(sass)
    ptx = built.kernel.asm["ptx"]
    return {
        "case": name, "registers": max(int(r) for x in sass.code for r in re.findall(r"\bR(\d+)\b", x)) + 1,
        "spill_bytes": built.spill_stores, "shared_bytes": built.kernel.metadata.shared, "loop": end + 1 - start,
        "loop_spills": sass.spills(start, end),
        "fenced": releases_are_fenced(sass), "atomics": re.findall(r"\batom\S+", ptx), "narrow": narrow_strides(ptx),
        "warnings": built.warnings,
    }  # fmt: skip


def narrow_strides(ptx: str) -> list[str]:
    """The products of 32 bits in which the strides of Q are used."""
    products = []
    for index in range(1, 3):
        (register,) = re.findall(rf"ld\.param\.\w+\s+(%\w+), \[decode_kernel_param_{index}\]", ptx)
        products += re.findall(rf"m(?:ul|ad)\.lo\.\w+\s[^;]*{register}\b[^;]*", ptx)
    return products


def releases_are_fenced(sass: Sass) -> bool:
    """Whether a fence waits for the loads of a stage before the barrier releases it to TMA, in the loop over pages."""
    start, end = hot_loop(sass)
    code = sass.code[start : end + 1]
    releases = [i for i, x in enumerate(code) if "SYNCS.ARRIVE" in x]
    loads = [max(i for i, x in enumerate(code[:release]) if x.startswith("LDSM")) for release in releases]
    return bool(releases) and all(
        any("FENCE.VIEW.ASYNC" in x for x in code[load:release]) for load, release in zip(loads, releases, strict=True)
    )


def hot_loop(sass: Sass) -> tuple[int, int]:
    """First and last instruction of the loop over pages: the innermost loop with MMAs."""
    loops = [(start, end) for start, end in sass.loops() if sum("HMMA" in x for x in sass.code[start:end]) >= 8]
    return min(loops, key=lambda loop: loop[1] - loop[0])


def main() -> None:
    mode, *words = [a for a in sys.argv[1:] if not a.startswith("--")]
    function, cases = (compile_case, COMPILED) if mode == "compile" else (emulate_case, EMULATED)
    rows = [function(name) for name in cases if not words or any(word in name for word in words)]
    if "--table" in sys.argv:
        print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
        print("\n".join("| " + " | ".join(str(x) for x in row.values()) + " |" for row in rows))
    else:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
