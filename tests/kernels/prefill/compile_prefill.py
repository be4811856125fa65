"""Compiles the launches of `kernels.prefill.prefill_attention` without a GPU, and checks the report of ptxas and the
machine code.

`test_prefill_compile.py` calls this in a process where Triton compiles. By hand:

    python -m tests.kernels.prefill.compile_prefill [case substring ...] [--table] [--keep DIR]
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import torch
import triton

from fp8attn import AttentionParams, KVPages
from fp8attn.formats.codec import FP8
from fp8attn.kernels import prefill
from fp8attn.kernels.launch import Launch
from fp8attn.kernels.operands import NOTE
from tests.support.machine_code import Built, Sass, build, dry

EVERYTHING = {"window": 300, "softcap": 30.0, "sinks": True, "leftpad_k": True, "cu_seqlens_q": True, "means": True}
CASES = (
    {f"d{d}": {"head_dim": d} for d in (64, 80, 96, 128, 192, 256)}
    | {f"d{d}-e4m3": {"head_dim": d, "keys": "e4m3"} for d in (64, 128, 256)}
    | {
        "d128-long-e4m3-no-lse": {"head_dim": 128, "keys": "e4m3", "long": True, "lse": False},
        "d256-e4m3-no-lse": {"head_dim": 256, "keys": "e4m3", "lse": False},
        "d128-long-e4m3-ragged": {"head_dim": 128, "keys": "e4m3", "long": True, "cu_seqlens_q": True},
        "d128-not-rotated": {"head_dim": 128, "rotate_keys": False},
        "d128-e4m3-not-rotated": {"head_dim": 128, "keys": "e4m3", "rotate_keys": False},
        "d128-means": {"head_dim": 128, "means": True},
        "d256-e4m3-means": {"head_dim": 256, "keys": "e4m3", "means": True},
        "d128-fp16": {"head_dim": 128, "dtype": torch.float16},
        "d128-q8": {"head_dim": 128, "dtype": FP8},
        "d128-long": {"head_dim": 128, "long": True},
        "d128-q8-long": {"head_dim": 128, "long": True, "dtype": FP8},
        "d128-no-lse": {"head_dim": 128, "lse": False},
        "d128-q8-no-lse": {"head_dim": 128, "lse": False, "dtype": FP8},
        "d128-long-no-lse": {"head_dim": 128, "lse": False, "long": True},
        "d128-q8-long-no-lse": {"head_dim": 128, "lse": False, "long": True, "dtype": FP8},
        "d128-long-ragged-no-lse": {"head_dim": 128, "lse": False, "long": True, "cu_seqlens_q": True},
        "d128-split": {"head_dim": 128, "splits": 2},
        "d128-long-split": {"head_dim": 128, "splits": 2, "long": True},
        "d128-q8-long-split": {"head_dim": 128, "splits": 2, "long": True, "dtype": FP8},
        "d128-ragged": {"head_dim": 128, "cu_seqlens_q": True},
        "d128-long-ragged": {"head_dim": 128, "long": True, "cu_seqlens_q": True},
        "d128-q8-long-ragged": {"head_dim": 128, "long": True, "dtype": FP8, "cu_seqlens_q": True},
        "d128-tile64": {"head_dim": 128, "tile": 64},
        "d128-new": {"head_dim": 128, "lse": False, "new": True},
        "d256-q8": {"head_dim": 256, "dtype": FP8},
        "d256-no-lse": {"head_dim": 256, "lse": False},
        "d256-q8-no-lse": {"head_dim": 256, "lse": False, "dtype": FP8},
        "d256-ragged": {"head_dim": 256, "cu_seqlens_q": True},
        "d256-ragged-no-lse": {"head_dim": 256, "lse": False, "cu_seqlens_q": True},
        "d64-window": {"head_dim": 64, "window": 300},
        "d128-window": {"head_dim": 128, "window": 300},
        "d256-window": {"head_dim": 256, "window": 300},
        "d64-exact": {"head_dim": 64, "exact": True},
        "d128-exact": {"head_dim": 128, "exact": True},
        "d128-exact-no-lse": {"head_dim": 128, "exact": True, "lse": False},
        "d128-long-exact": {"head_dim": 128, "long": True, "exact": True},
        "d128-long-exact-no-lse": {"head_dim": 128, "long": True, "exact": True, "lse": False},
        "d256-exact": {"head_dim": 256, "exact": True},
        "d64-invariant": {"head_dim": 64, "invariant": True},
        "d128-long-invariant": {"head_dim": 128, "long": True, "invariant": True},
        "d128-long-e4m3-invariant": {"head_dim": 128, "keys": "e4m3", "long": True, "invariant": True},
        "d256-e4m3-invariant": {"head_dim": 256, "keys": "e4m3", "invariant": True},
        "d64-all": dict(head_dim=64, **EVERYTHING),
        "d128-all": dict(head_dim=128, **EVERYTHING),
        "d128-long-all": dict(head_dim=128, long=True, **EVERYTHING),
        "d256-all": dict(head_dim=256, **EVERYTHING),
    }
)


def launch(head_dim: int, dtype=torch.bfloat16, window=0, softcap=0.0, sinks=False, leftpad_k=False, cu_seqlens_q=False,
splits=1,
           long=False, lse=True, keys="int8", rotate_keys=True, means=False,
           exact=False, new=False, invariant=False, tile=128) -> Launch:  # fmt: skip
    """The launch of `prefill_kernel` for 64 queries of two sequences; FP8 queries ask for E4M3 keys that are not
    rotated.
    """
    keys, rotate_keys = ("e4m3", False) if dtype == FP8 else (keys, rotate_keys)
    mean = torch.zeros(2, head_dim) if means else None
    pages = KVPages.empty(8, 2, head_dim, 2, 4, key_dtype=keys, rotate_keys=rotate_keys, k_mean=mean, v_mean=mean)
    with dry() as (launches, patch):
        patch.setattr(prefill.plan, "num_sms", lambda device: 132)
        shapes = prefill.cut.SHAPES
        patch.setattr(
            prefill.cut, "cuts", lambda width, *_: [(replace(shapes[width][1 if long else 0], tile=tile), splits)]
        )
        prefill.plan.make_prefill_plan.cache_clear()  # a plan keeps what these gave
        params = AttentionParams(
            cu_seqlens_q=torch.zeros(3, dtype=torch.int32) if cu_seqlens_q else None,
            max_seqlen_q=32, causal=True, softmax_scale=head_dim**-0.5, window=window, softcap=softcap,
            sinks=torch.zeros(4) if sinks else None, leftpad_k=torch.zeros(2, dtype=torch.int32) if leftpad_k else None,
            return_lse=lse, exact=exact, batch_invariant=invariant,
        )  # fmt: skip
        prefill.prefill_attention(torch.zeros(64, 4, head_dim).to(dtype), pages, params, new_keys=512 if new else 0)
        prefill.plan.make_prefill_plan.cache_clear()
    assert len(launches) == (1 if splits == 1 else 2)  # `combine`'s
    return launches[0]


def compile_case(case: str) -> dict:
    return {"case": case} | facts(build(launch(**CASES[case])))


def facts(built: Built) -> dict:
    """Instructions are of the whole kernel; the loop is the hot loop, of the warpgroup where it is longest; spills are
    bytes stored in the whole kernel, and instructions in the loop; barriers are those of a partition's warps in the
    loop; the end is how many bytes before the end of shared memory the ring's barriers begin."""
    sass = built.sass()
    loop, loop_spills, barriers = hot_loop(sass)
    return {
        "registers": built.registers,  # what ptxas starts from; a multiplying thread has Shape.registers
        "spill_bytes": built.spill_stores, "shared_bytes": built.kernel.metadata.shared, "instructions": len(sass.code),
        "loop": loop,
        "loop_spills": loop_spills, "barriers": barriers, "serialized": built.warnings, "unset": sass.unset_register(),
        "early": released_early(sass), "overwritten": sass.overwritten_operand(),
        "operands": getattr(built.kernel.metadata, NOTE, ""),
        "end": built.kernel.metadata.shared - ring_barriers(built.kernel.asm["ptx"]),
    }  # fmt: skip


