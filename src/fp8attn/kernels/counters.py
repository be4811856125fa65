"""Counters for kernels whose blocks count finished work: int32 zeros on the device, which are zero again after every
launch.

Launches may share counters only if they never run at the same time. So:

- Launches on one stream run one after another. They share the counters of the stream, also if several threads make
  them.
- A captured launch has its own counters, because its CUDA graph can run at the same time as any other work, also graphs
  of its stream.

Both are from a pool that is made before a graph needs it, because memory that a graph allocates must not outlive the
graph. If the pool is empty, a capture allocates its zeros in the graph, which then clears them at each replay. The
result is the same, with one more node.
Pools are never freed: CUDA does not tell when a graph is destroyed.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch

POOL = 1 << 20  # counters in a pool: 4 MB, a thousand captured launches of `decode` or a quarter million of `prefill`
LOW = POOL // 4  # with fewer left, the next launch outside a graph makes a new pool
ALIGNED = 4  # counters: 16 bytes, the alignment that kernels are compiled for

_streams: dict[tuple[int, int, int], torch.Tensor] = {}  # by device, stream and count
_pools: dict[int, torch.Tensor] = {}  # by device, the unused counters
_all: list[torch.Tensor] = []  # every pool
_low: set[int] = set()  # devices whose pool is to be replaced
_lock = Lock()


def counters(device: torch.device, stream: int, count: int) -> torch.Tensor:
    """`[count]` int32 zeros for one launch on `stream`, a handle: the current stream of `device`, which is the current
    device.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    key = device.index, stream, count
    if not capturing and not _low and (zeros := _streams.get(key)) is not None:
        return zeros
    with _lock:
        pool = _pools.get(device.index)
        if not capturing:
            if pool is None or len(pool) < max(LOW, count):
                pool = _pools[device.index] = _new_pool(max(POOL, count), device)
                _all.append(pool)
            _low.discard(device.index)
            if (zeros := _streams.get(key)) is not None:
                return zeros
        elif pool is None or len(pool) < count:
            _low.add(device.index)
            return torch.zeros(count, dtype=torch.int32, device=device)
        zeros, rest = pool[:count], pool[-(-count // ALIGNED) * ALIGNED :]
        _pools[device.index] = rest
        if len(rest) < LOW:
            _low.add(device.index)
        if not capturing:
            _streams[key] = zeros
    return zeros


def _new_pool(count: int, device: torch.device) -> torch.Tensor:
    """`[count]` int32 zeros, complete for use on every stream. It must not be called while a stream is capturing.

    Another thread makes them. The calling thread may be warming up for a CUDA graph
    (`torch.compile(mode="reduce-overhead")`). Its memory would be allocated from the graph's pool, and no tensor of
    that pool may outlive the graph.
    """

    def work() -> torch.Tensor:
        with torch.cuda.device(device):
            zeros = torch.zeros(count, dtype=torch.int32, device=device)
            torch.cuda.synchronize()
            return zeros

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(work).result()
