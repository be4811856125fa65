"""The kernels of latents in Triton's interpreter, on a CPU: the reference's bytes, and attention against float64."""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import fp8attn
from fp8attn import AttentionParams, KVPages, UsageError, latent
from fp8attn.formats.page_layout import latent_of
from fp8attn.formats.spec import SPARE, PageSpec
from fp8attn.kernels import latent as kernels
from fp8attn.params import Append
from tests.support.interpreted import QUIET, dynamo_knows_torch, poisoned  # noqa: F401
from tests.support.kernel_cases import assert_kernel_error, assert_lse
from tests.support.latents import cumulative, empty, filled, tokens

pytestmark = QUIET
SPEC = PageSpec.latent(256, 32)
IN_CODES = PageSpec.latent(512, 128, rope_in_codes=True)
SPARED = replace(IN_CODES, spare=SPARE)
SCALE = 0.03  # scores have a deviation of about one


def same_bytes(ours: KVPages, theirs: KVPages) -> None:
    """The bytes of whole pools, so that nothing was written but tokens; of NaN only that it is one."""
    for a, b in zip(*(latent_of(pages.pool, pages.format.layout) for pages in (ours, theirs)), strict=True):
        if a.is_floating_point():
            assert torch.equal(a.isnan(), b.isnan())
            a, b = a.nan_to_num(), b.nan_to_num()
        assert torch.equal(a, b)
    assert torch.equal(ours.cache_seqlens, theirs.cache_seqlens)


@pytest.mark.parametrize(
    ("before", "new"),
    [([0, 0], [1, 1]), ([127, 130], [1, 1]), ([120, 0, 5], [16, 0, 3]), ([100, 0], [150, 40]), ([5, 9], [30, 30])],
    ids=str,
)
@pytest.mark.parametrize(
    ("spec", "static", "dtype", "heads"),
    [
        (SPEC, False, torch.bfloat16, 1),
        (SPEC, True, torch.float16, 2),
        (PageSpec.latent(512, 64), True, torch.bfloat16, 1),
        (PageSpec.latent(128, 0), False, torch.float16, 1),
        (IN_CODES, False, torch.bfloat16, 2),
        (SPARED, True, torch.float16, 1),
    ],
    ids=str,
)
def test_append_writes_the_references_bytes(before, new, spec, static, dtype, heads):
    ours = empty([a + b for a, b in zip(before, new, strict=True)], spec, heads, static)
    if any(before):
        latent.append(ours, *tokens(sum(before), spec, dtype, heads), Append(cumulative(before), max(before)))
    theirs = copy.deepcopy(ours)
    x, rope = tokens(sum(new), spec, dtype, heads)
    x[0, 0, 3], x[-1] = torch.nan, 0
    if sum(new) > 20:
        x[7, 0, 100], x[9, 0, 5], x[11] = torch.inf, -torch.inf, x[11] * 1e-30
        if spec.widths[1]:
            rope[7, 0, 1], rope[8, 0, 0], rope[10, 0, 2] = torch.nan, torch.inf, -60000.0
    how = Append(None if len({*new}) == 1 else cumulative(new), max(new))
    fused = torch.cat([rope, x, rope], -1)  # strided, as cut out of a projection
    kernels.append_latents(ours, fused[..., rope.shape[-1] : rope.shape[-1] + x.shape[-1]], rope, how)
    latent.append(theirs, x, rope, how)
    same_bytes(ours, theirs)


@pytest.mark.parametrize("new", [[1, 1, 1], [20, 3, 0]], ids=str)
def test_lengths_that_count_the_new_tokens(new):
    """The last sequence pads the batch: it is shorter than its new tokens."""
    ours = empty([150, 40, 1], SPEC)
    ours.cache_seqlens.copy_(torch.tensor([150, 40, 0]))
    theirs = copy.deepcopy(ours)
    x, how = tokens(sum(new), SPEC, torch.float16), Append(cumulative(new), max(new), advance=False)
    kernels.append_latents(ours, *x, how)
    latent.append(theirs, *x, how)
    same_bytes(ours, theirs)
    assert ours.cache_seqlens.tolist() == [150, 40, 0]


