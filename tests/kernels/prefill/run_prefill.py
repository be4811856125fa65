"""The Hopper prefill kernel on the CPU (`tests/emulator`), and its error against float64.

`test_prefill.py` calls this in a process where Triton compiles. By hand:

    python -m tests.kernels.prefill.run_prefill [case ...]
"""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace

import torch

from fp8attn import AttentionParams, reference
from fp8attn.formats.codec import E4M3, FP8
from fp8attn.kernels import prefill
from tests.emulator import emulate
from tests.kernels.decode.run_decode import filled_pages, poison_left_of_windows
from tests.support.kernel_cases import poison_empty
from tests.support.machine_code import dry

# Keys end within a tile, queries within a warpgroup's rows, and before the first block's some warpgroups have none:
# stored by TMA and, of the ragged batch, by masks. Rows see few keys and many. Those without means have the kernels of
# cases in `compile_prefill.py`, so that each is compiled once.
CASES = {
    "INT8 keys": {"lengths": [330], "queries": [170], "head_dim": 128, "dtype": torch.bfloat16, "keys": "int8",
    "out": True, "means": False},
    "E4M3 keys": {"lengths": [330], "queries": [170], "head_dim": 128, "dtype": torch.bfloat16, "keys": "e4m3"},
    "new pages, two CTAs": {
        "lengths": [714, 714], "queries": [170, 170], "head_dim": 128, "dtype": torch.bfloat16, "keys": "int8",
        "new": True, "sms": 2, "means": False, "lse": False,
    },
    "ragged, two warpgroups": {
        "lengths": [330, 200, 0, 64], "queries": [170, 200, 0, 20], "head_dim": 128, "dtype": torch.bfloat16,
        "keys": "int8", "splits": 1,
        "out": True,
    },
    "E4M3 keys, two warpgroups": {
        "lengths": [330], "queries": [170], "head_dim": 128, "dtype": torch.bfloat16, "keys": "e4m3", "splits": 1,
        "means": False,
    },
    "FP8 queries, two warpgroups": {
        "lengths": [330, 900], "queries": [170, 170], "head_dim": 128, "dtype": FP8, "keys": "e4m3", "splits": 1,
    },
    "tiles of 64 keys": {
        "lengths": [330], "queries": [170], "head_dim": 128, "dtype": torch.bfloat16, "keys": "int8", "splits": 1,
        "tile": 64, "means": False,
    },
    "exact": {"lengths": [1100], "queries": [170], "head_dim": 128, "dtype": torch.bfloat16, "keys": "int8",
    "exact": True, "means": False},
    "exact, E4M3 keys": {"lengths": [1100], "queries": [100], "head_dim": 64, "dtype": torch.float16, "keys": "e4m3",
    "exact": True},
    "FP8 queries, three warpgroups": {"lengths": [714, 190], "queries": [170, 170], "head_dim": 64, "dtype": FP8,
    "keys": "e4m3"},
    "head_dim 192": {"lengths": [450], "queries": [170], "head_dim": 192, "dtype": torch.bfloat16, "keys": "int8"},
    "head_dim 256": {"lengths": [330], "queries": [170], "head_dim": 256, "dtype": torch.bfloat16, "keys": "e4m3",
    "means": False},
    "window, padding, softcap, sinks": {
        "lengths": [190, 714], "queries": [70, 200], "head_dim": 64, "dtype": torch.bfloat16, "keys": "int8",
        "window": 300,
        "leftpad": [130, 60], "softcap": 20.0, "sinks": True,
    },
    "ragged, output given": {
        "lengths": [70, 330], "queries": [70, 40], "head_dim": 64, "dtype": torch.bfloat16, "keys": "int8", "out": True,
    },
    "ragged, parts of the keys": {
        "lengths": [70, 0, 330], "queries": [70, 0, 200], "head_dim": 64, "dtype": torch.bfloat16, "keys": "int8",
        "splits": 3,
    },
    "negative scale": {"lengths": [190], "queries": [130], "head_dim": 64, "dtype": torch.bfloat16, "keys": "int8",
    "scale": -0.125, "means": False},
    "negative scale, FP8 queries": {"lengths": [190], "queries": [130], "head_dim": 64, "dtype": FP8, "keys": "e4m3",
    "scale": -0.125},
    "scale of zero": {"lengths": [190], "queries": [130], "head_dim": 64, "dtype": torch.bfloat16, "keys": "int8",
    "scale": 0.0, "means": False},
    "two launches": {"lengths": [330, 190], "queries": [170, 170], "head_dim": 64, "dtype": torch.bfloat16,
    "keys": "int8", "last": 90},
}  # fmt: skip


