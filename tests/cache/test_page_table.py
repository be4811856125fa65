"""Caches with a window: the same bits as a cache of all tokens, in the memory of the window."""

import copy
import random

import pytest
import torch

from fp8attn import PagedKVCache
from fp8attn.cache import storage
from fp8attn.cache.page_table import SLACK, OutOfPagesError, first_column, num_pages_of, pages_of_window
from fp8attn.errors import UsageError
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.scales import LayerScales

HEADS, DIM, Q_HEADS = 1, 64, 2
WINDOW = 384


def inputs(num_seqs, length, seed=0):
    """K, V and Q `[num_seqs, length, heads, DIM]`. K grows, so that scales do."""
    generator = torch.Generator().manual_seed(seed)
    k, v, q = (torch.randn(num_seqs, length, heads, DIM, generator=generator) for heads in (HEADS, HEADS, Q_HEADS))
    return k * (1 + torch.arange(length) / 50)[:, None, None], v, q


def pair(window=WINDOW, num_seqs=2, num_pages=None, **options):
    """A cache of all tokens, and one with a window."""
    made = PagedKVCache(HEADS, DIM, num_seqs=num_seqs, **options)
    return made, PagedKVCache(HEADS, DIM, num_seqs=num_seqs, window=window, num_pages=num_pages, **options)


def host_state(cache):
    """All that a refused call must leave as it was, and the bytes on the device."""
    table = cache.table
    host = (table.lengths, table.tables, table.references, table.free, table.tails, table.headroom, table.recording)
    device = [
        table.page_table.tolist(),
        [x.tolist() for x in table.cache_seqlens],
        [layer.pool.clone() for layer in cache.layers],
    ]
    return copy.deepcopy(host), device[:2], device[2]


def assert_unchanged(cache, before):
    after = host_state(cache)
    assert after[:2] == before[:2]
    assert all(map(torch.equal, after[2], before[2]))


def append(caches, given, begin, stop, window=WINDOW):
    """Append tokens `begin` to `stop` to a cache of all tokens and to one with a window, and assert equal attention."""
    k, v, q = (x[:, begin:stop].flatten(0, 1) for x in given)
    full, windowed = caches
    for cache in caches:
        cache.append(0, k, v)
    assert torch.equal(windowed.attention(0, q), full.attention(0, q, window=window)), (begin, stop)


def held(cache, seq=0):
    return torch.stack(cache.read(0, seq))


@pytest.fixture
def poisoned():
    """Memory that is not initialized has NaN in E4M3 (0xFF)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
@pytest.mark.parametrize("fixed", [False, True])
def test_any_cut_of_the_tokens_gives_the_same_bits(key_dtype, fixed, poisoned):
    rng = random.Random(f"{key_dtype} {fixed}")
    for window in (1, 5, 128, 129, 384, 500):
        cuts = [rng.choice([1, 1, 2, 5, 16, 17, 30, 100, 128, 129, 300, 900]) for _ in range(8)]
        given, at = inputs(2, sum(cuts)), 0
        # A step needs its own pages and those of the window before it.
        num_pages = 2 * (pages_of_window(window) + num_pages_of(max(cuts)) + 1) if fixed else None
        caches = pair(window, num_pages=num_pages, key_dtype=key_dtype)
        for n in cuts:
            append(caches, given, at, at + n, window)
            at += n
        full, windowed = caches
        assert windowed.num_pages == (num_pages or windowed.num_pages)
        for seq in range(2):
            assert torch.equal(held(windowed, seq), held(full, seq)[:, -window:])


def test_sequences_of_different_lengths(poisoned):
    full, windowed = pair(num_seqs=3)
    k, v, q = (x[0] for x in inputs(1, 4000))
    at = 0
    for lengths in ([700, 0, 3], [1, 1, 1], [16, 0, 2], [40, 500, 17], [1, 3, 0], [0, 900, 130]):
        rows = slice(at, at + sum(lengths))
        for cache in (full, windowed):
            cache.append(0, k[rows], v[rows], lengths=lengths)
        assert torch.equal(windowed.attention(0, q[rows]), full.attention(0, q[rows], window=WINDOW))
        at += sum(lengths)
    assert windowed.lengths == full.lengths == (758, 1404, 153)


@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
def test_kernels_use_pages_again(key_dtype, poisoned):
    """In Triton's interpreter: the bytes of a page are those of a cache of all tokens."""
    given = inputs(1, 700)
    given = [x.bfloat16() for x in given]
    full, windowed = pair(200, num_seqs=1, key_dtype=key_dtype, backend="triton")
    k, v, q = (x[0] for x in given)
    k[100, 0, 0] = torch.nan  # its page is used again
    for begin, stop in ((0, 130), (130, 146), (146, 500), (500, 512), (512, 513), (513, 700)):
        for cache in (full, windowed):
            cache.append(0, k[begin:stop], v[begin:stop])
        if begin > 300:
            out, want = windowed.attention(0, q[begin:stop]), full.attention(0, q[begin:stop], window=200)
            assert want.isfinite().all() and torch.equal(out, want)
    assert torch.equal(held(windowed), held(full)[:, -200:])


