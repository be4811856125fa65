"""PagedKVCache: formats, scales, pages that are shared, and what is refused."""

import copy
import pickle

import numpy as np
import pytest
import torch

from fp8attn import KVScales, OutOfPagesError, PagedKVCache, ops
from fp8attn._torch_ops import flatten_format
from fp8attn.formats.codec import CODECS, E4M3
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.formats.rotation import rotate
from fp8attn.scales import LayerScales

HEADS, DIM = 2, 64
PLAIN = {"key_dtype": "e4m3", "rotate_keys": False}  # small integers stay what they are


def tokens(count, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, HEADS, DIM, generator=generator) * scale for _ in range(2))


def assert_quantized(cache, seq, k, v):
    """Asserts that the cache reads back `k` and `v` up to the rounding of its formats.

    E4M3: half a step, 2^-4 of the value, or half a subnormal step of its page, at most twice (scales grow by powers of
    two). INT8: half a step, and half of each smaller one that the page had before; each is 1.25 times the one before
    it, so 2.5 steps are more than all.
    """
    ids = cache.pages(0).page_table[seq].repeat_interleave(PAGE_SIZE)[: len(k)].long()
    got_k, got_v = cache.read(0, seq)
    assert got_k.shape == k.shape and got_v.shape == v.shape
    k, got_k = (rotate(x) if cache.pages(0).format.rotate else x for x in (k, got_k))
    if CODECS[cache.key_dtype].is_integer:
        assert ((got_k - k).abs() <= 2.5 * cache.pages(0).k_scale[ids][..., None]).all()
    else:
        assert (
            (got_k - k).abs() <= 2.0**-4 * k.abs() + E4M3.smallest_subnormal * cache.pages(0).k_scale[ids][..., None]
        ).all()
    assert (
        (got_v - v).abs() <= 2.0**-4 * v.abs() + E4M3.smallest_subnormal * cache.pages(0).v_scale[ids][..., None]
    ).all()


@pytest.mark.parametrize("num_pages", [None, 40])
@pytest.mark.parametrize("rotate_keys", [True, False])
@pytest.mark.parametrize("key_dtype", list(CODECS))
def test_prompts_then_single_tokens(num_pages, key_dtype, rotate_keys):
    cache = PagedKVCache(HEADS, DIM, num_seqs=3, num_pages=num_pages, key_dtype=key_dtype, rotate_keys=rotate_keys)
    held = [[torch.empty(0, HEADS, DIM)] * 2 for _ in range(3)]
    for step, lengths in enumerate([[300, 0, 127], [1, 1, 1], [1, 5, 1], [1, 128, 1]]):
        k, v = tokens(sum(lengths), step)
        cache.append(0, k, v, lengths=lengths)
        for seq, (a, b) in enumerate(zip(k.split(lengths), v.split(lengths), strict=True)):
            held[seq] = [torch.cat([held[seq][0], a]), torch.cat([held[seq][1], b])]
    assert cache.lengths == (303, 134, 130)
    assert cache.pages(0).cache_seqlens.tolist() == [303, 134, 130]
    for seq, (k, v) in enumerate(held):
        assert_quantized(cache, seq, k, v)


@pytest.mark.parametrize(("num_seqs", "length"), [(1, 1), (1, 128), (3, 300)])
def test_a_first_append_makes_the_pages_that_others_find(num_seqs, length):
    """In a pool without pages, `from_dense` makes them. In a pool of fixed size, `reserve` does, before anything is
    written.
    """
    caches = [PagedKVCache(HEADS, DIM, num_seqs=num_seqs, num_pages=count) for count in (None, 12)]
    for count in (length, 2, 200):
        k, v = tokens(num_seqs * count, count)
        k += 3.0
        for cache in caches:
            cache.append(0, k, v)
        grown, fixed = caches
        held = grown.num_pages
        assert grown.lengths == fixed.lengths and (grown.num_free_pages, held) == (0, 12 - fixed.num_free_pages)
        for name in ("page_table", "cache_seqlens"):
            assert torch.equal(getattr(grown.pages(0), name), getattr(fixed.pages(0), name)), name
        assert torch.equal(grown.pages(0).pool, fixed.pages(0).pool[:held])
        for seq in range(num_seqs):
            assert torch.equal(grown.read(0, seq)[0], fixed.read(0, seq)[0])


