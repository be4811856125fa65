"""The page layout, byte by byte."""

from dataclasses import replace

import pytest
import torch

from fp8attn.layout import FP8, PAGE_SIZE, V_ORDER, V_POSITION, KVPages, pack_k, pack_v, unpack_k, unpack_v


def test_v_order_is_the_accumulators():
    """Position p of a group of 16 holds the token that an MMA accumulator's registers bring there."""
    assert V_ORDER == (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
    for lane in range(4):  # a thread's registers: columns 2l, 2l+1 of both n8 halves, four bytes in a row
        assert V_ORDER[4 * lane : 4 * lane + 4] == (2 * lane, 2 * lane + 1, 2 * lane + 8, 2 * lane + 9)
    assert [V_ORDER[p] for p in V_POSITION] == list(range(16))


def test_where_each_element_lies():
    tokens, heads, dim = 2 * PAGE_SIZE, 3, 5
    x = torch.arange(tokens * heads * dim).view(tokens, heads, dim)
    k, v = pack_k(x), pack_v(x)
    assert k.shape == (2, heads, PAGE_SIZE, dim) and v.shape == (2, heads, 8, dim, 16)
    assert k.is_contiguous() and v.is_contiguous()
    for token in (0, 1, 2, 8, 15, 16, 127, 128, 200, 255):
        page, row = divmod(token, PAGE_SIZE)
        assert torch.equal(k[page, :, row], x[token])
        assert torch.equal(v[page, :, row // 16, :, V_POSITION[row % 16]], x[token])


def test_unpack_undoes_pack():
    x = torch.randint(0, 256, (3 * PAGE_SIZE, 2, 64), dtype=torch.uint8)
    assert torch.equal(unpack_k(pack_k(x)), x)
    assert torch.equal(unpack_v(pack_v(x)), x)


def test_read_dequantises_in_table_order():
    pages = KVPages.empty(4, 1, 64, num_seqs=2, max_pages=2)
    codes = torch.randint(0, 127, (4 * PAGE_SIZE, 1, 64), dtype=torch.uint8)
    pages.k.view(torch.uint8).copy_(pack_k(codes))
    pages.v.view(torch.uint8).copy_(pack_v(codes))
    pages.k_scale.copy_(torch.tensor([[1.0], [2.0], [4.0], [8.0]]))
    pages.v_scale.fill_(0.5)
    pages.k_mean[1] = 3.0
    pages.page_table.copy_(torch.tensor([[0, 0], [3, 1]]))
    k, v = pages.read(1, 130)
    values = codes.view(FP8).float()
    assert torch.equal(k, torch.cat([values[384:] * 8, values[128:130] * 2]) + 3)
    assert torch.equal(v, torch.cat([values[384:], values[128:130]]) * 0.5)


def test_nbytes_counts_every_tensor():
    pages = KVPages.empty(10, 2, 64, num_seqs=3, max_pages=7)
    data, scales, means, table, lengths = 2 * 10 * 2 * 128 * 64, 2 * 10 * 2 * 4, 2 * 3 * 2 * 64 * 4, 3 * 7 * 4, 3 * 4
    assert pages.nbytes == data + scales + means + table + lengths


def of_slices(pages: KVPages, heads: slice) -> dict:
    """What tensor parallelism might take of a pool."""
    return {
        name: getattr(pages, name)[:, heads] for name in ("k", "v", "k_scale", "v_scale", "k_mean", "v_mean")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda p: of_slices(p, slice(1, 2)), r"k must be contiguous.*call \.contiguous\(\)"),
        (lambda p: {"k": torch.zeros(4, 2, 2, 128, 64).to(FP8)[:, 0]}, "k must be contiguous"),  # K and V of one allocation
        (lambda p: {"v": p.k}, r"v must be \(4, 2, 8, 64, 16\) float8_e4m3fn on cpu; got \(4, 2, 128, 64\)"),
        (lambda p: {"k": p.k.view(torch.uint8)}, "k must be .* float8_e4m3fn on cpu; got .* uint8"),
        (lambda p: {"k": p.k[:, :, :64]}, r"k must be \[num_pages, num_kv_heads, 128, head_dim\]"),
        (lambda p: {"k_scale": p.k_scale.double()}, "k_scale must be .* float32 on cpu; got .* float64"),
        (lambda p: {"v_scale": p.v_scale.T.contiguous().T}, "v_scale must be contiguous"),
        (lambda p: {"k_mean": p.k_mean[:2]}, r"k_mean must be \(3, 2, 64\)"),
        (lambda p: {"v_mean": p.v_mean.to("meta")}, "v_mean must be .* on cpu; got .* on meta"),
        (lambda p: {"page_table": p.page_table.long()}, "page_table must be .* int32 on cpu; got .* int64"),
        (lambda p: {"page_table": p.page_table.repeat(1, 2)[:, ::2]}, "page_table must have its rows contiguous"),
        (lambda p: {"page_table": p.page_table[0]}, r"page_table \[num_seqs, max_pages\]"),
        (lambda p: {"cache_seqlens": torch.zeros(3, 2, dtype=torch.int32)[:, 0]}, "cache_seqlens must be contiguous"),
        (lambda p: {"cache_seqlens": [0, 0, 0]}, "cache_seqlens must be a tensor; got list"),
    ],
)  # fmt: skip
def test_pages_are_checked_when_they_are_made(changed, message):
    """Kernels take these addresses: through a slice they would read and write other heads."""
    pages = KVPages.empty(4, 2, 64, num_seqs=3, max_pages=2)
    with pytest.raises(ValueError, match=message):
        replace(pages, **changed(pages))


def test_a_table_may_be_part_of_a_wider_one():
    pages = KVPages.empty(4, 2, 64, num_seqs=3, max_pages=2)
    wide = torch.zeros(3, 10, dtype=torch.int32)
    assert replace(pages, page_table=wide[:, :2]).page_table.stride() == (10, 1)


def test_dynamo_may_make_pages_of_proxies():
    """torch 2.11 does so to write its graph, outside of what it traces."""
    proxy = torch.fx.Proxy(torch.fx.Graph().placeholder("x"))
    assert KVPages(*[proxy] * 8).k is proxy
