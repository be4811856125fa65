"""Graphs, streams, threads and devices at the same time: every result has the same bits as the call without the others.

Kernels whose CTAs meet in counters and scratch memory go wrong where two launches share these and overlap. So each
piece of work here is small (many launches run at once), is repeated, and is compared bit by bit.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import pytest
import torch

import fp8attn
from fp8attn import KVPages, PagedKVCache
from fp8attn.formats.codec import FP8
from tests.support.kernel_cases import cumulative, poison_empty

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
pytest.importorskip("triton")

BACKENDS = ["auto", "triton"]
TWO_DEVICES = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    poison_empty(monkeypatch)


LENGTHS = {"decode": [5000, 700, 3000], "ragged": [900, 200, 2500], "prefill": [1500] * 3, "append": [130, 127, 260]}
QUERIES = {"decode": [1] * 3, "ragged": [600, 200, 333], "prefill": [400] * 3, "append": [40, 1, 200]}  # or new tokens


class Work:
    """A call with its own inputs, which can be repeated and captured.

    Attributes:
        run: makes the call once and returns its results.
    """

    def __init__(self, kind: str, seed: int, backend: str = "auto", device: str = "cuda:0") -> None:
        torch.manual_seed(seed)
        self.device, self.backend = torch.device(device), backend
        lengths, queries = [n + 64 * seed for n in LENGTHS[kind]], QUERIES[kind]
        cache = PagedKVCache(4, 128, num_seqs=3, num_pages=160, device=device)
        cache.append(0, *(self._tokens(sum(lengths), 4) + 1 for _ in "kv"), lengths=lengths)
        self.q = self._tokens(sum(queries), 16)
        bounds = cumulative(queries, device)
        self.run: Callable[[], list[torch.Tensor]] = self._attend
        if kind == "append":
            cache.reserve([a + b for a, b in zip(lengths, queries, strict=True)])
            self.before = cache.pages(0).pool.clone(), cache.pages(0).cache_seqlens.clone()
            self.k, self.v = self._tokens(sum(queries), 4), self._tokens(sum(queries), 4)
            self.options = {"cu_seqlens": bounds, "max_seqlen": max(queries)}
            self.run = self._append
        else:
            self.options = {"cu_seqlens_q": bounds, "max_seqlen_q": max(queries)} if kind == "ragged" else {}
        self.pages = cache.pages(0)

    def _tokens(self, tokens: int, heads: int) -> torch.Tensor:
        return (
            torch.randn(tokens, heads, 128).bfloat16().to(self.device)
        )  # of the CPU's generator: the same on every device

    def _attend(self) -> list[torch.Tensor]:
        return list(fp8attn.attention(self.q, self.pages, **self.options, return_lse=True, backend=self.backend))

    def _append(self) -> list[torch.Tensor]:
        """The whole cache, after an append to its earlier contents."""
        written = self.pages.pool, self.pages.cache_seqlens
        for x, before in zip(written, self.before, strict=True):
            x.copy_(before)
        fp8attn.append(self.pages, self.k, self.v, **self.options, backend=self.backend)
        return [x.clone() for x in written]


def tokens_of(pages: KVPages, lengths: list[int]) -> list[torch.Tensor]:
    """K and V of each sequence. (The rest of a new page is unspecified.)"""
    return [x for seq, length in enumerate(lengths) for x in pages.read(seq, length)]


def count_differences(results: list[torch.Tensor], expected: list[torch.Tensor]) -> torch.Tensor:
    """The number of elements whose bits differ, counted on the device. Nothing waits for it."""
    codes = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    pairs = zip(results, expected, strict=True)
    return torch.stack([(a.view(codes[a.itemsize]) != b.view(codes[b.itemsize])).sum() for a, b in pairs]).sum()


def counter(device: str | int = 0) -> torch.Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def alone(*works: Work) -> list[list[torch.Tensor]]:
    """The results of each work, called alone. It is called twice, so that a work that is not a function of its inputs
    is found here.
    """
    found = []
    for work in works:
        once, again = work.run(), work.run()
        torch.cuda.synchronize(work.device)
        assert count_differences(once, again) == 0
        assert not any(x.isnan().any() for x in once if x.is_floating_point())
        found.append(once)
    return found


def capture(
    work: Work, expected: list[torch.Tensor], repeats: int = 1, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
    """A graph of `repeats` calls, by default captured on the process's one stream for captures; and what it adds the
    differences to.
    """
    graph, count = torch.cuda.CUDAGraph(), counter(work.device)
    with torch.cuda.graph(graph, stream=stream):
        results = [work.run() for _ in range(repeats)]
        for each in results:
            count += count_differences(each, expected)
    return graph, count


# Graphs


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "kinds", [("decode", "decode"), ("decode", "prefill"), ("ragged", "ragged"), ("append", "decode")], ids="-".join
)
def test_two_graphs_of_one_capture_stream_replayed_at_once(kinds, backend):
    works = [Work(kind, seed, backend) for seed, kind in enumerate(kinds)]
    expected = alone(*works)
    graphs, counts = zip(
        *(capture(work, want, repeats=16) for work, want in zip(works, expected, strict=True)), strict=True
    )
    for graph in graphs:
        graph.replay()
        torch.cuda.synchronize()
    assert [int(count) for count in counts] == [0, 0], "replayed alone"
    streams = [torch.cuda.Stream() for _ in works]
    # A race was once seen in one of 90,000 decode calls (docs/lab/2026-11-decode.md): such a number of calls takes 10
    # s.
    for _ in range(6000 if kinds == ("decode", "prefill") and backend == "auto" else 200):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert [int(count) for count in counts] == [0, 0], "replayed at once"
    for work, want in zip(works, expected, strict=True):
        assert count_differences(work.run(), want) == 0, "nothing may be left behind that a later call meets"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["decode", "ragged", "append"])
def test_eager_calls_beside_a_graph(kind, backend):
    """After its capture, and while it is replayed on another stream."""
    works = [Work(kind, seed, backend) for seed in range(2)]
    expected = alone(*works)
    graph, replayed = capture(works[0], expected[0], repeats=16)
    assert count_differences(works[0].run(), expected[0]) == 0
    stream, called = torch.cuda.Stream(), counter()
    torch.cuda.synchronize()
    for _ in range(50):
        with torch.cuda.stream(stream):
            graph.replay()
        for _ in range(4):
            called += count_differences(works[1].run(), expected[1])
    torch.cuda.synchronize()
    assert [int(replayed), int(called)] == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["decode", "prefill", "ragged", "append"])
def test_captured_on_a_stream_that_nothing_has_run_on(kind, backend):
    """The kernels are compiled. On this stream, and of a batch like this, the capture holds the first call."""
    (expected,) = alone(work := Work(kind, 3, backend))
    with new_stream() as stream:
        graph, count = capture(work, expected, stream=stream)
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            count += count_differences(work.run(), expected)
            graph.replay()
        torch.cuda.synchronize()
        assert int(count) == 0


# Streams and threads


@contextmanager
def new_stream() -> Iterator[torch.cuda.Stream]:
    """A stream with a new handle. (torch has 32 streams of its own, and gives them out one after another.)"""
    cudart, handle = torch.cuda.cudart(), ctypes.c_void_p()
    assert int(cudart.cudaStreamCreate(ctypes.addressof(handle))) == 0
    try:
        yield torch.cuda.ExternalStream(handle.value)
    finally:
        torch.cuda.synchronize()
        assert int(cudart.cudaStreamDestroy(handle.value)) == 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_streams_one_after_another(backend):
    """As an engine that makes a stream for each request. What the kernels keep for a stream must not add up to much."""
    works = [Work(kind, seed, backend) for seed, kind in enumerate(("decode", "ragged"))]
    expected = alone(*works)
    counts = torch.zeros(600, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    with ExitStack() as stack:
        for i, count in enumerate(counts):
            with torch.cuda.stream(stack.enter_context(new_stream())):
                count += count_differences(works[i % 2].run(), expected[i % 2])
            if i % 50 == 0:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()  # the allocator's pools are kept by stream
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before < len(counts) * 128 * 1024
    assert not counts.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_host_threads_on_new_streams(backend):
    """Each decodes, prefills and appends; they begin together."""
    works = [
        [Work(kind, 10 * thread + i, backend) for i, kind in enumerate(("decode", "ragged", "append"))]
        for thread in range(2)
    ]
    expected = [alone(*each) for each in works]
    barrier = threading.Barrier(2)

    def run(thread: int) -> int:
        with new_stream() as stream, torch.cuda.stream(stream):
            count = counter()
            barrier.wait()
            for _ in range(100):
                for work, want in zip(works[thread], expected[thread], strict=True):
                    count += count_differences(work.run(), want)
            return int(count)

    for _ in range(3):  # on new streams each time
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(run, range(2))) == [0, 0]


# Devices


def public_calls(device: str, backend: str) -> dict[str, list[torch.Tensor]]:
    """The results of every public function that launches kernels, on inputs that are the same on each device."""
    found = {kind: Work(kind, 1, backend, device).run() for kind in ("decode", "prefill", "ragged", "append")}
    torch.manual_seed(7)
    q, k, v = (torch.randn(2, heads, 700, 128).bfloat16().to(device) for heads in (8, 4, 4))
    angle = torch.randn(700, 64).to(device)
    tables = angle.cos(), angle.sin()
    found["from_dense"] = tokens_of(fp8attn.from_dense(k, v, backend=backend), [700, 700])
    q8, k8, v8 = (x.to(FP8) for x in (q, k, v))
    found["sdpa_quantized"] = [fp8attn.scaled_dot_product_attention_quantized(q8, k8, v8, True, backend=backend)]
    for causal in (False, True):
        options = {"is_causal": causal, "enable_gqa": True, "backend": backend}
        found[f"sdpa, causal={causal}"] = [fp8attn.scaled_dot_product_attention(q, k, v, **options)]
        found[f"rope sdpa, causal={causal}"] = [fp8attn.rope_scaled_dot_product_attention(q, k, v, *tables, **options)]
    cache = PagedKVCache(4, 128, num_seqs=2, device=device, backend=backend)
    cache.append(0, k[0, :, :300].transpose(0, 1), v[0, :, :300].transpose(0, 1), lengths=[100, 200])
    cache.append(0, k[1, :, :2].transpose(0, 1), v[1, :, :2].transpose(0, 1))
    decoded = fp8attn.attention(q[:, :, 0].contiguous(), cache.pages(0), backend=backend)
    found["PagedKVCache"] = [decoded, *tokens_of(cache.pages(0), [101, 201])]
    return found


def assert_same(found: dict[str, list[torch.Tensor]], expected: dict[str, list[torch.Tensor]]) -> None:
    for name, results in expected.items():
        assert (
            int(count_differences([x.to(y.device) for x, y in zip(found[name], results, strict=True)], results)) == 0
        ), name


@TWO_DEVICES
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_function_on_a_device_that_is_not_current(backend):
    expected = public_calls("cuda:0", backend)
    assert torch.cuda.current_device() == 0
    for _ in range(2):  # a first call, and one of what is compiled
        found = public_calls("cuda:1", backend)
        assert torch.cuda.current_device() == 0
        assert {x.device.index for results in found.values() for x in results} == {1}
        assert_same(found, expected)
    with torch.cuda.device(1):
        assert_same(public_calls("cuda:0", backend), expected)
        assert_same(public_calls("cuda:1", backend), expected)
        assert torch.cuda.current_device() == 1


@TWO_DEVICES
@pytest.mark.parametrize("backend", BACKENDS)
def test_two_devices_by_turns(backend):
    """Call after call on alternate devices, eagerly and by a graph on each; then each from a thread of its own."""
    works = [
        [Work(kind, 5, backend, f"cuda:{device}") for kind in ("decode", "ragged", "append")] for device in range(2)
    ]
    expected = [alone(*each) for each in works]
    assert_same(dict(enumerate(expected[1])), dict(enumerate(expected[0])))
    called, graphs, replayed = [counter(device) for device in range(2)], [], []
    for device in range(2):
        with torch.cuda.device(device):
            graph, count = capture(works[device][0], expected[device][0], stream=torch.cuda.Stream(device))
        graphs.append(graph)
        replayed.append(count)
    for _ in range(20):
        for i in range(3):
            for device in range(2):
                called[device] += count_differences(works[device][i].run(), expected[device][i])
        for device in range(2):
            with torch.cuda.device(device):
                graphs[device].replay()
    for device in range(2):
        torch.cuda.synchronize(device)
    assert [int(count) for count in (*called, *replayed)] == [0] * 4

    def run(device: int) -> int:
        count = counter(device)
        with torch.cuda.device(device):
            for _ in range(30):
                for work, want in zip(works[device], expected[device], strict=True):
                    count += count_differences(work.run(), want)
        return int(count)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, range(2))) == [0, 0]