def test_a_growing_scale_shifts_older_tokens_exactly():
    """Integers up to 15 keep all bits under every scale that a value of 448 * 16 can cause, also with a
    headroom of 32.
    """
    cache = PagedKVCache(HEADS, DIM, **PLAIN)
    small = torch.randint(-15, 16, (10, HEADS, DIM)).float()
    small[0, 0, 0] = 15
    cache.append(0, small, small)
    before = cache.pages(0).k_scale[0, 0].item()
    large = torch.full((1, HEADS, DIM), 448.0 * 16)
    cache.append(0, large, large)
    k, v = cache.read(0, 0)
    assert before == 2.0  # of 15, for which 448 * 2^-5 is too small, and headroom
    assert cache.pages(0).k_scale[0, 0].item() == 16.0 * 32
    assert torch.equal(k, torch.cat([small, large])) and torch.equal(v, torch.cat([small, large]))


def test_a_page_has_its_own_scale():
    cache = PagedKVCache(1, DIM, rotate_keys=False)
    k = torch.ones(256, 1, DIM)
    k[128:] = 1000.0
    cache.append(0, k, k)
    assert cache.pages(0).v_scale[:2, 0].tolist() == [2.0**-8 * 32, 4.0 * 32]
    assert cache.pages(0).k_scale[:2, 0].tolist() == pytest.approx([1.25 / 127, 1250 / 127], rel=1e-6)


def test_what_is_stored_is_said_by_the_pages():
    mean = torch.randn(HEADS, DIM)
    default, other = PagedKVCache(HEADS, DIM), PagedKVCache(HEADS, DIM, k_mean=mean, v_mean=mean, **PLAIN)
    assert flatten_format(default.pages(0).format) == ("k64.int8-v64.e4m3", True, None, None, None)
    assert (other.pages(0).format.k.dtype, other.pages(0).format.rotate) == (torch.float8_e4m3fn, False)
    assert torch.equal(other.pages(0).format.stored_k_mean, mean) and torch.equal(other.pages(0).format.v_mean, mean)
    assert torch.equal(
        PagedKVCache(HEADS, DIM, k_mean=mean).pages(0).format.stored_k_mean, rotate(mean)
    )  # it is subtracted from what is rotated


@pytest.mark.parametrize("key_dtype", list(CODECS))
def test_an_offset_costs_nothing_with_means(key_dtype):
    """This is the purpose of means: with an offset of 100, the rounding error is that of the part that varies."""
    k, v = tokens(256)
    errors = {}
    for mean in (torch.full((HEADS, DIM), 100.0), None):
        cache = PagedKVCache(HEADS, DIM, key_dtype=key_dtype, k_mean=mean)
        cache.append(0, k + 100, v)
        errors[mean is None] = float((cache.read(0, 0)[0] - k - 100).pow(2).mean().sqrt())
    assert errors[False] < 0.03 < 0.5 < errors[True]


def static(k_scale, v_scale, k_mean=0.0, **options) -> LayerScales:
    means = torch.full((HEADS, DIM), k_mean), torch.zeros(HEADS, DIM)
    return LayerScales(torch.full((HEADS,), k_scale), torch.full((HEADS,), v_scale), *means, **options)


def test_static_scales_saturate_and_stay():
    cache = PagedKVCache(HEADS, DIM, scales=static(1.0, 0.3, 2.0, **PLAIN), **PLAIN)
    k = torch.full((5, HEADS, DIM), 1000.0)
    cache.append(0, k, k)
    assert (cache.pages(0).k_scale == 1.0).all() and (
        cache.pages(0).v_scale == 0.5
    ).all()  # 0.3 rounded up to a power of two
    got_k, got_v = cache.read(0, 0)
    assert (got_k == 448 + 2).all() and (got_v == 448 * 0.5).all()