PAGE = 256 * DIM + 128  # bytes


def test_the_memory_after_a_long_prompt_is_that_of_the_window():
    """In bytes of the pool. The prompt needs all of its pages; the next step gives them back, whatever the prompt's
    length.
    """
    for length in (5000, 640, 5120, 5119):
        given = inputs(1, length + 300)
        caches = pair(num_seqs=1, num_layers=1)
        append(caches, given, 0, length)
        windowed = caches[1]
        assert windowed.layers[0].pool.nbytes == num_pages_of(length) * PAGE
        sizes = []
        for at in range(length, length + 300, 3):
            append(caches, given, at, at + 3)
            sizes.append(windowed.layers[0].pool.nbytes)
        # Less than a third of the pool is free before it is made smaller.
        assert max(sizes) <= 1.5 * pages_of_window(WINDOW) * PAGE, (length, sizes)
        assert pages_of_window(WINDOW) == 5 and windowed.num_pages - windowed.num_free_pages <= 5
        assert windowed.nbytes - sizes[-1] == 4 * (num_pages_of(length + 300) + 1)  # the page table, and a length
    decoded = pair(num_seqs=1)
    for at in range(0, 1500, 100):
        append(decoded, given, at, at + 100)
    assert decoded[1].layers[0].pool.nbytes <= 6 * PAGE


def test_a_pool_in_use_is_not_copied():
    """Prompts in chunks, and decoding: pages that were given back are used again."""
    caches, given = pair(num_seqs=1), inputs(1, 6000)
    append(caches, given, 0, 1024)
    append(caches, given, 1024, 2048)
    pool = caches[1].layers[0].pool
    for at in range(2048, 5120, 1024):
        append(caches, given, at, at + 1024)
        assert caches[1].layers[0].pool is pool


def test_a_pool_is_made_smaller_in_all_layers_or_in_none(monkeypatch):
    caches, given = pair(num_seqs=2, num_layers=3), inputs(2, 3000)
    k, v, q = (x[:, :2900].flatten(0, 1) for x in given)
    for cache in caches:
        for layer in range(3):
            cache.append(layer, k, v)
    windowed = caches[1]
    windowed.table._assign([0, 0], [], windowed.table._behind())  # gives pages back
    before, taken = host_state(windowed), []

    class Full(torch.Tensor):
        def __getitem__(self, index):
            raise torch.OutOfMemoryError("no memory")

    pool = windowed.layers[2].pool
    windowed.layers[2].pool = pool.as_subclass(Full)
    with pytest.raises(torch.OutOfMemoryError):
        windowed.table.compact()
    windowed.layers[2].pool = pool
    assert_unchanged(windowed, before)
    assert not taken and windowed.num_pages == 46
    k, v, q = (x[:, 2900:].flatten(0, 1) for x in given)
    for layer in range(3):
        for cache in caches:
            cache.append(layer, k, v)
        assert torch.equal(windowed.attention(layer, q), caches[0].attention(layer, q, window=WINDOW))
    assert windowed.num_pages <= 12
    table = windowed.pages(0).page_table  # entries that no sequence reads are valid pages, too
    assert int(table.min()) >= 0 and int(table.max()) < windowed.num_pages


@pytest.mark.parametrize("window", [1, 2, 63, 64, 65, 113, 128, 129, 192, 193, 384, 385])
def test_the_pages_of_a_window_are_as_many_as_a_decode_step_needs(window):
    cache = PagedKVCache(1, DIM, window=window)
    most, x = 0, torch.zeros(1, 1, DIM)
    for _ in range(1000):
        cache.append(0, x, x)
        most = max(most, cache.num_pages - cache.num_free_pages)
    assert most == pages_of_window(window)


