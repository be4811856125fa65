"""Attention with head_dim 512, that of Gemma 4's full layers, beside vLLM's FlashAttention-4.

32 query heads and 4 KV heads (Gemma 4's 31B), causal: decode steps, and prompts in BF16. `fp8attn` and
`fp8attn-e4m3-keys` (or `-int8-keys`) are the portable kernels, which the backend `triton` has; `fp8attn-latents` is the
kernel for Hopper over pages that hold no keys, because they follow from values (`k_eq_v`), with the multiplication of
queries that this needs; `vllm-fa4-fp8` is what vLLM runs with `--kv-cache-dtype fp8`. Each is a CUDA graph; the L2
cache is flushed before every run. `rel_err` is against float64 on the bytes that each implementation was given. `gbps`
counts the live bytes of K and V, if both are in 8 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from fp8attn import KVPages, ops
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.formats.spec import PageSpec
from fp8attn.integrations.k_eq_v import absorb, key_matrix, key_of, to_latent
from fp8attn.kernels.latent.hopper import latent_decode
from fp8attn.kernels.portable import portable_attention

from . import peers
from .measure import checked, error, timed
from .problem import DEVICE, KEYS, K, Run, Shape, offsets, ours, own, square, steps

HEADS = {"kv_heads": 4, "dim": 512}
CASES = {
    **{f"B{b}-S{s * K}": steps(*(s * K,) * b, group=8, **HEADS) for b, s in ((64, 8), (16, 8), (1, 128))},
    **{f"causal-S{s * K}": square(512, True, s * K, q_heads=32, kv_heads=4) for s in (4, 16)},
}
PEERS = ("vllm-fa4-fp8", "vllm-fa4-bf16")
MOST_ERROR = 3e-3  # BF16's rounding of the output is 1.6e-3
MOST_ERROR_LATENTS = 0.02  # of a prompt, whose queries and weights are rounded to 8 bits
LATENTS = PageSpec.latent(512, 128, rope_in_codes=True)


def runs(case: str) -> dict[str, Run]:
    shape = CASES[case]
    q, k, v = shape.inputs()
    return own(portable_attention, KEYS, shape, q, k, v) | {"fp8attn-latents": latents(shape, q, k, v)}


def latents(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """Over pages of V and the turned channels of K, in a random order. K's other channels are those of V."""
    matrix = key_matrix(torch.ones(LATENTS.v_dim, dtype=q.dtype, device=DEVICE), LATENTS.k_dim - LATENTS.v_dim)
    counts = [-(-n // PAGE_SIZE) for n in shape.keys]
    order = torch.randperm(sum(counts) + 1, device=DEVICE).int()
    pages = KVPages.empty(len(order), shape.kv_heads, LATENTS, len(counts), max(counts), DEVICE)
    pages.pool.fill_(0xFF)
    pages.page_table[:] = order[-1]
    for seq, ids in enumerate(order[:-1].split(counts)):
        pages.page_table[seq, : counts[seq]] = ids
    ops.append(pages, *to_latent(k, v, matrix), cu_seqlens=offsets(shape.keys), max_seqlen=max(shape.keys))

    def held(seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, rope = pages.read(seq, shape.keys[seq], torch.float64)
        return key_of(x, rope, matrix), x

    return Run(lambda: ours(latent_decode, shape, absorb(q, matrix), pages)(), q, held)


def calls(case: str) -> dict[str, Callable]:
    return {impl: run.call for impl, run in runs(case).items()}


def measure(case: str) -> Iterator[dict]:
    shape = CASES[case]
    found = runs(case) | peers.runs(shape, *shape.inputs(), PEERS)
    rows, replays = {}, {}
    for impls, most in ((found.keys() - {"fp8attn-latents"}, MOST_ERROR), ({"fp8attn-latents"}, MOST_ERROR_LATENTS)):
        some = {impl: run for impl, run in found.items() if impl in impls}
        parts = checked(case, some, most, lambda run, out: {"rel_err": round(error(shape, out, run), 6)})
        rows, replays = rows | parts[0], replays | parts[1]
    yield from timed(shape, rows, replays, 20, flush=True)
