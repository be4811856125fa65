"""Sequences in files: a loaded cache has the saved bytes, and its later appends give the same bytes as the
saved cache.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from fp8attn import OutOfPagesError, PagedKVCache
from fp8attn.cache import storage
from fp8attn.cache.storage import FORMAT
from fp8attn.scales import LayerScales

HEADS, DIM = 2, 64


def tokens(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(count, HEADS, DIM, generator=generator) + 1 for _ in range(2))


def filled(lengths=(300, 0, 140), num_layers=2, **options):
    cache = PagedKVCache(HEADS, DIM, num_layers=num_layers, num_seqs=len(lengths), **options)
    for layer in range(num_layers):
        cache.append(layer, *tokens(sum(lengths), layer), lengths=lengths)
    return cache


def go_on(cache):
    """The contents of caches after every layer appended two more tokens to each sequence."""
    for layer in range(cache.num_layers):
        cache.append(layer, *tokens(2 * cache.num_seqs, 10 + layer))
    return [x for layer in range(cache.num_layers) for seq in range(cache.num_seqs) for x in cache.read(layer, seq)]


SCALES = LayerScales(
    torch.full((HEADS,), 0.05), torch.full((HEADS,), 0.0625), torch.ones(HEADS, DIM), torch.ones(HEADS, DIM)
)
MEANS = {"k_mean": [torch.full((HEADS, DIM), 0.3), None], "v_mean": torch.rand(HEADS, DIM)}


@pytest.mark.parametrize("form", [{}, {"num_pages": 12}, {"max_seqlen": 384}])
@pytest.mark.parametrize(
    "options",
    [{}, {"key_dtype": "e4m3", "rotate_keys": [True, False]}, MEANS, {"scales": SCALES}],
    ids=["int8", "e4m3", "means", "scales"],
)
def test_what_is_loaded_has_the_bytes_that_were_saved(tmp_path, options, form):
    cache = filled(**options)
    cache.save(tmp_path / "folder" / "prompt.safetensors")
    loaded = PagedKVCache.load(tmp_path / "folder" / "prompt.safetensors", **form)
    assert loaded.lengths == cache.lengths == (300, 0, 140)
    for layer in range(2):
        pages = cache.pages(layer), loaded.pages(layer)
        for seq, length in enumerate(cache.lengths):
            mine, theirs = (x.pool[x.page_table[seq, : -(-length // 128)].long()] for x in pages)
            assert torch.equal(mine, theirs)
        assert (pages[0].format.k, pages[0].format.rotate) == (pages[1].format.k, pages[1].format.rotate)
        for name in ("stored_k_mean", "v_mean"):
            mine, theirs = (getattr(x.format, name) for x in pages)
            assert (mine is None and theirs is None) or torch.equal(mine, theirs)
    assert all(torch.equal(a, b) for a, b in zip(go_on(cache), go_on(loaded), strict=True))


def test_sequences_are_chosen_and_share_pages_as_they_did(tmp_path):
    cache = filled()
    cache.copy(0, 1, 200)
    cache.save(tmp_path / "two", seqs=[1, 0])
    assert load_file(tmp_path / "two")["pages.0"].shape[0] == 3
    loaded = PagedKVCache.load(tmp_path / "two")
    assert loaded.lengths == (200, 300) and loaded.num_pages == 3
    cache.select([1, 0])
    assert all(torch.equal(a, b) for a, b in zip(go_on(cache), go_on(loaded), strict=True))
    loaded.reset()
    assert loaded.lengths == (0, 0)


@pytest.mark.parametrize("window", [None, 500])
def test_a_cache_without_tokens_is_saved_and_loaded(tmp_path, window):
    PagedKVCache(1, 64, num_seqs=2, window=window).save(tmp_path / "empty")
    loaded = PagedKVCache.load(tmp_path / "empty")
    assert loaded.lengths == (0, 0) and loaded.window == window


def test_a_saved_static_cache_is_its_tokens_pages(tmp_path):
    cache = filled((130, 5), max_seqlen=1000)
    cache.save(tmp_path / "static")
    assert load_file(tmp_path / "static")["pages.1"].shape[0] == 3
    loaded = PagedKVCache.load(tmp_path / "static")
    assert all(torch.equal(a, b) for a, b in zip(go_on(cache), go_on(loaded), strict=True))


def test_files_that_are_refused(tmp_path):
    cache, path = filled(), tmp_path / "prompt"
    cache.save(path)
    with pytest.raises(ValueError, match="no such file"):
        PagedKVCache.load(tmp_path / "none")
    with pytest.raises(
        ValueError, match="sequences of 300 tokens, which do not fit into max_seqlen=200; give a larger one"
    ):
        PagedKVCache.load(path, max_seqlen=200)
    with pytest.raises(OutOfPagesError, match="needs 5 more pages"):
        PagedKVCache.load(path, num_pages=3)
    with pytest.raises(ValueError, match="the sequences 0 to 2; got 3"):
        cache.save(path, seqs=[3])
    tensors, layers, _ = storage.read(path)
    for number, damaged in enumerate(({}, {0: {}}, {"x": layers[0]}, {0: [1]}, {0: layers[0] | {"num_kv_heads": "2"}})):
        written = {"format": FORMAT, "layers": json.dumps(damaged), "checksum": storage.checksum(tensors)}
        save_file(tensors, tmp_path / f"bare{number}", written)
        with pytest.raises(ValueError, match=r"incomplete or not as written .*save it again"):
            PagedKVCache.load(tmp_path / f"bare{number}")
    for name in ("fp8attn.kv_pages.2", "fp8attn.kv_pages.3.window"):  # of fp8attn 0.2
        save_file(tensors, tmp_path / "old", {"format": name})
        with pytest.raises(ValueError, match=rf"its format is '{name}'; save it again with this version of fp8attn"):
            PagedKVCache.load(tmp_path / "old")
    save_file(tensors, tmp_path / "other", {"format": "fp8attn.kv_scales.2"})
    with pytest.raises(ValueError, match=r"does not hold sequences of a cache .*'fp8attn.kv_scales.2'"):
        PagedKVCache.load(tmp_path / "other")
    storage.write(tmp_path / "odd", tensors, {number: layer | {"spec": "k9.int8"} for number, layer in layers.items()})
    with pytest.raises(ValueError, match=r"not as written .*there are no pages 'k9\.int8'.*save it again"):
        PagedKVCache.load(tmp_path / "odd")
    storage.write(tmp_path / "several", tensors, layers | {1: layers[1] | {"window": 200}})
    with pytest.raises(ValueError, match=r"has layers of several shapes or windows.*FP8Cache\.load reads the file"):
        PagedKVCache.load(tmp_path / "several")
    (tmp_path / "cut").write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="not a safetensors file, or it is cut short"):
        PagedKVCache.load(tmp_path / "cut")
    cache.append(0, *tokens(3))
    with pytest.raises(ValueError, match="save between the appends of a step: layers 1 have not"):
        cache.save(path)


def test_a_page_table_that_names_no_pages_is_refused(tmp_path):
    filled().save(tmp_path / "cache")
    tensors, layers, _ = storage.read(tmp_path / "cache")
    storage.write(
        tmp_path / "cache", tensors | {f"page_table.{i}": tensors[f"page_table.{i}"] + 90 for i in layers}, layers
    )
    with pytest.raises(ValueError, match=r"not as written .*page_table must name the pages 0 to 4; got \[90, 91"):
        PagedKVCache.load(tmp_path / "cache")


@pytest.mark.parametrize(
    ("name", "damaged", "message"),
    [
        (
            "pages.1",
            lambda x: x[:, :1],
            r"pages.1 must be \(5, 2, 16512\) uint8 on cpu; got \(5, 1, 16512\)",
        ),  # would be broadcast
        ("pages.0", lambda x: x[:2], r"pages.0 must be \(5, 2, 16512\)"),
        ("page_table.1", lambda x: x + 90, r"page_table must be the same in the layers \[0, 1\]"),
        ("lengths", lambda x: x + 4000, r"lengths must be 0 to 384; got \[4300"),
        ("lengths", lambda x: x - 400, "lengths must be 0 to 384"),
        ("lengths", lambda x: x[:2], r"lengths must be \(3,\) int32"),
        ("k_mean.0", lambda x: x[:1], r"k_mean.0 must be \(2, 64\)"),
    ],
)
def test_damaged_tensors_are_refused(tmp_path, name, damaged, message):
    path = tmp_path / "cache.safetensors"
    filled(**MEANS).save(path)
    tensors, layers, _ = storage.read(path)
    storage.write(path, tensors | {name: damaged(tensors[name]).contiguous()}, layers)  # with a checksum of its own
    with pytest.raises(ValueError, match=f"is incomplete or not as written .*{message}.*; save it again"):
        PagedKVCache.load(path)