def overwritten_if_planted(case: str) -> tuple[str, str]:
    """What `Sass.overwritten_operand` finds after an instruction that overwrites an operand of a running product was
    put behind it; and that instruction."""
    sass = build(launch(**CASES[case])).sass()
    at = next(i for i, text in enumerate(sass.code) if "gsb0" in text and re.search(r"GMMA\S* R\d+, R\d+, gdesc", text))
    register = re.search(r", (R\d+), gdesc", sass.code[at])[1]
    planted = f"MOV {register}, RZ "
    sass.code.insert(at + 1, planted)
    sass.labels = {name: i + (i > at) for name, i in sass.labels.items()}
    return sass.overwritten_operand(), planted


def released_early(sass: Sass) -> str:
    """The first arrival that releases memory while products read it. Only V's release, the first arrival after a wait
    that ended products with V, may leave products under way, and only those of Q K, whose left operand is in shared
    memory.
    """
    running, values_ended = [], False  # groups of products, by whether they are of Q K
    for text in sass.code:
        if "GMMA" in text and "gsb0" in text:
            running.append(re.search(r"GMMA\S* R\d+, gdesc", text) is not None)
        elif wait := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x\w+)", text):
            ended = max(len(running) - int(wait[1], 16), 0)
            values_ended, running = not all(running[:ended]), running[ended:]
        elif "SYNCS.ARRIVE" in text:
            if running and not (values_ended and all(running)):
                return text
            values_ended = False
    return ""


