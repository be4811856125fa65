"""Caches with a window: the same bits as a cache of all tokens, in the memory of the window."""

import copy
import random

import pytest
import torch

import fp8attn
from fp8attn import PagedKVCache
from fp8attn.cache.ring import SHORTEST_WINDOW, STEP, pages_of_run, ring_size
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


def pair(window=WINDOW, num_seqs=2, max_seqlen=None, **options):
    """A cache of all tokens, and one with a window."""
    made = PagedKVCache(HEADS, DIM, num_seqs=num_seqs, **options)
    return made, PagedKVCache(HEADS, DIM, num_seqs=num_seqs, window=window, max_seqlen=max_seqlen, **options)


def append(caches, given, begin, stop, window=WINDOW):
    """Append tokens `begin` to `stop` to a cache of all tokens and to one with a window, and assert equal attention."""
    k, v, q = (x[:, begin:stop].flatten(0, 1) for x in given)
    full, ring = caches
    for cache in caches:
        cache.append(0, k, v)
    assert torch.equal(ring.attention(0, q), full.attention(0, q, window=window)), (begin, stop)


def held(cache, seq=0):
    return torch.stack(cache.read(0, seq))


@pytest.fixture
def poisoned():
    """Memory that is not initialized has NaN in E4M3 (0xFF)."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
@pytest.mark.parametrize("static", [False, True])
def test_any_cut_of_the_tokens_gives_the_same_bits(key_dtype, static, poisoned):
    rng = random.Random(f"{key_dtype} {static}")
    for window in (1, 5, 128, 129, 384, 500):
        cuts = [rng.choice([1, 1, 2, 5, 16, 17, 30, 100, 128, 129, 300, 900]) for _ in range(8)]
        given, at = inputs(2, sum(cuts)), 0
        caches = pair(window, max_seqlen=sum(cuts) if static else None, key_dtype=key_dtype)
        for n in cuts:
            append(caches, given, at, at + n, window)
            at += n
        full, ring = caches
        for seq in range(2):
            assert torch.equal(held(ring, seq), held(full, seq)[:, -window:])


def test_sequences_of_different_lengths(poisoned):
    full, ring = pair(num_seqs=3)
    k, v, q = (x[0] for x in inputs(1, 4000))
    at = 0
    for lengths in ([700, 0, 3], [1, 1, 1], [16, 0, 2], [40, 500, 17], [1, 3, 0], [0, 900, 130]):
        rows = slice(at, at + sum(lengths))
        for cache in (full, ring):
            cache.append(0, k[rows], v[rows], lengths=lengths)
        assert torch.equal(ring.attention(0, q[rows]), full.attention(0, q[rows], window=WINDOW))
        at += sum(lengths)
    assert ring.lengths == full.lengths == (758, 1404, 153)


@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
def test_kernels_use_pages_again(key_dtype, poisoned):
    """In Triton's interpreter: the bytes of a page are those of a cache of all tokens."""
    given = inputs(1, 700)
    given = [x.bfloat16() for x in given]
    full, ring = pair(200, num_seqs=1, key_dtype=key_dtype, backend="triton")
    k, v, q = (x[0] for x in given)
    k[100, 0, 0] = torch.nan  # its page is used again
    for begin, stop in ((0, 130), (130, 146), (146, 500), (500, 512), (512, 513), (513, 700)):
        for cache in (full, ring):
            cache.append(0, k[begin:stop], v[begin:stop])
        if begin > 300:
            out, want = ring.attention(0, q[begin:stop]), full.attention(0, q[begin:stop], window=200)
            assert want.isfinite().all() and torch.equal(out, want)
    assert torch.equal(held(ring), held(full)[:, -200:])


