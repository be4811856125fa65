"""On the GPU: the static form of a cache against the growing form, and files of caches that streams are writing to."""

import pytest
import torch

from fp8attn import PagedKVCache
from tests.cache.fuzz import fuzz

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_static_is_growing_for_a_minute_of_random_operations():
    assert fuzz(10**9, seed=1, device="cuda", seconds=60.0) > 0


# vllm#45704
@pytest.mark.parametrize("other", [False, True], ids=["the stream that appends", "a stream that waits for it"])
def test_a_file_has_the_tokens_of_appends_that_have_not_run_yet(tmp_path, other):
    """Reported: blocks are copied to the host before the kernels that write them have run, so that they are wrong under
    load. Here a stream has work for milliseconds before it appends, and the file is written at once."""
    draw = torch.Generator("cuda").manual_seed(0)
    k, v = torch.randn(2, 700, 4, 128, generator=draw, device="cuda", dtype=torch.bfloat16)
    want, cache = (PagedKVCache(4, 128, num_pages=8, device="cuda") for _ in range(2))
    for at in (slice(0, 600), slice(600, 700)):
        want.append(0, k[at], v[at])
    expected = want.read(0, 0)
    load = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    for attempt in range(10):
        cache.reset()
        cache.append(0, k[:600], v[:600])
        torch.cuda.synchronize()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(20):
                load @ load
            cache.append(0, k[600:], v[600:])
            if not other:
                cache.save(tmp_path / "cache")
        if other:
            torch.cuda.current_stream().wait_stream(side)
            cache.save(tmp_path / "cache")
        found = PagedKVCache.load(tmp_path / "cache", device="cuda").read(0, 0)
        assert all(map(torch.equal, found, expected)), attempt


def test_a_file_of_a_sequence_while_a_stream_appends_to_another(tmp_path):
    """They share a pool and a page table, and no page."""
    draw = torch.Generator("cuda").manual_seed(0)
    k, v = torch.randn(2, 900, 4, 128, generator=draw, device="cuda", dtype=torch.bfloat16)
    cache = PagedKVCache(4, 128, num_seqs=2, num_pages=64, device="cuda")
    cache.append(0, k, v, lengths=[500, 400])
    expected, side = cache.read(0, 0), torch.cuda.Stream()
    torch.cuda.synchronize()
    for attempt in range(10):
        with torch.cuda.stream(side):
            cache.append(0, k[:300], v[:300], lengths=[0, 300])
        cache.save(tmp_path / "cache", seqs=[0])
        found = PagedKVCache.load(tmp_path / "cache", device="cuda").read(0, 0)
        assert all(map(torch.equal, found, expected)), attempt
    torch.cuda.synchronize()
    assert cache.lengths == (500, 3400)