@pytest.mark.parametrize("window", [WINDOW, WINDOW + 66])
@pytest.mark.parametrize("fixed", [False, True])
def test_the_last_step_and_some_tokens_more_can_be_dropped(fixed, window):
    caches = pair(window, num_pages=40 if fixed else None)
    given, at, furthest = inputs(2, 2000), 1000, 0
    append(caches, given, 0, at, window)
    for new, dropped in ((16, 15), (300, 300), (1, 0), (5, 5 + SLACK), (200, 150), (SLACK, 2 * SLACK), (100, 0)) * 5:
        append(caches, given, at, at + new, window)
        furthest = max(furthest, at)  # where a step began
        at = max(at + new - dropped, furthest - SLACK)
        for cache in caches:
            cache.truncate(at)
    append(caches, given, at, 1500, window)
    append(caches, given, 1500, 1501, window)
    least = 1500 - SLACK  # from which on all must be possible
    column = first_column(least, window)
    before = host_state(caches[1])
    for length in (column * PAGE_SIZE + window - 2, 500, 1):
        message = (
            rf"sequence 0 of 1501 tokens cannot go back to {length}: pages of the {window} tokens "
            rf"before.*reset.*{SLACK} more.*activate"
        )
        with pytest.raises(RuntimeError, match=message):
            caches[1].truncate(length)
        with pytest.raises(RuntimeError, match=message):
            caches[1].copy(0, 1, length)
        with pytest.raises(RuntimeError, match=message.replace("0 of 1501", "1 of 1501")):
            caches[1].truncate([1501, length])
        assert_unchanged(caches[1], before)
    for cache in caches:
        cache.truncate(column * PAGE_SIZE + window - 1)
    append(caches, given, column * PAGE_SIZE + window - 1, 1600, window)
    for cache in caches:
        cache.truncate([0, 1590])
    append(caches, inputs(2, 300, 3), 0, 300, window)
    for cache in caches:
        cache.reset()
    append(caches, given, 0, 700, window)


def test_attention_after_reserve_is_refused():
    """`reserve` gives back pages that the first queries of a long step see."""
    _, cache = pair(128)
    k, v, q = (x.flatten(0, 1) for x in inputs(2, 900))
    cache.append(0, k, v)
    cache.reserve(1000)
    assert cache.table.tables[0][0] == -1
    with pytest.raises(ValueError, match=r"layer 0 has appended no tokens since .*, reserve was called"):
        cache.attention(0, q)


def test_recorded_tokens_can_be_dropped():
    caches = pair()
    given = inputs(2, 3000)
    append(caches, given, 0, 900)
    caches[1].table.recording = True
    for begin, stop in ((900, 901), (901, 940), (940, 1500), (1500, 1501)):
        append(caches, given, begin, stop)
    assert caches[1].table.tables[0].count(-1) == 0
    for cache in caches:
        cache.truncate(901)
    column = first_column(901 - SLACK, WINDOW)  # given back by truncate
    assert caches[1].table.tables[0][: column + 1].count(-1) == column > 0
    append(caches, given, 901, 910)
    caches[1].table.recording = False
    append(caches, given, 910, 2900)
    append(caches, given, 2900, 2901)
    assert caches[1].num_pages <= 2 * (pages_of_window(WINDOW) + 2)


def test_recording_goes_on_after_all_tokens_were_dropped():
    """A1 and A3: tokens in a pool that is too small, and a crop that was refused."""
    for drop in (lambda cache: cache.reset(), lambda cache: cache.truncate(0)):
        caches = pair(num_seqs=1)
        given = inputs(1, 2000)
        caches[1].table.recording = True
        append(caches, given, 0, 10)
        for cache in caches:
            drop(cache)
        append(caches, given, 0, 1500)
        append(caches, given, 1500, 1501)
        for cache in caches:
            cache.truncate(3)
        append(caches, given, 3, 1000)


@pytest.mark.parametrize("fixed", [False, True])
def test_sequences_are_copied(fixed):
    caches = pair(num_seqs=3, num_pages=60 if fixed else None)
    given = inputs(3, 2000)
    append(caches, given, 0, 777)
    for cache in caches:
        cache.select([2, 0, 0])
    append(caches, given, 777, 790)
    for cache in caches:
        cache.copy(0, 1)
    append(caches, given, 790, 1100)
    for seq in range(3):
        assert torch.equal(held(caches[1], seq), held(caches[0], seq)[:, -WINDOW:])
    for cache in caches:
        cache.select([1, 0, 0, 2, 2])
    given = [x[[0, 1, 2, 0, 1]] for x in given]
    append(caches, given, 1100, 1120)
    for cache in caches:
        cache.select([4])
    append(caches, [x[:1] for x in given], 1120, 1500)
    append(caches, [x[:1] for x in given], 1500, 1501)
    table = caches[1].table
    assert sorted([*table.free, *(page for page in table.tables[0] if page >= 0)]) == list(range(caches[1].num_pages))


