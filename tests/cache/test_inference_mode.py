"""`torch.inference_mode`: a cache that was made or filled under it can be used outside, and the reverse, between any
two calls.
"""

import copy
import itertools
from contextlib import nullcontext

import pytest
import torch

import fp8attn
from fp8attn import LayerScales, PagedKVCache

HEADS, DIM, LAYERS = 1, 64, 2
SCALES = LayerScales(
    torch.full((HEADS,), 0.5), torch.full((HEADS,), 0.02), torch.zeros(HEADS, DIM), torch.zeros(HEADS, DIM)
)
FORMS = {
    "growing": {}, "fixed": {"num_pages": 30}, "static": {"max_seqlen": 500}, "window": {"window": 130},
    "fixed window": {"window": 130, "num_pages": 30}, "means": {"k_mean": torch.ones(HEADS, DIM),
    "v_mean": torch.ones(HEADS, DIM)},
    "scales": {"scales": SCALES},
}  # fmt: skip


def append(length):
    """An append of all layers, and its attention."""

    def call(cache, folder):
        if max(cache.lengths) + length > 400:
            cache.reset()
        generator = torch.Generator().manual_seed(length)
        k, v, q = (torch.randn(2 * length, heads, DIM, generator=generator) for heads in (HEADS, HEADS, 2))
        k = k * (1 + cache.table.lengths[0] / 50)  # scales grow
        for layer in range(LAYERS):
            cache.append(layer, k, v)
        return cache, cache.attention(0, q)

    return call


def loaded(cache, folder):
    cache.save(folder / "pages")
    options = {
        "max_seqlen": cache.max_seqlen,
        "num_pages": None if cache.table.grows or cache.max_seqlen else cache.num_pages,
    }
    return PagedKVCache.load(folder / "pages", **options), None


def appended_outside(cache, folder):
    """By `fp8attn.append`, and the lengths are read back."""
    if max(cache.lengths) == 500:
        cache.reset()
    x = torch.ones(2, HEADS, DIM)
    cache.reserve([length + 1 for length in cache.lengths])
    for layer in range(LAYERS):
        fp8attn.append(cache.pages(layer), x, x, static_scales=cache.layers[0].scales is not None)
    return cache, cache.sync()


CALLS = {
    "prompt": append(20),
    "step": append(1),
    "pages": append(129),
    "truncate": lambda cache, folder: (cache, cache.truncate([max(0, cache.lengths[0] - 3), cache.lengths[1]])),
    "select": lambda cache, folder: (cache, cache.select([1, 0])),
    "copy": lambda cache, folder: (cache, cache.copy(0, 1)),
    "reserve": lambda cache, folder: (cache, cache.reserve(300)),
    "reset": lambda cache, folder: (cache, cache.reset()),
    "file": loaded,
    "read": lambda cache, folder: (cache, cache.read(1, 0)[0]),
    "deepcopy": lambda cache, folder: (copy.deepcopy(cache), None),
    "sync": appended_outside,
}


def every_pair(names):
    """A sequence of names in which each is followed by each, itself included."""
    left, path, stack = {name: list(names) for name in names}, [], [names[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(stack.pop())
    return path[::-1]


@pytest.mark.parametrize("form", FORMS)
def test_every_call_under_inference_mode_and_the_next_one_outside(form, tmp_path):
    """And the reverse, for all pairs of calls: the same bits as a cache that never saw the mode."""
    names = every_pair(list(CALLS))
    assert {*itertools.pairwise(names)} == {*itertools.product(CALLS, CALLS)}
    caches = []
    for mode in (None, 0, 1):
        with torch.inference_mode() if mode == 1 else nullcontext():
            caches.append(PagedKVCache(HEADS, DIM, num_layers=LAYERS, num_seqs=2, **FORMS[form]))
    for number, name in enumerate(names):
        found = []
        for i in range(3):
            with torch.inference_mode() if i and (number + i) % 2 else nullcontext():
                caches[i], out = CALLS[name](caches[i], tmp_path)
                found.append(
                    [x for seq, layer in itertools.product(range(2), range(LAYERS)) for x in caches[i].read(layer, seq)]
                )
                found[i] += [] if out is None else [out]
        for cache, values in zip(caches[1:], found[1:], strict=True):
            assert cache.lengths == caches[0].lengths and cache.table.tables == caches[0].table.tables, (number, name)
            assert all(map(torch.equal, values, found[0])), (number, name)
            lasting = (cache.table.page_table, *cache.table.cache_seqlens, *(layer.pool for layer in cache.layers))
            assert not any(x is not None and x.is_inference() for x in lasting), (number, name)
