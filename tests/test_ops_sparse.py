"""Sparse attention and trees of drafts, which need no kernel of their own: attention over chosen pages, and parts
joined by their LSEs.
"""

from dataclasses import replace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from fp8attn import PAGE_SIZE, KVPages, attention, from_dense

HEADS, KV_HEADS, D = 4, 2, 64
GROUP = HEADS // KV_HEADS
BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


def made(length):
    """Pages of one sequence, and its K and V as they are stored, `[KV_HEADS, length, D]`."""
    torch.manual_seed(0)
    pages = from_dense(*torch.randn(2, 1, KV_HEADS, length, D).bfloat16(), backend="reference")
    return pages, *(x.transpose(0, 1) for x in pages.read(0, length))


def expected(q, k, v, seen):
    """Attention of `q [T, HEADS, D]` with the mask `seen [T, keys]`, or `[HEADS, T, keys]`."""
    return scaled_dot_product_attention(q.float().transpose(0, 1), k, v, attn_mask=seen, enable_gqa=True).transpose(
        0, 1
    )


def tokens(chosen, length):
    """Which of `length` keys are in the pages `chosen`."""
    return torch.isin(torch.arange(length) // PAGE_SIZE, torch.tensor(chosen))


def check(got, wanted):
    assert (
        float((got.float() - wanted).norm() / wanted.norm()) < 4e-3
    )  # half a unit in the last place of BF16, and 3e-4


@BACKENDS
def test_decode_over_chosen_pages(backend):
    """The last page holds the new token, so it is chosen, too."""
    pages, k, v = made(700)
    q = torch.randn(1, HEADS, D).bfloat16()
    table = pages.page_table[:, [0, 3, 5]]
    fewer = replace(pages, page_table=table, cache_seqlens=torch.tensor([2 * PAGE_SIZE + 60], dtype=torch.int32))
    check(attention(q, fewer, backend=backend), expected(q, k, v, tokens([0, 3, 5], 700)[None]))


@BACKENDS
def test_decode_over_pages_that_each_head_chooses(backend):
    """A page of one KV head is one run of bytes, so heads can be sequences: of a pool with one KV head. (Means would be
    of all heads.)
    """
    pages, k, v = made(700)
    q = torch.randn(1, HEADS, D).bfloat16()
    chosen = torch.tensor([[0, 3, 5], [1, 2, 5]])
    table = pages.page_table[0][chosen] * KV_HEADS + torch.arange(KV_HEADS)[:, None]
    lengths = torch.full((KV_HEADS,), 2 * PAGE_SIZE + 60, dtype=torch.int32)
    by_head = KVPages(pages.pool.view(-1, 1, pages.pool.shape[2]), table.int(), lengths, pages.format)
    seen = torch.stack([tokens(each, 700) for each in chosen.tolist()]).repeat_interleave(GROUP, 0)[:, None]
    check(attention(q.view(KV_HEADS, GROUP, D), by_head, backend=backend).view(1, HEADS, D), expected(q, k, v, seen))


@BACKENDS
def test_a_prompt_whose_blocks_choose_pages(backend):
    """A block of 128 queries is a sequence, whose table ends with the page of the block's own keys. The causal mask
    cuts only this page.
    """
    pages, k, v = made(3 * PAGE_SIZE)
    q = torch.randn(3 * PAGE_SIZE, HEADS, D).bfloat16()
    chosen = [0, 0], [0, 1], [0, 2]  # of each block; entries of the first after its only page are not read
    table = pages.page_table[0][torch.tensor(chosen)]
    lengths = torch.tensor([1, 2, 2], dtype=torch.int32) * PAGE_SIZE
    seen = torch.stack([tokens(each, 3 * PAGE_SIZE) for each in chosen]).repeat_interleave(PAGE_SIZE, 0)
    blocks = replace(pages, page_table=table, cache_seqlens=lengths)
    check(attention(q, blocks, backend=backend), expected(q, k, v, seen.tril()))


@BACKENDS
def test_a_tree_of_drafts(backend):
    """Drafts see what is stored, and their ancestors: attention over pages without a causal mask, and over the drafts
    with a mask of any kind, joined by their LSEs."""
    pages, k, v = made(300)
    q, drafts_k, drafts_v = torch.randn(4, HEADS, D), torch.randn(KV_HEADS, 4, D), torch.randn(KV_HEADS, 4, D)
    q = q.bfloat16()
    tree = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], dtype=torch.bool)
    past, past_lse = attention(q, pages, causal=False, return_lse=True, backend=backend)
    scores = torch.einsum("thd,hsd->ths", q.float(), drafts_k.repeat_interleave(GROUP, 0)) / D**0.5
    lse = scores.masked_fill(~tree[:, None], -torch.inf).logsumexp(-1)
    share = torch.sigmoid(past_lse - lse)[..., None]
    own = expected(q, drafts_k, drafts_v, tree)
    seen = torch.cat([torch.ones(4, 300, dtype=torch.bool), tree], 1)
    whole = expected(q, torch.cat([k, drafts_k], 1), torch.cat([v, drafts_v], 1), seen)
    check(share * past.float() + (1 - share) * own, whole)
