"""The page layout, byte by byte."""

import copy
import pickle
import struct
from dataclasses import replace

import pytest
import torch

from fp8attn.formats.codec import CODECS, E4M3, FP8, codec_of
from fp8attn.formats.page_layout import PAGE_SIZE, V_ORDER, latent_of, pack_k, pack_v, unpack_k, unpack_v
from fp8attn.formats.rotation import rotate
from fp8attn.formats.spec import PageSpec
from fp8attn.pages import KVPages


def test_v_order_is_the_accumulators():
    """Position p of a group of 16 has the token that the registers of an MMA's accumulator have there."""
    assert V_ORDER == (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)
    for lane in range(4):  # a thread's registers: columns 2l, 2l+1 of both n8 halves, four bytes in a row
        assert V_ORDER[4 * lane : 4 * lane + 4] == (2 * lane, 2 * lane + 1, 2 * lane + 8, 2 * lane + 9)
    assert sorted(V_ORDER) == list(range(16))


def test_where_each_element_lies():
    tokens, heads, dim = 2 * PAGE_SIZE, 3, 5
    x = torch.arange(tokens * heads * dim).view(tokens, heads, dim)
    k, v = pack_k(x), pack_v(x)
    assert k.shape == (2, heads, PAGE_SIZE, dim) and v.shape == (2, heads, 8, dim, 16)
    assert k.is_contiguous() and v.is_contiguous()
    for token in (0, 1, 2, 8, 15, 16, 127, 128, 200, 255):
        page, row = divmod(token, PAGE_SIZE)
        assert torch.equal(k[page, :, row], x[token])
        assert torch.equal(v[page, :, row // 16, :, V_ORDER.index(row % 16)], x[token])


def test_unpack_undoes_pack():
    x = torch.randint(0, 256, (3 * PAGE_SIZE, 2, 64), dtype=torch.uint8)
    assert torch.equal(unpack_k(pack_k(x)), x)
    assert torch.equal(unpack_v(pack_v(x)), x)


@pytest.mark.parametrize("key_dtype", list(CODECS))
@pytest.mark.parametrize("head_dim", [64, 80, 512])
def test_every_byte_of_a_page(head_dim, key_dtype):
    """K token by token, V group by group, channel by channel and in V_ORDER, and then the scales, little-endian."""
    k, v = (torch.randint(0, 127, (2 * PAGE_SIZE, 3, head_dim), dtype=torch.uint8) for _ in "kv")
    pages = KVPages.empty(2, 3, head_dim, num_seqs=1, max_pages=2, key_dtype=key_dtype)
    size = 256 * head_dim + (256 if head_dim == 512 else 128)  # as long as two pages of 256
    assert pages.pool.shape == (2, 3, size) and not pages.pool.any()
    assert pages.k.dtype == CODECS[key_dtype].dtype and pages.v.dtype == FP8
    pages.k.view(torch.uint8).copy_(pack_k(k))
    pages.v.view(torch.uint8).copy_(pack_v(v))
    pages.k_scale.copy_(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 0.1]]))
    pages.v_scale.copy_(torch.tensor([[0.5, 0.25, 8.0], [16.0, 32.0, 2.0**-20]]))
    for page, head, token, channel in (
        (0, 0, 0, 0),
        (0, 1, 1, 2),
        (1, 0, 8, 3),
        (1, 2, 127, head_dim - 1),
        (0, 2, 18, 17),
    ):
        run = pages.pool[page, head].tolist()
        assert run[token * head_dim + channel] == k[page * PAGE_SIZE + token, head, channel]
        group, position = token // 16, V_ORDER.index(token % 16)
        place = 128 * head_dim + (group * head_dim + channel) * 16 + position
        assert run[place] == v[page * PAGE_SIZE + token, head, channel]
    assert not pages.pool[:, :, 256 * head_dim : -128].any()
    header = bytes(pages.pool[1, 2, -128:].tolist())
    assert header == struct.pack("<ff", 0.1, 2.0**-20) + bytes(120)
    assert PageSpec.of(head_dim).layout.nbytes == size and PageSpec.of(head_dim).layout.token_bytes == size // 128


def test_every_byte_of_a_page_of_latents():
    """The codes token by token, the keys with RoPE token by token in FP16, and then the scales, little-endian."""
    spec = PageSpec.latent(256, 32)
    pages = KVPages.empty(2, 1, spec, num_seqs=1, max_pages=2)
    assert pages.pool.shape == (2, 1, 128 * (256 + 64 + 4))
    codes, rope, scales = latent_of(pages.pool, spec.layout)
    codes.random_(-127, 128), rope.copy_(torch.randn(rope.shape)), scales.copy_(torch.rand(scales.shape))
    for page, token, channel in ((0, 0, 0), (1, 1, 2), (1, 127, 31), (0, 64, 17)):
        run = bytes(pages.pool[page, 0].tolist())
        assert struct.unpack_from("<b", run, token * 256 + channel)[0] == codes[page, 0, token, channel]
        assert struct.unpack_from("<e", run, 128 * 256 + (token * 32 + channel) * 2)[0] == rope[page, 0, token, channel]
        assert struct.unpack_from("<f", run, 128 * (256 + 64) + 4 * token)[0] == scales[page, 0, token]