def test_static_scales_of_integers_are_any_number():
    cache = PagedKVCache(HEADS, DIM, scales=static(0.3, 1.0, rotate_keys=False), rotate_keys=False)
    k = torch.tensor([1000.0, -1000.0, 0.31]).view(3, 1, 1).expand(3, HEADS, DIM).contiguous()
    cache.append(0, k, k)
    torch.testing.assert_close(cache.pages(0).k_scale, torch.full_like(cache.pages(0).k_scale, 0.3), rtol=1e-6, atol=0)
    torch.testing.assert_close(
        cache.read(0, 0)[0][:, 0, 0], torch.tensor([127 * 0.3, -127 * 0.3, 0.3]), rtol=1e-6, atol=0
    )


def test_running_out_changes_nothing():
    cache = PagedKVCache(HEADS, DIM, num_seqs=2, num_pages=3)
    k, v = tokens(130)
    cache.append(0, k, v, lengths=[129, 1])
    before = [t.clone() for t in cache.pages(0).tensors]
    with pytest.raises(OutOfPagesError, match=r"needs 1 more pages of 128 tokens and has 0 of 3 free"):
        cache.append(0, *tokens(200, 1), lengths=[72, 128])
    assert cache.lengths == (129, 1) and cache.num_free_pages == 0
    assert all(torch.equal(old, new) for old, new in zip(before, cache.pages(0).tensors, strict=True))
    cache.append(0, *tokens(200, 1), lengths=[73, 127])
    assert cache.lengths == (202, 128)


def test_copies_share_pages_until_one_writes():
    cache = PagedKVCache(HEADS, DIM, num_seqs=3)
    k, v = tokens(300)
    cache.append(0, k, v, lengths=[300, 0, 0])
    pages = cache.num_pages
    cache.copy(0, 1)
    cache.copy(0, 2, 200)
    assert cache.num_pages == pages == 3 and cache.lengths == (300, 300, 200)
    new_k, new_v = tokens(3, 1, scale=100)  # large enough to grow the scale of the page they land in
    cache.append(0, new_k, new_v)
    assert cache.num_pages == 5  # 0 and 1 part at their last page, 2 at its second
    for seq, length in enumerate((300, 300, 200)):
        assert_quantized(
            cache, seq, torch.cat([k[:length], new_k[seq : seq + 1]]), torch.cat([v[:length], new_v[seq : seq + 1]])
        )


def test_select_repeats_and_drops():
    cache = PagedKVCache(HEADS, DIM, num_seqs=2, num_pages=8)
    k, v = tokens(400)
    cache.append(0, k, v, lengths=[100, 300])
    cache.select([1, 1, 0])
    assert cache.lengths == (300, 300, 100) and cache.num_seqs == 3 and cache.num_free_pages == 4
    cache.select(torch.tensor([2]))
    assert cache.lengths == (100,) and cache.num_free_pages == 7
    assert_quantized(cache, 0, k[:100], v[:100])


def test_select_in_place_keeps_the_tensors_that_graphs_hold():
    cache = PagedKVCache(HEADS, DIM, num_seqs=2)
    cache.append(0, *tokens(20))
    held = cache.pages(0).tensors
    cache.select([1, 0])
    assert all(a is b for a, b in zip(held, cache.pages(0).tensors, strict=True))


def test_recycled_pages_are_clean():
    cache = PagedKVCache(HEADS, DIM, num_pages=1)
    k, v = tokens(128)
    cache.append(0, k, v * torch.nan)
    cache.reset()
    cache.append(0, k[:5], v[:5])
    assert cache.pages(0).v.float().isfinite().all()
    assert_quantized(cache, 0, k[:5], v[:5])


