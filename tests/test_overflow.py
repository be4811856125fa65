"""Counts of saturated values and rescaled pages, against planted ones."""

import copy
import logging

import pytest
import torch

import fp8attn
from fp8attn import KVPages, OverflowCounts, PagedKVCache
from fp8attn.overflow import LayerOverflows
from fp8attn.scales import LayerScales

HEADS, DIM = 2, 64


def static_cache(key_dtype="int8", num_layers=1, **options):
    """A cache with scales of one, and no means or rotation."""
    zero = torch.zeros(HEADS, DIM)
    scales = LayerScales(torch.ones(HEADS), torch.ones(HEADS), zero, zero, key_dtype, False)
    return PagedKVCache(
        HEADS, DIM, num_layers=num_layers, key_dtype=key_dtype, rotate_keys=False, scales=[scales] * num_layers, count_overflows=True,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize(("key_dtype", "largest", "lost"), [("int8", 127.0, 4), ("e4m3", 448.0, 3)])
def test_saturated_values_are_counted_one_by_one(key_dtype, largest, lost):
    """The largest code itself does not saturate; Inf does. A NaN is lost in INT8 alone, which has no code for it."""
    cache = static_cache(key_dtype)
    k, v = torch.ones(200, HEADS, DIM), torch.ones(200, HEADS, DIM)
    for x, limit in ((k, largest), (v, 448.0)):
        x[3, 0, :4] = torch.tensor([limit, -limit, torch.nan, limit * 0.999])
        x[130, 1, 10:13] = torch.tensor([limit * 1.001, -limit * 9, torch.inf])
    v[199, 1, 63] = -1e30
    cache.append(0, k, v)
    assert cache.overflow_counts.tensors[0].tolist() == [[200, lost, 0], [200, 4, 0]]
    cache.append(0, k[130:131], v[130:131])
    report = cache.overflows()
    assert report.rows == (
        LayerOverflows(0, "k", 201, 201 * HEADS * DIM, lost + 3, 0, 201 * HEADS / 128),
        LayerOverflows(0, "v", 201, 201 * HEADS * DIM, 7, 0, 201 * HEADS / 128),
    )
    assert report.rows[1].saturated_share == 7 / (201 * HEADS * DIM) and report.rows[1].rescaled_share == 0


def test_growths_by_hand():
    """INT8 keys. The first token of a page sets the scale, of 127 to 1.25, which is no overflow. One of 254 needs 2, and one of 500 more
    than 2.5; one of 300 then fits. V's scale of E4M3 has a headroom of 32."""
    cache = PagedKVCache(1, DIM, rotate_keys=False, count_overflows=True)
    k = torch.tensor([127.0, 150.0, 254.0, 500.0, 300.0]).view(5, 1, 1).expand(5, 1, DIM).contiguous()
    cache.append(0, k, k)
    assert cache.overflow_counts.tensors[0].tolist() == [[5, 0, 2], [5, 0, 0]]
    (keys, _) = cache.overflows().rows
    assert keys.rescaled_share == pytest.approx(2 / (5 / 128))


@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
@pytest.mark.parametrize("static", [False, True])
def test_counts_do_not_depend_on_how_tokens_are_divided(key_dtype, static):
    generator = torch.Generator().manual_seed(0)
    size = torch.exp2(torch.randint(-8, 9, (300, 1, 1), generator=generator).float())
    k, v = (torch.randn(300, HEADS, DIM, generator=generator) * size for _ in "kv")
    found = []
    for parts in ([300], [1] * 300, [5, 250, 45]):
        cache = static_cache(key_dtype) if static else PagedKVCache(HEADS, DIM, key_dtype=key_dtype, count_overflows=True)
        for a, b in zip(k.split(parts), v.split(parts), strict=True):
            cache.append(0, a, b)
        found.append((cache.overflow_counts.tensors[0].tolist(), [x.tolist() for x in cache.read(0, 0)]))
    assert found[0] == found[1] == found[2]
    (k_counts, v_counts), _ = found[0]
    assert k_counts[1 if static else 2] > 0 and v_counts[1 if static else 2] > 0 and k_counts[2 if static else 1] == 0


def test_counting_changes_no_bytes():
    """A growing cache that counts makes its first pages by an append."""
    k, v = torch.randn(2, 500, HEADS, DIM)
    caches = [PagedKVCache(HEADS, DIM, num_seqs=2, count_overflows=count) for count in (False, True)]
    for cache in caches:
        cache.append(0, k, v)
        cache.append(0, 9 * k[:6], 9 * v[:6])
    for seq in range(2):
        assert all(torch.equal(*pair) for pair in zip(*(cache.read(0, seq) for cache in caches), strict=True))


def test_a_cache_counts_only_if_it_is_asked_to():
    with pytest.raises(ValueError, match="make it with count_overflows=True"):
        PagedKVCache(HEADS, DIM).overflows()


def test_append_checks_the_counts():
    pages, k = KVPages.empty(1, HEADS, DIM, 1, 1), torch.zeros(1, HEADS, DIM)
    for wrong in (torch.zeros(3, 2).long(), torch.zeros(2, 3).int(), torch.zeros(3, 2).long().T, torch.zeros(2, 3, device="meta").long()):
        with pytest.raises(ValueError, match="overflows must be"):
            fp8attn.append(pages, k, k, overflows=wrong)
    assert pages.cache_seqlens.tolist() == [0]


def test_scales_that_do_not_fit_are_a_warning_once(caplog):
    """One value of 64 in V of layers 1 and 3. With fewer than 1,024 tokens, a few values would be a large share."""
    cache = static_cache(num_layers=4, num_pages=10)
    k, v = torch.ones(1000, HEADS, DIM), torch.ones(1000, HEADS, DIM)
    planted = v.clone()
    planted[:, :, 5] = 1e4
    with caplog.at_level(logging.WARNING, logger="fp8attn"):
        for part in (slice(0, 1000), slice(0, 24)):
            assert cache.overflows().problem is None and not caplog.records
            for layer in range(4):
                cache.append(layer, k[part], planted[part] if layer in (1, 3) else v[part])
        report = cache.overflows()
        cache.overflows()
    (record,) = caplog.records
    assert record.name == "fp8attn.overflow" and record.getMessage() == report.problem
    assert "layers 1, 3 saturate more than 0.1% of the values of K or V (the most: 1.56% of V in layer 1)" in report.problem
    assert "calibrate again (fp8attn_tools.calibrate(model, batches).save(path))" in report.problem
    assert [row.fits for row in report.rows] == [True, True, True, False, True, True, True, False]
    assert str(report).splitlines()[0].split() == ["layer", "tokens", "saturated", "rescaled", "a", "page"]
    assert str(report).splitlines()[4].split() == ["1", "V", "1,024", "1.5625%", "0.000"]
    cache.overflow_counts.reset()
    assert cache.overflows().problem is None and cache.overflows().rows[3].saturated_share == 0


def test_a_thousandth_still_fits():
    """Exactly 0.1% of values, in 1,250 tokens of one head of 64 channels: 80."""
    counts = OverflowCounts([7], 1, 64)
    counts.tensors[0].copy_(torch.tensor([[1250, 80, 0], [1250, 81, 0]]))
    report = counts.read()
    assert [row.fits for row in report.rows] == [True, False] and "of V in layer 7" in report.problem


def test_a_compiled_step_counts():
    def step(cache, k):
        for layer in range(2):
            cache.append(layer, k, k * 600)

    eager = static_cache(num_layers=2, max_seqlen=300)
    compiled = copy.deepcopy(eager)
    torch._dynamo.reset()
    run = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for seed in range(5):
            k = 60 * torch.randn(2, HEADS, DIM, generator=torch.Generator().manual_seed(seed))
            run(compiled, k)
            step(eager, k)
    assert compiled.overflows() == eager.overflows()
    assert all(row.tokens == 10 and row.saturated > 0 for row in eager.overflows().rows)
