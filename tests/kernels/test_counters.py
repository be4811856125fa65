"""Which launches share counters: those of one stream outside graphs, and no others."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import pytest
import torch

from fp8attn.kernels import counters as module
from fp8attn.kernels.counters import counters

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)


@pytest.fixture
def machine(monkeypatch):
    """Simulated devices: their memory is the CPU's, and `capturing` says whether a graph is being captured."""

    class Machine:
        capturing = False
        made = 0

    machine = Machine()

    def new_pool(count, device):
        assert not machine.capturing, "a pool is made while a graph is captured"
        machine.made += 1
        return torch.zeros(count, dtype=torch.int32)

    monkeypatch.setattr(module, "_new_pool", new_pool)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: machine.capturing)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device=None, **kind: zeros(*shape, **kind))
    for name in ("_streams", "_pools"):
        monkeypatch.setattr(module, name, {})
    monkeypatch.setattr(module, "_low", set())
    monkeypatch.setattr(module, "_all", [])
    return machine


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    ends = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (a, b)]
    return ends[0][0] < ends[1][1] and ends[1][0] < ends[0][1]


def test_a_stream_keeps_its_counters(machine):
    a = counters(FIRST, 7, 264)
    assert a.shape == (264,) and a.dtype == torch.int32 and not a.any() and a.data_ptr() % 16 == 0
    assert counters(FIRST, 7, 264) is a and machine.made == 1


@pytest.mark.parametrize("other", [(FIRST, 8, 264), (SECOND, 7, 264), (FIRST, 7, 1)])
def test_streams_devices_and_kernels_share_nothing(machine, other):
    a, b = counters(FIRST, 7, 264), counters(*other)
    assert not overlap(a, b) and b.data_ptr() % 16 == 0


def test_every_captured_launch_has_counters_of_its_own(machine):
    """Two graphs captured on one stream may be replayed at the same time, beside launches on that stream."""
    alone = counters(FIRST, 7, 264)
    machine.capturing = True
    captured = [counters(FIRST, 7, 264) for _ in range(5)]
    machine.capturing = False
    every = [alone, *captured, counters(FIRST, 8, 264)]
    assert not any(overlap(a, b) for i, a in enumerate(every) for b in every[:i])
    assert counters(FIRST, 7, 264) is alone


def test_a_capture_without_a_pool_makes_zeros_in_its_graph(machine):
    machine.capturing = True
    a, b = counters(FIRST, 7, 264), counters(FIRST, 7, 264)
    assert not a.any() and not overlap(a, b) and machine.made == 0
    machine.capturing = False
    assert not overlap(counters(FIRST, 7, 264), a) and machine.made == 1


def test_the_pool_is_replaced_before_captures_exhaust_it(machine):
    first = counters(FIRST, 7, 264)
    while machine.made == 1:
        machine.capturing = True
        taken = counters(FIRST, 7, module.POOL // 16)
        machine.capturing = False
        assert counters(FIRST, 7, 264) is first  # a launch whose counters are known replaces the pool
    assert len(module._pools[FIRST.index]) == module.POOL and not overlap(taken, module._pools[FIRST.index])
    for _ in range(100):
        counters(FIRST, 7, 264)
    assert machine.made == 2


def test_the_counters_of_a_graph_are_never_freed(machine):
    """A launch takes an address, and keeps no reference. Two pools are replaced, and the second served
    captures alone.
    """
    counters(FIRST, 7, 264)
    taken = []
    while machine.made < 3:
        machine.capturing = True
        taken.append(weakref.ref(counters(FIRST, 7, module.POOL // 16).untyped_storage()))
        machine.capturing = False
        counters(FIRST, 7, 264)
    assert all(storage() is not None for storage in taken)


def test_more_streams_than_a_pool_serves(machine):
    """The counters of a stream never move, so none is shared by wrapping around."""
    every = [counters(FIRST, stream, module.POOL // 64) for stream in range(200)]
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in every)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert all(counters(FIRST, stream, module.POOL // 64) is x for stream, x in enumerate(every))


def test_threads_share_nothing_by_accident(machine):
    def take(thread: int) -> list[torch.Tensor]:
        return [counters(FIRST, 1000 * thread + i, 264) for i in range(200)]

    with ThreadPoolExecutor(8) as pool:
        every = [x for taken in pool.map(take, range(8)) for x in taken]
    spans = sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in every)
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
