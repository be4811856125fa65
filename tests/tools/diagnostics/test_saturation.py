"""Codes at the largest code, in pages with planted values."""

import pytest
import torch

from fp8attn import LayerScales, PagedKVCache
from fp8attn_tools.diagnostics import saturation

HEADS, DIM = 2, 64


def scales_of_one(key_dtype):
    zero = torch.zeros(HEADS, DIM)
    return LayerScales(torch.ones(HEADS), torch.ones(HEADS), zero, zero, key_dtype, False)


@pytest.mark.parametrize(("key_dtype", "largest"), [("int8", 127.0), ("e4m3", 448.0)])
def test_planted_values_are_counted_one_by_one(key_dtype, largest):
    """Of layer 1, in two sequences and three pages. What is larger than the largest code, that code itself, its
    negative, and Inf count.
    A value that rounds to the code below does not; nor does NaN, which has a code of its own in E4M3 and is zero in
    INT8.
    """
    cache = PagedKVCache(
        HEADS, DIM, num_layers=2, num_seqs=2, key_dtype=key_dtype, rotate_keys=False,
        scales=[scales_of_one(key_dtype)] * 2, num_pages=5
    )  # fmt: skip
    k, v = torch.ones(230, HEADS, DIM), torch.ones(230, HEADS, DIM)
    planted_k, planted_v = k.clone(), v.clone()
    for x, limit in ((planted_k, largest), (planted_v, 448.0)):
        x[3, 0, :4] = torch.tensor([limit, -limit, torch.nan, limit * 0.9])  # 2
        x[130, 1, 10:13] = torch.tensor([limit * 1.1, -limit * 9, torch.inf])  # 3, in the second page
        x[229, 0, 63] = -1e30  # 1, of the second sequence
    planted_v[199, 1, 63] = 1e30
    cache.append(0, k, v, lengths=[200, 30])
    cache.append(1, planted_k, planted_v, lengths=[200, 30])
    pages = {layer: cache.pages(layer) for layer in range(2)}
    rows = saturation(pages)
    assert [(row.layer, row.kind, row.largest) for row in rows] == [(0, "k", 0), (0, "v", 0), (1, "k", 6), (1, "v", 7)]
    assert {row.values for row in rows} == {230 * HEADS * DIM} and rows[3].share == 7 / (230 * HEADS * DIM)
    cache.truncate([199, 29])  # what is past the end of a sequence does not count
    assert [row.largest for row in saturation({1: cache.pages(1)})] == [5, 5]


def test_scales_of_pages_that_grow_cut_nothing_off():
    """Other than with a static scale, a later token that does not fit makes the scale larger."""
    cache = PagedKVCache(HEADS, DIM)
    x = torch.ones(300, HEADS, DIM) * torch.exp2(torch.arange(300) % 9)[:, None, None]
    cache.append(0, x, x)
    assert [row.largest for row in saturation({0: cache.pages(0)})] == [0, 0]


def test_no_tokens_are_no_share():
    (k, v) = saturation({7: PagedKVCache(HEADS, DIM, num_pages=2).pages(0)})
    assert (k.layer, k.values, k.largest, k.share) == (7, 0, 0, 0.0) and v.kind == "v"