def ring_barriers(ptx: str) -> int:
    """Where the ring's barriers are in shared memory: what the first load after `ptx.store_addresses` reads."""
    return int(re.search(r"ld\.shared\S*\s+[^\[]*\[global_smem\+(\d+)\]", ptx[ptx.index("%dynamic_smem_size") :])[1])


def hot_loop(sass: Sass) -> tuple[int, int, int]:
    """Instructions, spills and barriers of the hot loops, which are the innermost that multiply and do not mask."""
    longest = most = barriers = 0
    spans = sass.loops()
    for start, end in spans:
        body = sass.code[start : end + 1]
        # Waits whose retries ptxas moved to the end of the code look like loops too; they enclose exits.
        if any("EXIT" in x or "USETMAXREG" in x for x in body) or not any("GMMA" in x for x in body):
            continue
        if any(start <= a and b <= end and (a, b) != (start, end) and b - a > 100 for a, b in spans):
            continue
        if sum("FSEL" in x for x in body) < 32:
            longest, most = max(longest, len(body)), max(most, sass.spills(start, end))
            barriers = max(barriers, sum("BAR.SYNC" in x for x in body))
    return longest, most, barriers


def main() -> None:
    keep = Path(sys.argv.pop(sys.argv.index("--keep") + 1)) if "--keep" in sys.argv else None
    words = [a for a in sys.argv[1:] if not a.startswith("--")]
    rows = []
    for case in CASES:
        if not words or any(word in case for word in words):
            rows.append(compile_case(case))
            if keep:
                kernel = build(launch(**CASES[case])).kernel
                (keep / f"{case}.ptx").write_text(kernel.asm["ptx"])
                (keep / f"{case}.cubin").write_bytes(kernel.asm["cubin"])
    if "--table" in sys.argv:
        names = (
            "case",
            "regs",
            "spilled bytes",
            "shared",
            "instructions",
            "loop",
            "spills",
            "barriers",
            "C75xx",
            "unset",
            "early",
            "overwritten",
            "operands",
            "end",
        )
        print(f"| {' | '.join(names)} |\n|" + "---|" * len(names))
        for row in rows:
            print("| " + " | ".join("none" if cell == "" else str(cell) for cell in row.values()) + " |")
    else:
        print(json.dumps([row | {"triton": triton.__version__} for row in rows]))


if __name__ == "__main__":
    main()