def test_the_memory_is_that_of_the_window():
    given, sizes = inputs(1, 5000), []
    _, ring = pair(num_seqs=1)
    k, v, _ = (x[0] for x in given)
    for begin, stop in ((0, 10), (10, 600), (600, 5000)):
        ring.append(0, k[begin:stop], v[begin:stop])
        sizes.append(ring.layers[0].pool.nbytes)
    assert sizes == [ring_size(WINDOW) * (256 * DIM + 128)] * 3 and ring.num_pages == 5
    assert sizes[0] < 0.85 * 2 * 2 * (WINDOW - 1) * DIM  # of a window in 16 bits
    assert ring.nbytes - sizes[0] < 4 * 60  # the page table, of 128 tokens an entry
    static = PagedKVCache(HEADS, DIM, max_seqlen=100_000, window=WINDOW)
    assert static.layers[0].pool.nbytes == sizes[0]
    assert PagedKVCache(HEADS, DIM, max_seqlen=200, window=WINDOW).num_pages == 2


def test_pages_of_every_window_are_smaller_than_16_bits():
    """From the shortest window on, of a head_dim of 64, whose pages have the most bytes a channel."""
    for window in range(SHORTEST_WINDOW, 2000):
        assert ring_size(window) * (256 * 64 + 128) < (window - 1) * 2 * 2 * 64, window


@pytest.mark.parametrize("new", range(1, STEP + 1))
def test_a_ring_has_room_for_a_window_and_a_step(new):
    for window in (1, 113, 114, 115, 128, 384, 1024):
        for length in range(2 * PAGE_SIZE):
            columns = (length + 1024 + new - 1) // PAGE_SIZE - (length + 1024 - window + 1) // PAGE_SIZE + 1
            assert columns <= pages_of_run(window, new) <= ring_size(window)


@pytest.mark.parametrize("window", [WINDOW, WINDOW + 66])
@pytest.mark.parametrize("static", [False, True])
def test_the_last_step_can_be_dropped(static, window):
    """As many tokens as the error names: more in a window that is a multiple of 128, and at least `STEP`."""
    caches = pair(window, max_seqlen=4000 if static else None)
    room = {WINDOW: 130, WINDOW + 66: STEP}[window]
    assert caches[1].table.room == room
    given, at = inputs(2, 2000), 1000
    append(caches, given, 0, at, window)
    for new, dropped in ((16, 15), (room, room), (1, 0), (5, 2), (room, room - 3), (STEP, STEP - 1)) * 8:
        append(caches, given, at, at + new, window)
        at += new - dropped
        for cache in caches:
            cache.truncate(at)
    more = "use a growing one, or draft fewer tokens" if static else r"call activate_past_recording\(\)"
    with pytest.raises(
        RuntimeError, match=rf"cannot go back to 500 tokens: .* {window} tokens before .*reset.* up to {room} tokens.*{more}"
    ):
        caches[1].truncate(500)
    assert caches[1].lengths == (at, at)  # nothing was changed
    for cache in caches:
        cache.reset()
    append(caches, given, 0, 700, window)


