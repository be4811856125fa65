"""Launches by CUDA's driver: from the second one on, of every kernel, with the same bits, in every thread."""

from threading import Thread

import pytest
import torch

pytest.importorskip("triton")

import triton

from fp8attn import PagedKVCache, scaled_dot_product_attention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def results() -> list[torch.Tensor]:
    """Of calls that launch every kernel: a prompt, a chunk of it in parts, decode steps, dense calls."""
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    cache, outs = PagedKVCache(2, 128, num_seqs=2, device="cuda"), []
    for tokens in (3000, 64, 1, 1):
        cache.append(0, randn(2 * tokens, 2, 128), randn(2 * tokens, 2, 128))
        outs.append(cache.attention(0, randn(2 * tokens, 8, 128)))
    for length in (100, 700):
        q, k = randn(1, 4, length, 128), randn(1, 4, length, 128)
        outs += [scaled_dot_product_attention(q, k, k, is_causal=causal) for causal in (False, True)]
    return outs


def bound_by_triton(monkeypatch) -> list[str]:
    """The names of the kernels whose arguments Triton binds from now on."""
    names, run = [], triton.JITFunction.run

    def noted(self, *args, **options):
        names.append(self.__name__)
        return run(self, *args, **options)

    monkeypatch.setattr(triton.JITFunction, "run", noted)
    return names


def test_later_launches_are_the_driver_s_with_equal_bits(monkeypatch):
    first = results()
    names = bound_by_triton(monkeypatch)
    for expected, out in zip(first, results(), strict=True):
        assert torch.equal(expected, out)
    assert names == []


def test_a_new_thread_and_another_stream_get_the_same_bits():
    first, later = results(), []
    torch.cuda.synchronize()

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            later.extend(results())
            torch.cuda.current_stream().synchronize()

    thread = Thread(target=work)
    thread.start()
    thread.join()
    assert all(torch.equal(expected, out) for expected, out in zip(first, later, strict=True))


def test_a_graph_of_such_launches_has_the_same_bits(monkeypatch):
    cache = PagedKVCache(2, 128, num_seqs=2, max_seqlen=1024, device="cuda")
    k, q = (torch.randn(2, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (2, 8))
    for _ in range(3):
        cache.append(0, k, k)
        expected = cache.attention(0, q)
        cache.truncate([0, 0])
    names, graph = bound_by_triton(monkeypatch), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cache.append(0, k, k)
        out = cache.attention(0, q)
    graph.replay()
    assert torch.equal(out, expected) and names == []
