"""NaN in K and V: which tokens it reaches, and that it ends with their pages, or, in a format that has
NaN, with them.
"""

import pytest
import torch

import fp8attn
from fp8attn import KVPages, PagedKVCache, ops
from fp8attn.formats.codec import CODECS
from fp8attn.formats.page_layout import unpack_v
from fp8attn.scales import LayerScales

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of NaN
]

HEADS, DIM = 2, 64
each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])
each_format = pytest.mark.parametrize("key_dtype", list(CODECS))


@pytest.fixture(autouse=True)
def _with_triton(request):
    if "triton" in request.node.name:
        pytest.importorskip("triton")


def tokens(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    k, v = torch.randn(2, count, HEADS, DIM, generator=torch.Generator().manual_seed(count)).bfloat16()
    return k, v


def broken(count: int, token: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens, of which one has a NaN in K and one in V, of every head."""
    k, v = tokens(count)
    k[token, :, 3] = v[token, :, 5] = torch.nan
    return k, v


def attend(cache: PagedKVCache, seqs: int = 1) -> torch.Tensor:
    """Attention of one query of each sequence."""
    q = torch.randn(seqs, HEADS, DIM, generator=torch.Generator().manual_seed(0)).bfloat16()
    return fp8attn.attention(q, cache.pages(0), backend=cache.backend)


@each_backend
@pytest.mark.parametrize("cut", [1, 5, 40])  # token by token, in steps, page by page
def test_a_nan_leaves_static_scales_as_they_are(cut, backend):
    """INT8 has no code for it, so it becomes zero. The page's next tokens, and the next sequence that has it, are
    quantized with the static scale."""
    scales = LayerScales(
        torch.full((HEADS,), 0.03), torch.full((HEADS,), 2.0**-6), *torch.zeros(2, HEADS, DIM), "int8", False
    )
    options = {"rotate_keys": False, "scales": scales, "backend": backend, "num_pages": 2}
    cache, clean = (PagedKVCache(HEADS, DIM, **options) for _ in range(2))
    k, v = tokens(140)
    with_nan = k.clone()
    with_nan[[3, 130], :, 7] = torch.nan
    k[[3, 130], :, 7] = 0.0
    for held, keys in ((cache, with_nan), (clean, k)):
        for at in range(0, 140, cut):
            held.append(0, keys[at : at + cut], v[at : at + cut])
    assert torch.equal(cache.pages(0).pool, clean.pages(0).pool)
    assert (cache.pages(0).k_scale == cache.pages(0).k_scale[0, 0]).all() and cache.pages(0).k_scale.isfinite().all()
    cache.reset()
    cache.append(0, *tokens(20))
    assert attend(cache).isfinite().all()


@each_backend
@each_format
@pytest.mark.parametrize(("held", "new"), [(0, 1), (0, 16), (120, 16), (128, 3), (0, 40)])
def test_an_append_that_begins_a_page_leaves_nothing_of_what_was_there(held, new, key_dtype, backend):
    """Serving engines give blocks to other requests as they are."""
    pages = KVPages.empty(2, HEADS, DIM, 1, 2, key_dtype=key_dtype)
    pages.page_table.copy_(torch.tensor([[1, 0]], dtype=torch.int32))
    pages.pool.fill_(0x7F)  # NaN in E4M3
    for count in (held, new):
        if count:
            ops.append(pages, *tokens(count), backend=backend)
    touched = pages.page_table[0, : -(-(held + new) // 128)].long()
    assert pages.v[touched].float().isfinite().all() and pages.k_scale[touched].isfinite().all()
    q = torch.randn(1, HEADS, DIM).bfloat16()
    assert fp8attn.attention(q, pages, backend=backend).isfinite().all()


@each_backend
@pytest.mark.parametrize("draft", [5, 40])
def test_a_cropped_nan_leaves_nothing_in_e4m3(draft, backend):
    """Neither what the page held before nor what comes next is lost, whether attention follows at once or after another
    append.
    """
    cache, clean = (PagedKVCache(HEADS, DIM, key_dtype="e4m3", backend=backend) for _ in range(2))
    for held in (cache, clean):
        held.append(0, *tokens(50))
    k, v = broken(draft, 2)
    cache.append(0, k * 0.01, v * 0.01)  # no scale grows
    assert attend(cache).isnan().any()
    cache.truncate(50)
    assert torch.equal(attend(cache), attend(clean))
    cache.append(0, k * 0.01, v * 0.01)
    cache.truncate(51)
    for held in (cache, clean):
        held.truncate(50)
        held.append(0, *(x[50:] for x in tokens(53)))
    assert torch.equal(attend(cache), attend(clean))
    for name in ("k_scale", "v_scale"):
        assert torch.equal(getattr(cache.pages(0), name), getattr(clean.pages(0), name))


@each_backend
@each_format
def test_a_nan_stays_while_its_token_does(key_dtype, backend):
    cache = PagedKVCache(HEADS, DIM, key_dtype=key_dtype, backend=backend)
    cache.append(0, *broken(50, 20))
    cache.append(0, *tokens(10))
    for length in (55, 50, 21):
        cache.truncate(length)
        assert attend(cache).isnan().all(), length
    cache.truncate(20)
    assert attend(cache).isfinite().all() or not CODECS[key_dtype].has_nan


@each_backend
@pytest.mark.parametrize("cut", [1, 5, 40])  # token by token, in steps, page by page
def test_a_nan_in_int8_is_of_its_page_until_the_page_begins_again(cut, backend):
    """The page's scale stays NaN, also after the token was cropped and over later tokens. Its number in the pool does
    not.
    """
    cache, clean = (PagedKVCache(HEADS, DIM, num_pages=2, backend=backend) for _ in range(2))
    k, v = broken(200, 150)
    for at in range(0, 200, cut):
        cache.append(0, k[at : at + cut], v[at : at + cut])
    page = cache.pages(0).page_table[0, 1].item()
    for length in (151, 150, 140):
        cache.truncate(length)
        assert attend(cache).isnan().all() and cache.pages(0).k_scale[page].isnan().all()
    cache.append(0, *tokens(3))
    assert attend(cache).isnan().all()
    cache.truncate(128)
    assert attend(cache).isfinite().all()
    clean.append(0, k[:128], v[:128])
    for held in (cache, clean):
        held.append(0, *tokens(60))
    assert cache.pages(0).page_table[0, 1] == page
    assert torch.equal(attend(cache), attend(clean))


@each_backend
def test_a_shared_page_ends_for_each_sequence_where_it_ends(backend):
    """A copy of the first tokens, and a sequence that was shortened, share a page with a NaN after them."""
    cache = PagedKVCache(HEADS, DIM, num_seqs=3, key_dtype="e4m3", backend=backend)
    k, v = broken(200, 190)
    cache.append(0, k, v, lengths=[200, 0, 0])
    cache.copy(0, 1, 150)
    cache.copy(0, 2)
    cache.truncate([200, 150, 189])
    out = attend(cache, 3)
    assert out[0].isnan().all() and out[1:].isfinite().all()
    assert cache.lengths == (200, 150, 189) and cache.table.references.count(1) == 3
    cache.append(0, *tokens(3))
    out = attend(cache, 3)
    assert out[0].isnan().all() and out[1:].isfinite().all()
    got, expected = cache.read(0, 1), tokens(200)
    assert (got[1][:150] - expected[1][:150].float()).abs().max() <= 0.25  # half a step of E4M3 above 4


@each_backend
def test_the_end_of_a_file_is_dropped(backend, tmp_path):
    cache = PagedKVCache(HEADS, DIM, key_dtype="e4m3", backend=backend)
    cache.append(0, *broken(60, 55))
    cache.truncate(50)
    cache.save(tmp_path / "cache")
    loaded = PagedKVCache.load(tmp_path / "cache", backend=backend)
    assert attend(loaded).isfinite().all() and torch.equal(attend(loaded), attend(cache))


def test_no_page_is_needed_to_shorten_or_copy():
    """Pages of a copy are taken when it is used: a sequence can be moved in a pool that is full."""
    cache = PagedKVCache(HEADS, DIM, num_seqs=2, num_pages=2, key_dtype="e4m3")
    cache.append(0, *broken(200, 190), lengths=[200, 0])
    cache.copy(0, 1, 150)
    cache.truncate([0, 150])
    cache.append(0, *tokens(2), lengths=[0, 2])
    assert cache.num_free_pages == 0 and cache.read(0, 1)[0].isfinite().all()


@each_backend
def test_a_step_into_the_next_page_clears_its_values_and_leaves_it_its_scale(backend):
    """A step of four tokens begins in one page and ends in the next, whose bytes are those of older tokens, NaN in
    E4M3. The step's first token has a NaN in K, which is of the first page alone."""
    cache = PagedKVCache(HEADS, DIM, num_pages=2, backend=backend)
    cache.append(0, *tokens(126))
    cache.layers[0].pool[[page for page in range(2) if page not in cache.table.tables[0]]] = 0x7F
    k, v = tokens(4)
    k[0, :, 3] = torch.nan
    cache.append(0, k, v)
    pages = cache.pages(0)
    first, second = pages.page_table[0].tolist()
    assert pages.k_scale[first].isnan().all() and pages.k_scale[second].isfinite().all()
    assert not unpack_v(pages.v[second : second + 1].view(torch.uint8))[2:].any()
    assert cache.read(0, 0)[0][128:].isfinite().all()
