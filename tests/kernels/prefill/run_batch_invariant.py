"""`batch_invariant` of the Hopper kernel on the CPU (`tests/emulator`): the same query in other batches, chunks and
blocks.

`test_batch_invariant.py` calls this in a process where Triton compiles. By hand:

    python -m tests.kernels.prefill.run_batch_invariant [case ...]
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import torch

from fp8attn import AttentionParams, KVPages
from fp8attn.backends import load
from fp8attn.formats.codec import KeyDtype
from fp8attn.kernels import prefill
from tests.emulator import emulate
from tests.kernels.decode.run_decode import filled_pages
from tests.support.kernel_cases import poison_empty
from tests.support.machine_code import dry

LENGTH, GROUP = (
    390,
    2,
)  # keys of the sequence that is compared. Of its rows, those that see fewer than 256 keys are multiplied twice
CASES: dict[str, dict] = {
    "INT8 keys": {"head_dim": 128, "keys": "int8"},
    "head_dim 256, E4M3 keys": {"head_dim": 256, "keys": "e4m3"},
    "window": {"head_dim": 64, "keys": "int8", "window": 200},
}


def attend(q: torch.Tensor, pages: KVPages, lengths: list[int], counts: list[int], case: dict) -> torch.Tensor:
    """The output of `counts` queries of sequences of `lengths` keys, by the emulated kernel."""
    pages = replace(
        pages, page_table=pages.page_table[: len(lengths)], cache_seqlens=torch.tensor(lengths, dtype=torch.int32)
    )
    equal = len(set(counts)) == 1
    bounds = None if equal else torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    params = AttentionParams(
        bounds, max(counts), True, case["head_dim"] ** -0.5, case.get("window", 0), exact=case.get("exact", False),
        batch_invariant=True
    )  # fmt: skip
    with dry() as (launches, patch):
        patch.setattr(prefill.plan, "num_sms", lambda device: 1)
        poison_empty(patch)
        prefill.plan.make_prefill_plan.cache_clear()
        out, _ = load("hopper").attention(q, pages, params)
        prefill.plan.make_prefill_plan.cache_clear()
    [launched] = launches
    assert emulate(launched, written_before=(pages.pool, pages.page_table, pages.cache_seqlens, q)) == 0
    return out


def emulate_case(name: str) -> dict:
    """How many values of the same queries differ, by what is computed with them."""
    case = CASES[name]
    keys: KeyDtype = case["keys"]
    torch.manual_seed(0)
    pages = filled_pages([LENGTH, 90], 1, case["head_dim"], v_mean=1.0, keys=keys)
    q = torch.randn(LENGTH, GROUP, case["head_dim"]).to(torch.bfloat16)
    other = torch.randn(20, GROUP, case["head_dim"]).to(torch.bfloat16)
    whole = attend(q[200:], pages, [LENGTH], [LENGTH - 200], case)
    outputs = {
        "beside another": (attend(torch.cat([q[-90:], other]), pages, [LENGTH, 90], [90, 20], case)[:90], whole[-90:]),
        "a chunk before": (attend(q[200:300], pages, [300], [100], case), whole[:100]),
        "one": (attend(q[-1:], pages, [LENGTH], [1], case), whole[-1:]),
        "one, of 270 keys": (attend(q[269:270], pages, [270], [1], case), whole[69:70]),
        "one, of 230 keys": (attend(q[229:230], pages, [230], [1], case), whole[29:30]),
        "two, one each": (attend(torch.cat([q[-1:], other[:1]]), pages, [LENGTH, 90], [1, 1], case)[:1], whole[-1:]),
    }
    return {"case": name, "nan": bool(whole.isnan().any())} | {
        name: int((a != b).sum()) for name, (a, b) in outputs.items()
    }


if __name__ == "__main__":
    for name in sys.argv[1:] or CASES:
        print(json.dumps(emulate_case(name)), flush=True)
