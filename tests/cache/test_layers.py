"""Several layers over one page table: steps, copies, moves, the static form."""

import copy
from itertools import count

import pytest
import torch

import fp8attn
from fp8attn import OutOfPagesError, PagedKVCache, ops
from fp8attn.cache.layer import LayerPages
from fp8attn.scales import LayerScales

HEADS, DIM, LAYERS = 2, 64, 3


def tokens(count, seed=0, heads=HEADS):
    return torch.randn(count, heads, DIM, generator=torch.Generator().manual_seed(seed))


def steps(cache, lengths, seed=0):
    """Appends to every layer. K and V of layer i have their own seeds."""
    for layer in range(cache.num_layers):
        cache.append(
            layer, tokens(sum(lengths), seed + 2 * layer), tokens(sum(lengths), seed + 2 * layer + 1), lengths=lengths
        )


def alone(options, layer):
    """A cache of one layer with the same arguments as `layer` of another cache."""
    return PagedKVCache(
        HEADS, DIM, **{name: value[layer] if isinstance(value, list) else value for name, value in options.items()}
    )


@pytest.mark.parametrize("form", [{}, {"num_pages": 20}, {"max_seqlen": 400}])
def test_layers_hold_what_caches_of_one_layer_hold(form):
    """Means, rotation and values differ between layers. Pages, lengths and sharing are the same for all."""
    means = [torch.full((HEADS, DIM), float(layer)) for layer in range(LAYERS)]
    options = {"rotate_keys": [True, False, True], "k_mean": means, "v_mean": [None, *means[1:]], "num_seqs": 2} | form
    cache, single = (
        PagedKVCache(HEADS, DIM, num_layers=LAYERS, **options),
        [alone(options, layer) for layer in range(LAYERS)],
    )
    for new, seed in (([200, 200], 0), ([1, 1], 10), ([3, 0], 20), ([130, 17], 30)):
        steps(cache, new, seed)
        for layer, one in enumerate(single):
            one.append(0, tokens(sum(new), seed + 2 * layer), tokens(sum(new), seed + 2 * layer + 1), lengths=new)
        if seed == 10:
            for each in (cache, *single):
                each.copy(0, 1, 150)
                each.select([1, 0])
                each.truncate([190, 140])
    for layer, one in enumerate(single):
        assert cache.lengths == one.lengths
        for seq in range(2):
            assert all(torch.equal(a, b) for a, b in zip(cache.read(layer, seq), one.read(0, seq), strict=True))
        assert cache.pages(layer).page_table is cache.pages(0).page_table
        assert cache.pages(layer).cache_seqlens.tolist() == list(cache.lengths)
        assert cache.pages(layer).cache_seqlens.data_ptr() % 16 == 0
    assert cache.num_free_pages == single[0].num_free_pages