def test_recorded_tokens_can_be_dropped():
    caches = pair()
    given = inputs(2, 3000)
    append(caches, given, 0, 900)
    caches[1].table.record(True)
    for begin, stop in ((900, 901), (901, 940), (940, 1500), (1500, 1501)):
        append(caches, given, begin, stop)
    assert caches[1].table.size == -(-1501 // PAGE_SIZE) - (900 - WINDOW + 1) // PAGE_SIZE
    for cache in caches:
        cache.truncate(901)
    append(caches, given, 901, 910)
    caches[1].table.record(False)
    size = caches[1].table.size
    append(caches, given, 910, 2900)
    assert caches[1].table.size == size


@pytest.mark.parametrize("static", [False, True])
def test_sequences_are_copied(static):
    caches = pair(num_seqs=3, max_seqlen=2000 if static else None)
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
    if static:
        return
    for cache in caches:
        cache.select([1, 0, 0, 2, 2])
    given = [x[[0, 1, 2, 0, 1]] for x in given]
    append(caches, given, 1100, 1120)
    for cache in caches:
        cache.select([4])
    append(caches, [x[:1] for x in given], 1120, 1500)
    assert caches[1].layers[0].pool.shape[0] == ring_size(WINDOW)


def test_a_copy_of_fewer_tokens():
    caches = pair()
    append(caches, inputs(2, 900), 0, 900)
    caches[1].copy(0, 1, 895)
    assert torch.equal(held(caches[1], 1), held(caches[0], 0)[:, 895 - WINDOW : 895])
    with pytest.raises(RuntimeError, match="sequence 0 cannot go back to 400 tokens"):
        caches[1].copy(0, 1, 400)
    assert caches[1].lengths == (900, 895)


@pytest.mark.parametrize("length", [100, 640, 1000])
@pytest.mark.parametrize("static", [False, True])
def test_files(tmp_path, length, static):
    caches = pair(num_seqs=3)
    given = inputs(3, 1300)
    append(caches, given, 0, length)
    path = tmp_path / "window.safetensors"
    caches[1].save(path, [2, 0])
    assert path.stat().st_size < 2 * ring_size(WINDOW) * (256 * DIM + 128) + 10_000
    caches[0].select([2, 0])
    loaded = PagedKVCache.load(path, max_seqlen=1300 if static else None)
    assert loaded.window == WINDOW and loaded.lengths == (length, length)
    append((caches[0], loaded), [x[[2, 0]] for x in given], length, 1300)


def test_a_file_after_a_dropped_draft(tmp_path):
    """The draft has used the oldest page again. The loaded cache knows it, although no token of the draft is left."""
    caches, path = pair(), tmp_path / "window.safetensors"
    append(caches, inputs(2, 641), 0, 641)
    for cache in caches:
        cache.truncate(520)
    caches[1].save(path)
    loaded = PagedKVCache.load(path)
    for ring in (caches[1], loaded):
        with pytest.raises(RuntimeError, match="sequence 0 cannot go back to 500 tokens"):
            ring.truncate(500)
    for cache in (*caches, loaded):
        cache.truncate(511)
    append((caches[0], loaded), inputs(2, 800, 1), 0, 800)


def test_read_after_a_dropped_draft():
    """The page of the first token of the window was used again. No later query sees this token."""
    caches = pair(1)
    append(caches, inputs(2, 258), 0, 258, 1)
    for cache in caches:
        cache.truncate(256 - 128)
    assert held(caches[1]).shape[1] == 0
    append(caches, inputs(2, 10), 0, 10, 1)
    assert torch.equal(held(caches[1]), held(caches[0])[:, -1:])


def test_a_deep_copy_goes_on():
    caches = pair()
    given = inputs(2, 1300)
    append(caches, given, 0, 1000)
    append((caches[0], copy.deepcopy(caches[1])), given, 1000, 1300)


def test_a_step_that_stops():
    k, v, q = (x.flatten(0, 1) for x in inputs(1, 1000))
    full, ring = (PagedKVCache(HEADS, DIM, num_layers=2, window=window) for window in (None, WINDOW))
    for cache in (full, ring):
        for layer in range(2):
            cache.append(layer, k[:900], v[:900])
        cache.append(0, k[900:916], v[900:916])  # and not layer 1
        cache.truncate(cache.lengths)
        for layer in range(2):
            cache.append(layer, k[900:905], v[900:905])
    for layer in range(2):
        assert torch.equal(ring.attention(layer, q[900:905]), full.attention(layer, q[900:905], window=WINDOW))
    with pytest.raises(ValueError, match="dtype"):
        ring.append(0, k[:200].to(torch.complex64), v[:200])
    assert ring.lengths == (905,)
    ring.append(0, k[:950], v[:950])
    with pytest.raises(RuntimeError, match="cannot go back to 905 tokens"):
        ring.truncate(ring.lengths)
    ring.reset()
    assert ring.lengths == (0,)


def test_compiled_code(poisoned):
    """Single tokens, and longer steps, which are written to a run."""
    full, ring = pair(max_seqlen=2000)
    given = inputs(2, 2000)
    append((full, ring), given, 0, 500)

    @torch.compile(backend="eager", fullgraph=True, dynamic=False)
    def step(k, v, q):
        pages = ring.append_pages(0, k, v)
        return fp8attn.attention(q, pages, window=WINDOW)

    for begin, stop in ((500, 501), (501, 502), (502, 702), (702, 902), (902, 1102), (1102, 1103), (1103, 1303)):
        k, v, q = (x[:, begin:stop].flatten(0, 1) for x in given)
        full.append(0, k, v)
        assert torch.equal(step(k, v, q), full.attention(0, q, window=WINDOW))
    assert ring.lengths == (1303, 1303)
    append((full, ring), given, 1303, 1500)
    with pytest.raises(Exception, match="call append_pages"):
        torch.compile(lambda k, v: ring.append(0, k, v), backend="eager", fullgraph=True)(*(x[:, :200].flatten(0, 1) for x in given[:2]))


def test_calibrated_scales(poisoned):
    scales = LayerScales(torch.full((HEADS,), 0.5), torch.full((HEADS,), 0.02), torch.zeros(HEADS, DIM), torch.zeros(HEADS, DIM))
    caches = pair(scales=scales)
    given = inputs(2, 1200)
    for begin, stop in ((0, 700), (700, 701), (701, 800), (800, 1200)):
        append(caches, given, begin, stop)


def test_what_is_refused():
    for window in (0, -3, 1.5, True):
        with pytest.raises(UsageError, match="window must be positive whole numbers"):
            PagedKVCache(HEADS, DIM, window=window)
    with pytest.raises(UsageError, match="window decides how many pages there are; leave out num_pages=4"):
        PagedKVCache(HEADS, DIM, window=WINDOW, num_pages=4)
    _, ring = pair(num_seqs=1)
    k, v, q = (x[0] for x in inputs(1, 3))
    ring.append(0, k, v)
    with pytest.raises(ValueError, match="window is 385, and this cache has the pages of a window of 384"):
        ring.attention(0, q, window=385)
    with pytest.raises(ValueError, match="needs causal=True"):
        ring.attention(0, q, causal=False)
    assert torch.equal(ring.attention(0, q, window=2), ring.attention(0, q, window=2))


@pytest.mark.parametrize("static", [False, True])
def test_random_operations(static, poisoned):
    """Appends, truncations that a ring allows, selections, copies, files of one process to another, recording."""
    for seed in range(6):
        rng = random.Random(f"{seed} {static}")
        window = rng.choice([100, 128, 200, 384])
        caches = pair(window, num_seqs=3, max_seqlen=3000 if static else None, key_dtype=rng.choice(["int8", "e4m3"]))
        full, ring = caches
        for number in range(40):
            what = rng.choice(["append"] * 5 + ["truncate", "select", "copy", "record", "reset", "deepcopy"])
            lengths = full.lengths
            if what == "append":
                new = [min(rng.choice([0, 1, 1, 3, 16, 17, 100, 300, 700]), 3000 - length) for length in lengths]
                k, v, q = (x[0] for x in inputs(1, max(1, sum(new)), number))
                if sum(new):
                    for cache in caches:
                        cache.append(0, k, v, lengths=new)
                    assert torch.equal(ring.attention(0, q), full.attention(0, q, window=window)), (seed, number)
            elif what == "truncate":
                shorter = [max(0, length - rng.choice([0, 1, 5, 16, 200])) for length in lengths]
                try:
                    ring.truncate(shorter)
                except RuntimeError:
                    continue
                full.truncate(shorter)
            elif what == "select":
                chosen = [rng.randrange(3) for _ in range(3)]
                for cache in caches:
                    cache.select(chosen)
            elif what == "copy":
                source, target = rng.sample(range(3), 2)
                for cache in caches:
                    cache.copy(source, target)
            elif what == "record":
                ring.table.record(rng.random() < 0.5)
            elif what == "reset" and rng.random() < 0.3:
                for cache in caches:
                    cache.reset()
            elif what == "deepcopy":
                caches = full, ring = copy.deepcopy(full), copy.deepcopy(ring)
            assert ring.lengths == full.lengths
        for seq in range(3):
            assert torch.equal(held(ring, seq), held(full, seq)[:, -window:])