CASES = {
    "decode": (SPEC, [300, 1, 0, 128], [1, 1, 1, 1], 8, {}),
    "few queries, ragged": (SPEC, [300, 40, 129], [4, 1, 3], 6, {}),
    "a prompt": (PageSpec.latent(128, 64), [150, 70], [150, 7], 4, {}),
    "not causal": (SPEC, [200, 30], [3, 3], 4, {"causal": False}),
    "window": (SPEC, [300, 60], [5, 5], 4, {"window": 70}),
    "leftpad": (SPEC, [300, 60], [5, 5], 4, {"leftpad_k": torch.tensor([140, 60], dtype=torch.int32)}),
    "no RoPE": (PageSpec.latent(128, 0), [130], [2], 4, {}),
    "DeepSeek's": (PageSpec.latent(512, 64), [300, 17], [1, 1], 16, {}),
    "many heads": (SPEC, [140], [1], 72, {}),
    "RoPE in codes": (SPARED, [300, 17], [3, 1], 8, {}),
}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("static", [False, True], ids=["", "mean and factor"])
@pytest.mark.parametrize("name", CASES)
def test_attention_against_float64(name, static, splits, monkeypatch):
    monkeypatch.setattr(kernels, "num_splits", lambda *_: splits)
    spec, lengths, queries, heads, options = CASES[name]
    pages = filled(lengths, spec, static=static)
    q = torch.randn(sum(queries), heads, spec.k_dim).half()
    bounds = None if len({*queries}) == 1 and 0 not in lengths else cumulative(queries)
    scale = SCALE * (256 / spec.v_dim) ** 0.5
    params = AttentionParams(bounds, max(queries), softmax_scale=scale, **{"causal": True} | options)
    out, lse = kernels.latent_attention(q, pages, params)
    exact = dict(compute_dtype=torch.float64, out_dtype=torch.float64)
    ref, ref_lse = latent.attention(q, pages, params, **exact)
    assert out.shape == (sum(queries), heads, spec.v_dim)
    assert_kernel_error(out, ref)
    assert_lse(lse, ref_lse)


def test_several_kv_heads():
    pages, q = filled([200], SPEC, heads=2, static=True), torch.randn(2, 6, 288).half()
    params = AttentionParams(None, 2, True, SCALE)
    ref, _ = latent.attention(q, pages, params, compute_dtype=torch.float64, out_dtype=torch.float64)
    assert_kernel_error(kernels.latent_attention(q, pages, params)[0], ref)


def test_scales_that_differ_by_many_powers_of_two():
    """The unit of the accumulator changes from tile to tile; zeros in between keep it."""
    size = torch.exp2(torch.randint(-20, 20, (400, 1, 1)).float())
    size[128:200] = 0
    x, rope = torch.randn(400, 1, 256) * size, torch.zeros(400, 1, 32)
    pages = empty([400], SPEC)
    fp8attn.append(pages, x, rope, backend="reference")
    q = torch.zeros(1, 4, 288).half()  # all tokens have the same weight
    params = AttentionParams(None, 1, True, SCALE)
    ref, ref_lse = latent.attention(q, pages, params, compute_dtype=torch.float64, out_dtype=torch.float64)
    out, lse = kernels.latent_attention(q.bfloat16(), pages, params)
    assert_kernel_error(out, ref)
    assert_lse(lse, ref_lse)


def test_a_nan_is_for_the_rows_that_see_it():
    x, rope = tokens(140, SPEC)
    x[135, 0, 3] = torch.nan
    pages, q = empty([140], SPEC), torch.randn(20, 4, 288).half()
    fp8attn.append(pages, x, rope, backend="reference")
    params = AttentionParams(None, 20, True, SCALE)
    ref, ref_lse = latent.attention(q, pages, params)
    out, lse = kernels.latent_attention(q, pages, params)
    assert torch.equal(out.isnan(), ref.isnan()) and torch.equal(lse.isnan(), ref_lse.isnan())
    assert ref.isnan()[15:].all() and not ref.isnan()[:15].any()
    torch.testing.assert_close(out[:15].float(), ref[:15].float(), rtol=2**-9, atol=2e-3)


def test_a_cache_runs_these_kernels():
    """Prompts and steps of `PagedKVCache`, of which nothing is compiled ahead."""
    ours, theirs = (fp8attn.PagedKVCache(1, SPEC, num_seqs=2, backend=name) for name in ("triton", "reference"))
    for n in (140, 1, 1):
        x, q = tokens(2 * n, SPEC, torch.bfloat16), torch.randn(2 * n, 4, 288).bfloat16()
        ours.append(0, *x), theirs.append(0, *x)
        outs = [cache.attention(0, q, softmax_scale=SCALE) for cache in (ours, theirs)]
        torch.testing.assert_close(*outs, rtol=2**-6, atol=4e-3)
    for a, b in zip(ours.read(0, 1), theirs.read(0, 1), strict=True):
        assert torch.equal(a, b) and len(a) == 142


def test_the_doors():
    """The public functions run these kernels, and rows behind the last sequence are zeros."""
    pages, (x, rope) = empty([9, 9], SPEC), tokens(18, SPEC, torch.float16)
    fp8attn.append(pages, x, rope, backend="triton")
    q = torch.randn(7, 4, 288).half()
    options = dict(cu_seqlens_q=cumulative([2, 2]), max_seqlen_q=2, softmax_scale=SCALE, return_lse=True)
    out, lse = fp8attn.attention(q, pages, backend="triton", **options)
    ref, ref_lse = fp8attn.attention(q, pages, backend="reference", **options)
    torch.testing.assert_close(out, ref, rtol=2**-9, atol=2e-3)
    assert_lse(lse[:4], ref_lse[:4])
    assert not out[4:].any()
    given = torch.full((7, 4, 256), torch.nan).half()
    assert fp8attn.attention(q, pages, backend="triton", out=given, **options)[0] is given and torch.equal(given, out)
    with pytest.raises(UsageError, match="batch_invariant"):
        fp8attn.attention(q, pages, backend="triton", batch_invariant=True, **options)