def combined(
    parts: torch.Tensor, lse: torch.Tensor, out: torch.Tensor, out_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `kernels.combine` makes of parts, in PyTorch. Every row has keys in a part."""
    lse, mean_score = lse
    unseen = lse == -torch.inf
    top = lse.amax(0)
    weights = torch.exp2(lse - top)
    total = weights.sum(0)
    sums = (weights[..., None] * torch.where(unseen[..., None], 0.0, parts)).sum(0)
    lse = (top + total.log2() + torch.where(unseen, -torch.inf, mean_score).amax(0)) * math.log(2)
    return (sums / total[:, None]).to(out.dtype).view(out.shape), lse.view(out_lse.shape)


def emulate_case(name: str) -> dict:
    case = CASES[name]
    torch.manual_seed(0)
    rotated = case["dtype"] != FP8
    means = case.get("means", True)
    pages = filled_pages(
        case["lengths"], 1, case["head_dim"], v_mean=1.0, keys=case["keys"], rotate=rotated, means=means
    )
    new = case.get("new", False)  # pages in the order of sequences, which the launch before writes
    if new:
        table = pages.page_table[:, :-1]
        in_order = torch.arange(table.numel(), dtype=torch.int32).view(table.shape)
        pages = replace(pages, pool=pages.pool[table.flatten()], page_table=in_order)
    queries = case["queries"]
    poison_left_of_windows(pages, case["lengths"], queries, case.get("window", 0))
    q = torch.randn(sum(queries), 1, case["head_dim"])
    q = E4M3.quantize(q) if case["dtype"] == FP8 else q.to(case["dtype"])
    bounds = torch.tensor([0, *queries], dtype=torch.int32).cumsum(0).int() if len(set(queries)) > 1 else None
    causal = "last" not in case
    options = {
        "cu_seqlens_q": bounds, "max_seqlen_q": max(queries), "causal": causal,
        "softmax_scale": case.get("scale", case["head_dim"] ** -0.5),
        "window": case.get("window", 0), "softcap": case.get("softcap", 0.0),
        "sinks": torch.randn(1) if "sinks" in case else None,
        "leftpad_k": torch.tensor(case["leftpad"], dtype=torch.int32) if "leftpad" in case else None,
        "return_lse": causal and case.get("lse", True),
        "exact": case.get("exact", False),
    }  # fmt: skip
    target = torch.full_like(q, torch.nan) if case.get("out") else None
    with dry() as (launches, patch):
        patch.setattr(
            prefill.plan, "num_sms", lambda device: case.get("sms", 1)
        )  # one CTA has all items; or two have two each
        if (
            new or "splits" in case
        ):  # the first shape: two warpgroups at head_dim 128, which may begin before the pages are written
            shape = replace(prefill.cut.SHAPES[case["head_dim"]][0], tile=case.get("tile", 128))
            patch.setattr(prefill.cut, "cuts", lambda *_: [(shape, case.get("splits", 1))])
        if "splits" in case:  # of one tile or more, so that blocks at a sequence's start have parts without keys
            patch.setattr(prefill.plan, "min_pages_per_split", lambda *_: 1)
        if "last" in case:  # all queries see all keys
            patch.setattr(
                prefill.plan,
                "last_wave",
                lambda width, sms, problem, chip: case["last"] if problem.max_seqlen_q == max(queries) else 0,
            )
        poison_empty(patch)
        prefill.plan.make_prefill_plan.cache_clear()  # a plan keeps what these gave
        out, lse = prefill.prefill_attention(
            q, pages, AttentionParams(**options), target, case["lengths"][0] if new else 0
        )
        assert target is None or out is target
        prefill.plan.make_prefill_plan.cache_clear()
    tables = [x for x in launches[0].args if x is pages.page_table]
    assert len(tables) == (0 if new else 1)
    written = (
        (pages.pool,)
        if new
        else (pages.pool, pages.page_table, pages.cache_seqlens, q, *(x for x in (bounds,) if x is not None))
    )
    left = sum(emulate(launched, written_before=written) for launched in launches[: 2 if "last" in case else 1])
    if case.get("splits", 1) > 1:
        out, lse = combined(*launches[1].args[:2], out, lse)
    ref, ref_lse = reference.attention(
        q, pages, AttentionParams(**options), compute_dtype=torch.float64, out_dtype=torch.float64
    )
    off = out.double() - ref
    rows = off.norm(dim=-1) / ref.norm(dim=-1).clamp_min(1e-9)  # rows that see no key are zeros
    return {
        "case": name, "rel_err": float(off.norm() / ref.norm()), "row_err": float(rows.max()),
        "lse_err": 0.0 if lse is None else float((lse - ref_lse).abs().max()),
        "nan": bool(out.isnan().any() | (lse is not None and lse.isnan().any())), "counters": left,
    }  # fmt: skip


if __name__ == "__main__":
    print(json.dumps([emulate_case(name) for name in sys.argv[1:] or CASES]))