def test_non_finite_values_stay_where_they_are():
    k, v = tokens(128)
    k[3, 0, 5], k[4, 0, 6], k[5, 0, 7] = torch.nan, torch.inf, -torch.inf
    cache = PagedKVCache(HEADS, DIM, **PLAIN)
    cache.append(0, k, v)
    got, _ = cache.read(0, 0)
    scale = cache.pages(0).k_scale[0, 0].item()
    assert got[3, 0, 5].isnan() and got[4, 0, 6] == 448 * scale and got[5, 0, 7] == -448 * scale
    assert scale == 2.0**-7 * 32  # of the first token's largest value, between 1.75 and 3.5
    assert got.isnan().sum() == 1


def test_reserve_makes_appends_independent_of_the_host():
    cache = PagedKVCache(HEADS, DIM, num_seqs=2)
    cache.reserve(300)
    table = cache.pages(0).page_table.clone()
    cache.append(0, *tokens(2 * 290))
    assert torch.equal(cache.pages(0).page_table, table) and cache.num_pages == 6
    cache.pages(0).cache_seqlens.add_(3)  # as compiled code does
    cache.sync()
    assert cache.lengths == (293, 293)


def test_reserve_never_replaces_the_tensors_of_the_static_form():
    cache = PagedKVCache(HEADS, DIM, num_seqs=2, max_seqlen=300)
    cache.append(0, *tokens(2 * 256))
    pages = cache.pages(0)
    cache.select([0, 0])  # two pages are free
    cache.reserve(300)
    with pytest.raises(ValueError, match=r"at most max_seqlen=300; got 400; make it with a larger max_seqlen"):
        cache.reserve([400, 0])
    assert cache.pages(0) is pages and cache.lengths == (256, 256)