def filled(key_dtype="int8", rotate_keys=False, **means) -> KVPages:
    """Four pages of random codes and scales, of two sequences."""
    pages = KVPages.empty(4, 1, 64, num_seqs=2, max_pages=2, key_dtype=key_dtype, rotate_keys=rotate_keys, **means)
    for codes in (pages.k, pages.v):
        codes.view(torch.uint8).random_(0, 127)
    pages.k_scale.copy_(torch.tensor([[1.0], [2.0], [4.0], [8.0]]))
    pages.v_scale.fill_(0.5)
    pages.page_table.copy_(torch.tensor([[0, 2], [3, 1]]))
    pages.cache_seqlens.copy_(torch.tensor([256, 130]))
    return pages


@pytest.mark.parametrize("key_dtype", list(CODECS))
def test_read_dequantizes_in_table_order(key_dtype):
    pages = filled(key_dtype, k_mean=torch.full((1, 64), 3.0), v_mean=torch.full((1, 64), -2.0))
    k, v = pages.read(1, 130)
    codes = unpack_k(pages.k.float()), unpack_v(pages.v.float())
    assert torch.equal(k, torch.cat([codes[0][384:] * 8, codes[0][128:130] * 2]) + 3)
    assert torch.equal(v, torch.cat([codes[1][384:], codes[1][128:130]]) * 0.5 - 2)
    assert pages.read(0, 0)[0].shape == (0, 1, 64)


def test_read_rotates_keys_back_with_their_mean():
    mean = torch.randn(1, 64)
    stored, as_they_are = filled(rotate_keys=True, k_mean=mean), filled(rotate_keys=False, k_mean=rotate(mean))
    as_they_are.pool.copy_(stored.pool)
    k, v = stored.read(0, 200, torch.float64)
    assert k.dtype == torch.float64
    torch.testing.assert_close(rotate(k), as_they_are.read(0, 200, torch.float64)[0], rtol=0, atol=1e-11)
    assert torch.equal(v, as_they_are.read(0, 200, torch.float64)[1])


def test_a_copy_of_a_page_is_a_copy_of_its_bytes():
    pages = filled(rotate_keys=True)
    pages.pool[2] = pages.pool[3]
    first, second = pages.read(0, 256), pages.read(1, 128)
    assert all(torch.equal(a[128:], b) for a, b in zip(first, second, strict=True))
    other = KVPages.empty(1, 1, 64, num_seqs=1, max_pages=1)
    other.pool[0] = pages.pool[3]
    assert all(torch.equal(a, b) for a, b in zip(other.read(0, 128), second, strict=True))


@pytest.mark.parametrize("again", [lambda p: pickle.loads(pickle.dumps(p)), copy.deepcopy], ids=["pickle", "deepcopy"])
def test_pages_are_pickled_and_copied(again):
    pages = filled("e4m3", k_mean=torch.randn(1, 64))
    twin = again(pages)
    assert (twin.format.k, twin.format.rotate, twin.format.v_mean) == (E4M3, False, None)
    assert twin.format.k is E4M3 and len(twin.tensors) == 4
    for ours, theirs in zip(pages.tensors, twin.tensors, strict=True):
        assert torch.equal(ours, theirs) and ours.data_ptr() != theirs.data_ptr()
    twin.pool.zero_()
    assert pages.pool.any()


def test_nbytes_counts_every_tensor():
    pages = KVPages.empty(10, 2, 64, num_seqs=3, max_pages=7)
    pool, table, lengths = 10 * 2 * (256 * 64 + 128), 3 * 7 * 4, 3 * 4
    assert pages.nbytes == pool + table + lengths
    means = replace(pages.format, stored_k_mean=torch.zeros(2, 64), v_mean=torch.zeros(2, 64))
    assert replace(pages, format=means).nbytes == pool + table + lengths + 2 * 2 * 64 * 4


