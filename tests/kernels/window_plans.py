"""The plans of attention with a window, over tables of different widths. It runs where Triton compiles
(`compiling.call`).
"""

import torch

from fp8attn import AttentionParams, KVPages
from fp8attn.kernels import decode, portable, prefill
from fp8attn.kernels.machine import Machine
from tests.support.machine_code import dry

KERNELS = {
    "decode": (decode.decode_attention, 1),
    "prefill": (prefill.prefill_attention, 64),
    "portable": (portable.portable_attention, 1),
}
HEADS, DIM = 2, 128


def numbers(name: str, columns: int, window: int) -> list[list[int]]:
    """Of each launch: its grid, then the numbers that the kernel gets, without the strides of the table."""
    attend, queries = KERNELS[name]
    pages = KVPages.empty(8, HEADS, DIM, 1, columns)
    q = torch.zeros(queries, 4 * HEADS, DIM).bfloat16()
    params = AttentionParams(cu_seqlens_q=None, max_seqlen_q=queries, causal=True, softmax_scale=1.0, window=window)
    with dry() as (launches, patch):
        for plan in (decode.plan, prefill.plan):
            patch.setattr(plan, "num_sms", lambda device: 132)
        patch.setattr(portable, "machine", lambda device: Machine(132, 232448, False, hopper=True))
        for plan in (decode.plan.make_decode_plan, prefill.plan.make_prefill_plan):
            plan.cache_clear()  # a plan keeps what these gave
        if name == "prefill":
            attend(q[None], pages, params)
        else:
            attend(q, pages, params)
        for plan in (decode.plan.make_decode_plan, prefill.plan.make_prefill_plan):
            plan.cache_clear()
    stride = pages.page_table.stride(0)
    return [[*launch.grid, *(x for x in launch.args if isinstance(x, int) and x != stride)] for launch in launches]