def test_half_the_bytes():
    cache = PagedKVCache(8, 128)
    k = torch.randn(4096, 8, 128)
    cache.append(0, k, k)
    assert cache.nbytes / (2 * 4096 * 8 * 128 * 2) <= 0.51


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"head_dim": 72}, "head_dim must be one of"),
        ({"head_dim": 64.0}, r"head_dim must be one of .*; got 64\.0"),
        ({"num_layers": 10**9}, r"num_layers 16,384, .* got num_seqs=1 and num_layers=1,000,000,000"),
        ({"num_layers": 2**14, "num_seqs": 2**14}, "their product 67,108,864"),
        ({"device": "meta"}, "pages are on a CPU or on a GPU that torch calls cuda; got device='meta'"),
        ({"device": "xpu"}, "got device='xpu'"),
        ({"num_seqs": 0}, "must be positive"),
        ({"max_seqlen": 12.5}, "must be positive whole numbers; got .*max_seqlen=12.5"),
        ({"num_pages": 0}, "must be positive"),
        (
            {"scales": LayerScales(*[torch.ones(3)] * 2, *[torch.ones(3, 64)] * 2)},
            r"scales are for \(num_kv_heads, head_dim\) = \(3, 64\), .* and the cache has \(2, 64\)",
        ),
        (
            {"scales": LayerScales(*[torch.ones(1)] * 2, *[torch.ones(2, 64)] * 2)},
            r"with k_scale \(1,\) and v_scale \(1,\), and the cache",
        ),
        (
            {"scales": static(1.0, 1.0), "key_dtype": "e4m3"},
            "scales are for key_dtype='int8', rotate_keys=True, and the cache has 'e4m3'",
        ),
        ({"scales": static(1.0, 1.0), "rotate_keys": False}, "the cache has 'int8', False"),
        ({"scales": static(1.0, 1.0), "k_mean": torch.zeros(HEADS, DIM)}, "leave out k_mean and v_mean"),
        ({"v_mean": torch.zeros(DIM)}, r"v_mean must be \[2, 64\]; got \[64\]"),
        ({"key_dtype": "fp8"}, "key_dtype must be one of 'int8', 'e4m3'; got 'fp8'"),
        ({"backend": "cuda"}, "unknown backend 'cuda'; choose 'auto', 'hopper', 'triton', 'reference'"),
    ],
)
def test_bad_caches_are_refused(kwargs, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(**{"num_kv_heads": HEADS, "head_dim": DIM, **kwargs})


def test_scales_of_a_model_are_refused():
    scales = KVScales({0: static(1.0, 1.0)}, num_layers=1, num_kv_heads=HEADS, head_dim=DIM)
    with pytest.raises(TypeError, match=r"got KVScales. KVScales.layer\(i\) has a layer's"):
        PagedKVCache(HEADS, DIM, scales=scales)
    PagedKVCache(HEADS, DIM, scales=[scales.layer(0)])


def test_bad_calls_are_refused_and_change_nothing():
    cache = PagedKVCache(HEADS, DIM, num_seqs=2)
    k, v = tokens(3)
    bad = [
        (lambda: cache.append(0, k, v), "cannot be divided evenly among 2 sequences"),
        (lambda: cache.append(0, k, v, lengths=[1, 1]), "add up to 3 tokens"),
        (
            lambda: cache.append(0, k, v, lengths=[4, -1]),
            r"lengths must be one count of tokens >= 0, or 2 of them.*got \[4, -1\]",
        ),
        (lambda: cache.append(0, k, v, lengths=[1.5, 1.5]), r"got \[1.5, 1.5\]"),
        (lambda: cache.append(0, k[:2], v[:2].half()), "have one dtype"),
        (lambda: cache.append(0, k[:2, :1], v[:2, :1]), r"must both be \[T, 2, 64\]"),
        (lambda: cache.append(0, k[:2].int(), v[:2].int()), "floating point"),
        (
            lambda: cache.append(0, *(x[:2].to(torch.float8_e4m3fn) for x in (k, v))),
            "of 16, 32 or 64 bits, not torch.float8_e4m3fn",
        ),
        (lambda: cache.truncate([1]), "one count of tokens"),
        (lambda: cache.truncate(-1), "one count of tokens"),
        (lambda: cache.reserve([1, 2, 3]), r"2 of them, one for each sequence; got \[1, 2, 3\]"),
        (lambda: cache.reserve(-5), "one count of tokens >= 0.*got -5"),
        (lambda: cache.reserve(1.5), "one count of tokens >= 0.*got 1.5"),
        (lambda: cache.select([]), "at least one"),
        (lambda: cache.select([2]), "0 to 1"),
        (lambda: cache.select([-1]), "the sequences 0 to 1; got -1"),
        (lambda: cache.select([0.0]), "the sequences 0 to 1; got 0.0"),
        (lambda: cache.select(torch.tensor([False, False])), "at least one"),
        (lambda: cache.select(torch.tensor([True])), "a mask of sequences must have 2 entries, one for each; got 1"),
        (lambda: cache.read(0, 2), "the sequences 0 to 1; got 2"),
        (lambda: cache.read(0, -1), "the sequences 0 to 1; got -1"),
        (lambda: cache.copy(0, 0), "onto itself"),
        (lambda: cache.copy(0, 1, 5), "length must be 0 to 0; got 5"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
        assert cache.lengths == (0, 0) and cache.num_pages == 0


@pytest.mark.parametrize("numbers", [(0, 2), (2, 0), (0, -1), (-1, 0), (0, -2), (0.0, 1)])
def test_a_copy_that_fails_changes_nothing(numbers):
    cache = PagedKVCache(HEADS, DIM, num_seqs=2, num_pages=4)
    k, v = tokens(256)
    cache.append(0, k, v, lengths=[256, 0])
    with pytest.raises(ValueError, match="the cache has the sequences 0 to 1; got "):
        cache.copy(*numbers)
    assert cache.lengths == (256, 0) and cache.num_free_pages == 2
    assert_quantized(cache, 0, k, v)
    cache.reset()
    assert cache.num_free_pages == 4


@pytest.mark.parametrize("form", [torch.tensor, np.array, list])
def test_a_mask_of_sequences_filters(form):
    cache = PagedKVCache(HEADS, DIM, num_seqs=3)
    k, v = tokens(120)
    cache.append(0, k, v, lengths=[30, 40, 50])
    cache.select(form([True, False, True]))
    assert cache.lengths == (30, 50)
    assert_quantized(cache, 0, k[:30], v[:30])
    assert_quantized(cache, 1, k[70:], v[70:])
    cache.select(form([1, 0]))  # numbers, as ever
    assert cache.lengths == (50, 30)


@pytest.mark.parametrize("scales", [None, LayerScales(*[torch.ones(HEADS)] * 2, *[torch.ones(HEADS, DIM)] * 2)])
def test_a_pickled_cache_goes_on(scales):
    cache = PagedKVCache(HEADS, DIM, num_seqs=2, scales=scales)
    k, v = tokens(300)
    cache.append(0, k, v)
    other = pickle.loads(pickle.dumps(cache))
    for one in (cache, other):
        one.append(0, *tokens(4, 1))
    assert other.lengths == cache.lengths == (152, 152)
    for seq in range(2):
        assert all(torch.equal(a, b) for a, b in zip(other.read(0, seq), cache.read(0, seq), strict=True))
    other.reset()
    assert cache.lengths == (152, 152) and other.num_pages == 0


def test_a_shallow_copy_is_refused():
    with pytest.raises(TypeError, match=r"use copy\.deepcopy"):
        copy.copy(PagedKVCache(HEADS, DIM))


def test_copies_and_pages_are_the_same_bytes():
    """After a write to a shared page, its bytes are those of a cache that was never shared."""
    k, v = tokens(140)
    new_k, new_v = tokens(2, 1, scale=100)
    cache, alone = PagedKVCache(HEADS, DIM, num_seqs=2), PagedKVCache(HEADS, DIM)
    cache.append(0, k, v, lengths=[140, 0])
    cache.copy(0, 1)
    cache.append(0, new_k, new_v)
    alone.append(0, torch.cat([k, new_k[1:]]), torch.cat([v, new_v[1:]]))
    theirs = cache.pages(0).pool[cache.pages(0).page_table[1].long()]
    assert torch.equal(theirs, alone.pages(0).pool[alone.pages(0).page_table[0].long()])
    assert not torch.equal(theirs[1], cache.pages(0).pool[cache.pages(0).page_table[0, 1].long()])


def test_first_tokens_of_a_growing_cache_are_those_of_one_of_fixed_size():
    k, v = torch.randn(2, 300, HEADS, DIM)
    caches = [PagedKVCache(HEADS, DIM, num_layers=2, num_seqs=2, num_pages=n) for n in (None, 4)]
    for cache in caches:
        for layer in range(2):
            cache.append(layer, k, v)
    for layer in range(2):
        growing, fixed = (cache.pages(layer) for cache in caches)
        assert torch.equal(growing.cache_seqlens, fixed.cache_seqlens)
        assert torch.equal(growing.page_table, fixed.page_table)
        for seq in range(2):
            assert all(map(torch.equal, *(cache.read(layer, seq) for cache in caches)))


def test_layers_of_a_step_share_their_checked_options(monkeypatch):
    """The options of attention are checked once in a step, again with other options, and again in the next step."""
    checks, params_of = [], ops.params_of
    monkeypatch.setattr(ops, "params_of", lambda *arguments: (checks.append(arguments), params_of(*arguments))[1])
    cache = PagedKVCache(HEADS, DIM, num_layers=4, num_seqs=2)
    k, v = tokens(20)
    for _ in range(2):
        for layer in range(4):
            cache.append(layer, k, v)
            cache.attention(layer, k, window=5 if layer % 2 else None)
    assert [options[2] for *_, options in checks] == [None, 5] * 2
    with pytest.raises(ValueError, match="window must be an integer from 1 to"):
        cache.attention(0, k, window=0)
    with pytest.raises(
        ValueError, match=rf"q must be \[T, num_q_heads, {DIM}\] with num_q_heads a multiple of {HEADS}"
    ):
        cache.attention(0, torch.randn(20, 3, DIM))