def with_k_mean(pages: KVPages, mean: torch.Tensor) -> dict:
    return {"format": replace(pages.format, stored_k_mean=mean)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (lambda p: {"pool": p.pool[:, 1:2]}, r"pool must be contiguous.*call \.contiguous\(\)"),
         # as tensor parallelism might
        (lambda p: {"pool": torch.zeros(4 * 2 * 16512 + 8, dtype=torch.uint8)[8:].view(4, 2, 16512)},
        "begin at a multiple of 16 bytes"),
        (lambda p: {"pool": p.pool.view(torch.int8)}, r"pool must be \(4, 2, 16512\) uint8 on cpu; got \(4, 2, 16512\) "
        r"int8"),
        (lambda p: {"pool": p.pool[..., :16384].contiguous()},
        r"pool must be .* 16512\] for head_dim 64.*got \(4, 2, 16384\)"),
        (lambda p: {"format": replace(p.format, name=PageSpec.of(72).name)}, "there are no pages 'k72.int8-v72.e4m3'"),
        (lambda p: {"pool": p.pool.flatten(0, 1)}, r"pool must be \[num_pages, num_kv_heads"),
        (lambda p: {"pool": None}, "pool must be a tensor; got NoneType"),
        (lambda p: with_k_mean(p, torch.zeros(3, 2, 64)), r"stored_k_mean must be \(2, 64\) float32 on cpu; got \(3, "
        r"2, 64\)"),
        (lambda p: with_k_mean(p, torch.zeros(2, 64).double()),
        r"stored_k_mean must be .* float32 on cpu; got .* float64"),
        (lambda p: {"format": replace(p.format, v_mean=torch.zeros(2, 64, device="meta"))},
        "v_mean must be .* on cpu; got .* on meta"),
        (lambda p: {"format": replace(p.format, v_mean=torch.zeros(64, 2).T)}, "v_mean must be contiguous"),
        (lambda p: {"format": replace(p.format, v_mean=0.0)}, "v_mean must be a tensor .* got float"),
        (lambda p: {"page_table": p.page_table.long()}, "page_table must be .* int32 on cpu; got .* int64"),
        (lambda p: {"page_table": p.page_table.repeat(1, 2)[:, ::2]}, "page_table must have its rows contiguous"),
        (lambda p: {"page_table": p.page_table[0]}, r"page_table \[num_seqs, max_pages\]"),
        (lambda p: {"cache_seqlens": torch.zeros(3, 2, dtype=torch.int32)[:, 0]}, "cache_seqlens must be contiguous"),
        (lambda p: {"cache_seqlens": torch.zeros(2, dtype=torch.int32)}, r"cache_seqlens must be \(3,\) int32"),
        (lambda p: {"cache_seqlens": [0, 0, 0]}, "cache_seqlens must be a tensor; got list"),
        (lambda p: {"format": "int8"}, r"format must be a KVFormat; got str \(KVPages\.empty and fp8attn\.from_dense "
        r"make one"),
    ],
)  # fmt: skip
def test_pages_are_checked_when_they_are_made(changed, message):
    """Kernels take these addresses. With a slice they would read and write other heads."""
    pages = KVPages.empty(4, 2, 64, num_seqs=3, max_pages=2)
    with pytest.raises(ValueError, match=message):
        replace(pages, **changed(pages))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head_dim": 100}, "head_dim must be one of"),
        ({"key_dtype": torch.int8}, "got torch.int8: pass key_dtype='int8'"),
        ({"k_mean": torch.zeros(2, 32)}, "k_mean must be"),
    ],
)
def test_empty_pages_are_checked_too(options, message):
    with pytest.raises(ValueError, match=message):
        KVPages.empty(**{"num_pages": 4, "num_kv_heads": 2, "head_dim": 64, "num_seqs": 3, "max_pages": 2} | options)


def test_keys_are_named():
    assert (codec_of("int8").dtype, codec_of("e4m3").dtype) == (torch.int8, FP8)
    assert copy.deepcopy(codec_of("int8")) is codec_of("int8")
    with pytest.raises(ValueError, match=r"key_dtype must be one of 'int8', 'e4m3'; got 'fp8'$"):
        codec_of("fp8")
    with pytest.raises(ValueError, match=r"got torch\.float8_e4m3fn: pass key_dtype='e4m3'$"):
        codec_of(FP8)


def test_a_table_may_be_part_of_a_wider_one():
    pages = KVPages.empty(4, 2, 64, num_seqs=3, max_pages=2)
    wide = torch.zeros(3, 10, dtype=torch.int32)
    assert replace(pages, page_table=wide[:, :2]).page_table.stride() == (10, 1)


@pytest.mark.parametrize("length", [-1, 257])
def test_no_more_tokens_are_read_than_the_table_has_pages_for(length):
    pages = KVPages.empty(4, 2, 64, num_seqs=3, max_pages=2)
    assert pages.read(0, 256)[0].shape == (256, 2, 64)
    with pytest.raises(ValueError, match=f"length is {length}, and page_table has pages for 256 tokens"):
        pages.read(0, length)
    for seq in (-1, 3):
        with pytest.raises(ValueError, match=f"hold the sequences 0 to 2; got {seq}"):
            pages.read(seq, 0)


def test_dynamo_may_make_pages_of_proxies():
    """torch 2.11 does so to write its graph, outside of what it traces."""
    proxy = torch.fx.Proxy(torch.fx.Graph().placeholder("x"))
    assert KVPages(*[proxy] * 4).pool is proxy
