"""Two host threads at once, without a GPU. (On one, with its streams and devices: `gpu/test_concurrency_gpu.py`.)"""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

import fp8attn


def everything(seed: int) -> list[torch.Tensor]:
    """Ragged prompts, decode steps, a copy and a truncation of a cache, and then a dense call."""
    numbers = torch.Generator().manual_seed(seed)
    cache = fp8attn.PagedKVCache(2, 64, num_seqs=2)
    found = []
    for lengths in ([200, 30], [1, 1], [3, 150]):
        k, v, q = (torch.randn(sum(lengths), heads, 64, generator=numbers).bfloat16() for heads in (2, 2, 4))
        cache.append(0, k, v, lengths=lengths)
        bounds = torch.tensor([0, lengths[0], sum(lengths)], dtype=torch.int32)
        found += fp8attn.attention(q, cache.pages(0), cu_seqlens_q=bounds, max_seqlen_q=max(lengths), return_lse=True)
    cache.copy(0, 1)
    cache.truncate([150, 129])
    found += [x for seq in range(2) for x in cache.read(0, seq)]
    q, k, v = torch.randn(3, 1, 2, 130, 64, generator=numbers)
    return [*found, fp8attn.scaled_dot_product_attention(q, k, v, is_causal=True)]


def test_each_thread_gets_what_it_gets_alone():
    expected = [everything(seed) for seed in range(2)]
    barrier = threading.Barrier(2)

    def run(seed: int) -> list[list[torch.Tensor]]:
        barrier.wait()
        return [everything(seed) for _ in range(5)]

    with ThreadPoolExecutor(2) as pool:
        for results, want in zip(pool.map(run, range(2)), expected, strict=True):
            for found in results:
                assert all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
    assert not torch.equal(expected[0][0], expected[1][0])