def test_attention_knows_the_lengths_of_the_last_append():
    cache, q = PagedKVCache(HEADS, DIM, num_seqs=2), tokens(600, 9, 4)
    with pytest.raises(ValueError, match=r"call append\(layer, k, v\) first"):
        cache.attention(0, q)
    cache.append(0, tokens(600), tokens(600, 1), lengths=[500, 100])
    bounds = torch.tensor([0, 500, 600], dtype=torch.int32)
    expected = fp8attn.attention(q, cache.pages(0), cu_seqlens_q=bounds, max_seqlen_q=500)
    assert torch.equal(cache.attention(0, q), expected)
    with pytest.raises(
        ValueError, match=r"a row for each of the 600 tokens of the last append \(lengths \[500, 100\]\)"
    ):
        cache.attention(0, q[:300])
    cache.append(0, tokens(2), tokens(2, 1))
    out, lse = cache.attention(0, q[:2], window=30, return_lse=True)
    expected = fp8attn.attention(q[:2], cache.pages(0), window=30, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    cache.select([1, 0])
    with pytest.raises(ValueError, match="call append"):
        cache.attention(0, q[:2])


def test_a_layer_out_of_step_is_refused_and_changes_nothing():
    cache, k = PagedKVCache(HEADS, DIM, num_layers=LAYERS, num_seqs=2), tokens(8)
    steps(cache, [100, 50])
    cache.append(0, k, k, lengths=[5, 3])
    bad = [
        (
            lambda: cache.append(0, k, k, lengths=[5, 3]),
            "layer 0 appends a second time before layers 1, 2 appended once",
        ),
        (
            lambda: cache.append(1, k, k, lengths=[3, 5]),
            r"layer 1 appends 8 tokens \(lengths \[3, 5\]\).* appended 8 \(lengths \[5, 3\]\)",
        ),
        (lambda: cache.append(1, k[:4], k[:4]), "layer 1 appends 4 tokens, and the layers before it appended 8"),
        (lambda: cache.append(1, k, k), r"layer 1 appends 8 tokens, .* appended 8 \(lengths \[5, 3\]\)"),
        (lambda: cache.attention(1, k), "layer 1 has appended no tokens"),
        (lambda: cache.reserve(300), "layers 1, 2 have not appended its tokens yet"),
        (lambda: cache.select([0]), "layers 1, 2 have not"),
        (lambda: cache.copy(0, 1), "layers 1, 2 have not"),
        (lambda: cache.append(3, k, k), "the cache has the layers 0 to 2; got 3"),
        (lambda: cache.append(-1, k, k), "the cache has the layers 0 to 2; got -1"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()
    assert [len(cache.read(layer, 0)[0]) for layer in range(LAYERS)] == [105, 100, 100]
    cache.append(1, k, k, lengths=[5, 3])
    cache.append(2, k, k, lengths=[5, 3])
    assert cache.lengths == (105, 53) and cache.pages(2).cache_seqlens.tolist() == [105, 53]


@pytest.mark.parametrize("form", [{}, {"max_seqlen": 200}])
def test_truncate_drops_a_step_that_some_layers_have_not_appended(form):
    cache, expected = (PagedKVCache(HEADS, DIM, num_layers=LAYERS, num_seqs=2, **form) for _ in range(2))
    for each in (cache, expected):
        steps(each, [100, 100])
    cache.append(0, tokens(60), tokens(60))
    cache.truncate(cache.lengths)
    assert cache.lengths == (100, 100)
    for each in (cache, expected):
        steps(each, [7, 7], 50)
    for layer in range(LAYERS):
        assert cache.pages(layer).cache_seqlens.tolist() == [107, 107]
        for seq in range(2):
            assert all(
                torch.equal(a, b) for a, b in zip(cache.read(layer, seq), expected.read(layer, seq), strict=True)
            )


def test_reserving_fails_for_all_layers_or_none():
    cache = PagedKVCache(HEADS, DIM, num_layers=LAYERS, num_pages=2)
    steps(cache, [200])
    with pytest.raises(OutOfPagesError, match="needs 1 more pages"):
        cache.append(1, tokens(100), tokens(100))
    steps(cache, [56], 10)
    assert cache.lengths == (256,)


def read_all(cache):
    return [x for layer in range(LAYERS) for seq in range(2) for x in cache.read(layer, seq)]


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("failing", range(LAYERS))
def test_a_pool_that_cannot_grow_changes_nothing(monkeypatch, failing, shared):
    """Out of memory in any layer: every sequence keeps its tokens, also those on pages that were about to be copied,
    and a retry works.
    """
    cache, expected = (PagedKVCache(HEADS, DIM, num_layers=LAYERS, num_seqs=2) for _ in range(2))
    for each in (cache, expected):
        steps(each, [200, 200])
        if shared:
            each.copy(0, 1)
    before, fit, calls = read_all(cache), LayerPages.fit, count()

    def out_of_memory(layer, num_pages):
        if next(calls) == failing:
            raise torch.OutOfMemoryError
        return fit(layer, num_pages)

    monkeypatch.setattr(LayerPages, "fit", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        cache.append(0, tokens(400), tokens(400))
    monkeypatch.undo()
    assert cache.lengths == (200, 200) and cache.num_pages == 4
    assert all(torch.equal(a, b) for a, b in zip(read_all(cache), before, strict=True))
    for each in (cache, expected):
        steps(each, [200, 200], 50)
    assert all(torch.equal(a, b) for a, b in zip(read_all(cache), read_all(expected), strict=True))


@pytest.mark.parametrize("form", [{}, {"num_pages": 8}, {"max_seqlen": 400}])
@pytest.mark.parametrize("held", [0, 100])
def test_a_first_layer_that_fails_appends_nothing(monkeypatch, held, form):
    def fails(*_, **__):
        raise KeyboardInterrupt

    cache, expected = (PagedKVCache(HEADS, DIM, num_layers=LAYERS, num_seqs=2, **form) for _ in range(2))
    for each in (cache, expected):
        if held:
            steps(each, [held, held])
    monkeypatch.setattr(ops, "run_append", fails)
    with pytest.raises(KeyboardInterrupt):
        cache.append(0, tokens(400), tokens(400))
    monkeypatch.undo()
    assert cache.lengths == (held, held)
    for each in (cache, expected):
        steps(each, [150, 3], 50)
    assert cache.lengths == (held + 150, held + 3)
    assert all(torch.equal(a, b) for a, b in zip(read_all(cache), read_all(expected), strict=True))


def test_calibrated_scales_outlive_the_pages_they_are_in():
    scales = LayerScales(
        torch.full((HEADS,), 0.05), torch.full((HEADS,), 0.0625), torch.zeros(HEADS, DIM), torch.zeros(HEADS, DIM)
    )
    for form in ({"num_pages": 2}, {"max_seqlen": 256}):
        cache = PagedKVCache(HEADS, DIM, scales=scales, **form)
        cache.append(0, tokens(200), tokens(200, 1))
        first = cache.read(0, 0)
        cache.reset()
        cache.append(0, tokens(200), tokens(200, 1))
        assert all(torch.equal(a, b) for a, b in zip(cache.read(0, 0), first, strict=True))


# The static form


def test_static_is_the_growing_form_to_the_bit_and_its_tensors_stay():
    caches = [PagedKVCache(HEADS, DIM, num_layers=2, num_seqs=2, max_seqlen=length) for length in (None, 300)]
    held = [caches[1].pages(layer).tensors for layer in range(2)]
    q = tokens(20, 9, 4)
    outs = []
    for cache in caches:
        steps(cache, [8, 12])
        outs.append([cache.attention(0, q)])
        cache.select([1, 1])
        cache.truncate(9)
        steps(cache, [1, 1], 7)
        outs[-1] += [cache.attention(layer, q[:2]) for layer in range(2)]
        cache.reset()
        steps(cache, [10, 10], 7)
        outs[-1].append(cache.attention(1, q))
        assert cache.lengths == (10, 10)
    assert all(torch.equal(a, b) for a, b in zip(*outs, strict=True))
    for layer in range(2):
        assert all(a is b for a, b in zip(held[layer], caches[1].pages(layer).tensors, strict=True))


def test_a_static_cache_compiles_into_one_graph():
    def step(cache, k, q):
        for layer in range(cache.num_layers):
            cache.append(layer, k, k)
            q = cache.attention(layer, q)
        return q

    eager, compiled = (PagedKVCache(HEADS, DIM, num_layers=2, num_seqs=2, max_seqlen=300) for _ in range(2))
    for cache in (eager, compiled):
        steps(cache, [100, 100])
    compiled = copy.deepcopy(compiled)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for seed in range(40):
            k, q = tokens(2, seed), tokens(2, seed + 1, 4)
            torch.testing.assert_close(run(compiled, k, q), step(eager, k, q), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert compiled.lengths == eager.lengths == (140, 140)


def test_a_growing_cache_does_not_append_in_compiled_code():
    cache, k = PagedKVCache(HEADS, DIM), tokens(2)
    with pytest.raises(Exception, match=r"needs a cache with max_seqlen=..."):
        torch.compile(lambda k: cache.append(0, k, k), fullgraph=True, backend="eager")(k)


def test_a_static_cache_counts_each_sequence():
    """200 and 0 tokens, then 0 and 100: no sequence has more than 256."""
    cache = PagedKVCache(HEADS, DIM, num_seqs=2, max_seqlen=256)
    cache.append(0, tokens(200), tokens(200), lengths=[200, 0])
    cache.append(0, tokens(100, 1), tokens(100, 1), lengths=[0, 100])
    assert cache.lengths == (200, 100) and cache.pages(0).cache_seqlens.tolist() == [200, 100]
    with pytest.raises(
        RuntimeError,
        match="full: sequence 1 holds 100 tokens, 157 more were given, and max_seqlen is 256; make it with",
    ):
        cache.append(0, tokens(157), tokens(157), lengths=[0, 157])
    assert cache.lengths == (200, 100)  # nothing was changed
    cache.append(0, tokens(212), tokens(212), lengths=[56, 156])
    assert cache.lengths == (256, 256)


def test_after_compiled_steps_the_device_counts_each_sequence():
    cache = PagedKVCache(HEADS, DIM, num_seqs=2, max_seqlen=256)
    k = tokens(2)
    torch.compile(lambda k: cache.append(0, k, k), fullgraph=True, backend="eager")(k)
    cache.append(0, tokens(200), tokens(200), lengths=[200, 0])
    cache.append(0, tokens(100), tokens(100), lengths=[0, 100])
    with pytest.raises(
        RuntimeError, match="full: a sequence would have more than max_seqlen=256 tokens; make it with a larger"
    ):
        cache.append(0, tokens(57), tokens(57), lengths=[56, 1])
    assert cache.lengths == (201, 101)
    with pytest.raises(RuntimeError, match="sequence 0 holds 201 tokens"):  # the host knows the lengths again
        cache.append(0, tokens(57), tokens(57), lengths=[56, 1])


def test_pools_that_grew_apart_are_seen_in_every_layer():
    """The first step was interrupted after layer 0, when layer 1 had an empty pool that was in use."""
    cache = PagedKVCache(HEADS, DIM, num_layers=2)
    cache.pages(1)
    cache.append(0, tokens(2), tokens(2))
    cache.truncate(0)
    cache.pages(1)
    steps(cache, [3])
    assert [len(cache.read(layer, 0)[0]) for layer in range(2)] == [3, 3]


def test_lengths_that_other_code_wrote_are_seen_after_sync():
    cache = PagedKVCache(HEADS, DIM, max_seqlen=1000)
    cache.pages(0).cache_seqlens.fill_(300)
    cache.sync()
    cache.append(0, tokens(2), tokens(2))
    assert cache.lengths == (302,) and cache._appended(0).page_table.shape[1] == 8  # all columns


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "must be positive whole numbers; got num_kv_heads=2, num_layers=0"),
        ({"max_seqlen": 0}, "max_seqlen=0"),
        ({"max_seqlen": 100, "num_pages": 3}, "leave out num_pages=3"),
        ({"num_layers": 3, "rotate_keys": [True]}, "rotate_keys must be one value for all layers, or 3 of them; got 1"),
        ({"num_layers": 2, "k_mean": [None, torch.zeros(3, DIM)]}, r"k_mean must be \[2, 64\]; got \[3, 64\]"),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        PagedKVCache(HEADS, DIM, **options)


def test_a_static_cache_keeps_its_number_of_sequences():
    cache = PagedKVCache(HEADS, DIM, num_seqs=2, max_seqlen=100)
    with pytest.raises(ValueError, match="would change it from 2 to 3"):
        cache.select([0, 0, 1])


def test_repr_says_what_it_is():
    cache = PagedKVCache(8, 128, num_layers=2, num_seqs=2)
    for layer in range(2):
        cache.append(layer, torch.randn(600, 8, 128), torch.randn(600, 8, 128), lengths=[500, 100])
    assert repr(cache) == "PagedKVCache(2 layers, 2 seqs, lengths=(500, 100), 5 pages, 2.5 MiB, int8 keys, cpu)"
    assert repr(cache.pages(1)) == "KVPages(2 seqs, 5 pages, 8 KV heads of 128, 1.3 MiB, int8 keys, rotated, cpu)"
    static = PagedKVCache(8, 128, num_seqs=2, max_seqlen=200, key_dtype="e4m3")
    assert repr(static) == "PagedKVCache(1 layers, 2 seqs, max_seqlen=200, 4 pages, 1.0 MiB, e4m3 keys, cpu)"