def test_copies_share_pages_until_the_last_one_gives_them_back():
    caches, given = pair(num_seqs=2), inputs(2, 2000)
    append(caches, given, 0, 700)
    for cache in caches:
        cache.copy(0, 1)
    windowed, k, v = caches[1], *(x[0] for x in given[:2])
    for cache in caches:
        cache.append(0, k[700:1400], v[700:1400], lengths=[700, 0])
        cache.append(0, k[1400:1401], v[1400:1401], lengths=[1, 0])
    assert windowed.table.tables[0].count(-1) == first_column(1400 - SLACK, WINDOW) > windowed.table.tables[1].count(-1)
    for cache in caches:
        cache.append(0, k[700:760], v[700:760], lengths=[0, 60])
    for seq in range(2):
        assert torch.equal(held(windowed, seq), held(caches[0], seq)[:, -WINDOW:])


def test_a_pool_of_fixed_size_that_is_too_small_changes_nothing():
    """Pages behind the window count as free. A step that needs more gives none back."""
    caches, given = pair(num_seqs=1, num_pages=8), inputs(1, 3000)
    append(caches, given, 0, 1000)
    before = host_state(caches[1])
    with pytest.raises(OutOfPagesError, match="needs 6 more pages"):
        caches[1].append(0, given[0][0, :700], given[1][0, :700])
    assert_unchanged(caches[1], before)
    for at in range(1000, 3000, 250):
        append(caches, given, at, at + 250)
    assert caches[1].num_pages == 8


def test_a_copy_of_fewer_tokens():
    caches = pair()
    append(caches, inputs(2, 900), 0, 900)
    append(caches, inputs(2, 901), 900, 901)
    caches[1].copy(0, 1, 895)
    assert torch.equal(held(caches[1], 1), held(caches[0], 0)[:, 895 - WINDOW : 895])
    with pytest.raises(RuntimeError, match="sequence 0 of 901 tokens cannot go back to 400"):
        caches[1].copy(0, 1, 400)
    assert caches[1].lengths == (901, 895)


@pytest.mark.parametrize("length", [100, 640, 1000])
@pytest.mark.parametrize("fixed", [False, True])
def test_files(tmp_path, length, fixed):
    caches = pair(num_seqs=3)
    given = inputs(3, 1300)
    append(caches, given, 0, length)
    path = tmp_path / "window.safetensors"
    caches[1].save(path, [2, 0])  # after the prompt, whose pages are there
    assert path.stat().st_size < 2 * (num_pages_of(length) - first_column(length - SLACK, WINDOW)) * PAGE + 3_000
    caches[0].select([2, 0])
    loaded = PagedKVCache.load(path, num_pages=30 if fixed else None)
    assert loaded.window == WINDOW and loaded.lengths == (length, length)
    for seq in range(2):
        assert torch.equal(held(loaded, seq), held(caches[0], seq)[:, -WINDOW:])
    for cache in (caches[0], loaded):
        cache.truncate(length - SLACK)
    append((caches[0], loaded), [x[[2, 0]] for x in given], length - SLACK, 1300)


def test_files_that_do_not_hold_a_window_are_refused(tmp_path):
    caches = pair(num_seqs=1)
    append(caches, inputs(1, 1000), 0, 1000)
    tensors, layers = caches[1].contents()
    path = tmp_path / "window.safetensors"
    caches[1].save(path)
    with pytest.raises(UsageError, match=r"window=384 gives back pages.*max_seqlen=2000"):
        PagedKVCache.load(path, max_seqlen=2000)
    for change in (
        lambda x: x[0].index_fill_(0, torch.tensor([4]), -1),
        lambda x: x[0].index_fill_(0, torch.tensor([7]), -1),
    ):
        broken = tensors | {f"page_table.{number}": tensors[f"page_table.{number}"].clone() for number in layers}
        for number in layers:
            change(broken[f"page_table.{number}"])
        storage.write(path, broken, layers)
        with pytest.raises(UsageError, match="page_table must have the pages of the last 384 of 1000 tokens"):
            PagedKVCache.load(path)
    storage.write(path, tensors, layers, {"format": "fp8attn.kv_pages.2.window"})
    with pytest.raises(UsageError, match=r"its format is 'fp8attn.kv_pages.2.window'; save it again"):
        PagedKVCache.load(path)
    full, layers = caches[0].contents()
    for number in layers:
        full[f"page_table.{number}"][0, 0] = -1
    storage.write(path, full, layers)
    with pytest.raises(UsageError, match="page_table must"):
        PagedKVCache.load(path)


