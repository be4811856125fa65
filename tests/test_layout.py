"""The page layout, byte by byte."""

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
