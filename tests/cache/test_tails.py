"""What is left past the end of a sequence after a move, and which lengths count after appends that the host has not
seen.
"""

import pytest
import torch

import fp8attn
from fp8attn import PagedKVCache
from fp8attn.formats.page_layout import unpack_v

DIM = 64


def values_past_the_end(cache, seq):
    """V's codes of a sequence's last page after its last token, in a cache whose pages are ready for attention."""
    pages = cache.pages(0)
    page = pages.page_table[seq, (cache.lengths[seq] - 1) // 128].long()
    return unpack_v(pages.v[page : page + 1].view(torch.uint8))[cache.lengths[seq] % 128 :]


def with_a_dropped_nan(num_seqs):
    """Sequences of 10 and 12 tokens. A token of the first, whose V is NaN, was dropped."""
    cache = PagedKVCache(1, DIM, num_seqs=num_seqs)
    x = torch.randn(23, 1, DIM)
    v = x.clone()
    v[10] = torch.nan
    cache.append(0, x, v, lengths=[11, 12] + [0] * (num_seqs - 2))
    cache.truncate([10, 12] + [0] * (num_seqs - 2))
    return cache


def test_a_dropped_token_is_cleared_in_the_sequence_that_moved():
    cache = with_a_dropped_nan(2)
    cache.select([1, 0])
    assert cache.lengths == (12, 10)
    assert not values_past_the_end(cache, 1).any() and not values_past_the_end(cache, 0).any()


def test_a_dropped_token_is_cleared_in_every_copy():
    cache = with_a_dropped_nan(3)
    cache.copy(0, 2)
    cache.append(
        0, *(torch.randn(1, 1, DIM) for _ in "kv"), lengths=[1, 0, 0]
    )  # the first leaves the page to its copy, or the reverse
    assert cache.lengths == (11, 12, 10)
    assert not values_past_the_end(cache, 2).any() and not values_past_the_end(cache, 0).any()
    assert cache.read(0, 2)[1].isfinite().all()


def test_a_token_that_only_one_layer_has_does_not_count():
    cache = PagedKVCache(1, DIM, num_layers=2)
    x = torch.randn(5, 1, DIM)
    for layer in range(2):
        cache.append(layer, x, x)
    cache.reserve(6)
    fp8attn.append(cache.pages(1), x[:1], x[:1])  # as other code may
    cache.sync()
    assert cache.lengths == (5,) and cache.pages(1).cache_seqlens.tolist() == [5]


def test_sync_drops_a_step_that_some_layers_have_not_appended():
    cache, x = PagedKVCache(1, DIM, num_layers=2), torch.randn(9, 1, DIM)
    cache.append(0, x, x)
    cache.sync()
    for layer in range(2):
        cache.append(layer, x[:4], x[:4])
    assert cache.lengths == (4,) and [cache.pages(layer).cache_seqlens.tolist() for layer in range(2)] == [[4], [4]]
    assert all(torch.equal(a, b) for a, b in zip(cache.read(0, 0), cache.read(1, 0), strict=True))


def test_a_step_after_compiled_code_is_counted_once_all_layers_have_it():
    """Lengths that are read back between its appends are those before it, and stay unknown to the host."""
    cache = PagedKVCache(1, DIM, num_layers=2, max_seqlen=20)
    x = torch.randn(3, 1, DIM)

    @torch.compile(backend="eager", fullgraph=True)
    def step(x):
        for layer in range(2):
            cache.append(layer, x, x)

    step(x)
    cache.append(0, x[:1], x[:1])
    assert cache.lengths == (3,)
    cache.append(1, x[:1], x[:1])
    assert cache.lengths == (4,)


@pytest.mark.parametrize("move", ["truncate", "select"])
def test_lengths_are_read_back_as_long_as_a_graph_may_be_replayed(move):
    """Also after the host has written them in a move."""
    cache = PagedKVCache(1, DIM, max_seqlen=20)
    x = torch.randn(3, 1, DIM)
    cache.append(0, x, x)
    cache.table.captured = True  # as a capture of an append sets it
    cache.truncate(2) if move == "truncate" else cache.select([0])
    cache.pages(0).cache_seqlens.add_(1)  # as a replay does
    assert cache.lengths == (3 if move == "truncate" else 4,)