def test_read_after_a_dropped_draft():
    """The page of the first token of the window was given back. No later query sees this token."""
    caches = pair(1)
    append(caches, inputs(2, 320), 0, 320, 1)
    append(caches, inputs(2, 321), 320, 321, 1)
    for cache in caches:
        cache.truncate(256)
    assert held(caches[1]).shape[1] == 0
    append(caches, inputs(2, 266), 256, 266, 1)
    assert torch.equal(held(caches[1]), held(caches[0])[:, -1:])


def test_a_deep_copy_goes_on():
    caches = pair()
    given = inputs(2, 1300)
    append(caches, given, 0, 1000)
    append((caches[0], copy.deepcopy(caches[1])), given, 1000, 1300)


def test_a_step_that_stops():
    k, v, q = (x.flatten(0, 1) for x in inputs(1, 1000))
    full, windowed = (PagedKVCache(HEADS, DIM, num_layers=2, window=window) for window in (None, WINDOW))
    for cache in (full, windowed):
        for layer in range(2):
            cache.append(layer, k[:900], v[:900])
        cache.append(0, k[900:916], v[900:916])  # and not layer 1
        cache.truncate(cache.lengths)
        for layer in range(2):
            cache.append(layer, k[900:905], v[900:905])
    for layer in range(2):
        assert torch.equal(windowed.attention(layer, q[900:905]), full.attention(layer, q[900:905], window=WINDOW))
    before = host_state(windowed)
    with pytest.raises(ValueError, match="dtype"):
        windowed.append(0, k[:200].to(torch.complex64), v[:200])
    assert_unchanged(windowed, before)


@pytest.mark.parametrize("window", [100, WINDOW])
def test_a_step_of_any_length_that_stops_can_be_dropped(window):
    """A2: a layer has 500 tokens that the other has not, and more than the window."""
    k, v, q = (x.flatten(0, 1) for x in inputs(1, 1000))
    caches = full, windowed = [PagedKVCache(HEADS, DIM, num_layers=2, window=each) for each in (None, window)]
    for cache in caches:
        for layer in range(2):
            cache.append(layer, k[:200], v[:200])
        cache.append(0, k[200:700], v[200:700])
    before = host_state(windowed)
    assert windowed.lengths == (700,)
    for cache in caches:
        cache.truncate(cache.lengths)
        assert cache.lengths == (200,)
    assert before[0][0] == [700]
    for layer in range(2):
        for cache in caches:
            cache.append(layer, k[300:400], v[300:400])
        assert torch.equal(windowed.attention(layer, q[300:400]), full.attention(layer, q[300:400], window=window))
    # A truncation that is refused does not end the step.
    for cache in caches:
        for layer in range(2):
            cache.append(layer, k[:600], v[:600])
        cache.append(0, k[600:601], v[600:601])
    before = host_state(windowed)
    with pytest.raises(RuntimeError, match="cannot go back to 200"):
        windowed.truncate(200)
    assert_unchanged(windowed, before)
    for cache in caches:
        cache.append(1, k[600:601], v[600:601])
    for layer in range(2):
        assert torch.equal(windowed.attention(layer, q[:1]), full.attention(layer, q[:1], window=window))


def test_calibrated_scales(poisoned):
    scales = LayerScales(
        torch.full((HEADS,), 0.5), torch.full((HEADS,), 0.02), torch.zeros(HEADS, DIM), torch.zeros(HEADS, DIM)
    )
    caches = pair(scales=scales)
    given = inputs(2, 1200)
    for begin, stop in ((0, 700), (700, 701), (701, 800), (800, 1200)):
        append(caches, given, begin, stop)


def test_what_is_refused():
    for window in (0, -3, 1.5, True):
        with pytest.raises(UsageError, match="window must be positive whole numbers"):
            PagedKVCache(HEADS, DIM, window=window)
    with pytest.raises(UsageError, match=r"static form \(max_seqlen=4000\) cannot; leave out max_seqlen \(num_pages="):
        PagedKVCache(HEADS, DIM, window=WINDOW, max_seqlen=4000)
    _, windowed = pair(num_seqs=1)
    k, v, q = (x[0] for x in inputs(1, 3))
    windowed.append(0, k, v)
    with pytest.raises(ValueError, match="window is 385, and this cache has the pages of a window of 384"):
        windowed.attention(0, q, window=385)
    with pytest.raises(ValueError, match="needs causal=True"):
        windowed.attention(0, q, causal=False)
    assert torch.equal(windowed.attention(0, q, window=2), windowed.attention(0, q, window=2))
