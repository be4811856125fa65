"""`batch_invariant` on a CPU: the same tokens in other batches and chunks give the same bits."""

import os

import pytest
import torch

from fp8attn import PagedKVCache, attention
from fp8attn.errors import UsageError
from fp8attn.scales import LayerScales

HEADS, GROUP, D = 2, 3, 64
LENGTH = 300
OPTIONS = {"plain": {}, "window": {"window": 100}, "sinks, softcap": {"softcap": 20.0}}


def tokens(seqs: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q, K and V of sequences by their numbers, `[len(seqs), LENGTH, heads, D]` each."""

    def of(seq: int, heads: int, seed: int) -> torch.Tensor:
        return torch.randn(LENGTH, heads, D, generator=torch.Generator().manual_seed(100 * seed + seq))

    return tuple(
        torch.stack([of(seq, heads, i) for seq in seqs]).bfloat16()
        for i, heads in enumerate((GROUP * HEADS, HEADS, HEADS))
    )


def scales() -> LayerScales:
    """Calibrated scales, which do not grow: a step sees the bytes of the steps before as they stay."""
    return LayerScales(torch.full((HEADS,), 0.04), torch.full((HEADS,), 2.0**-6), *torch.zeros(2, HEADS, D))


def outputs(ends: list[int], seqs: list[int], static: bool, options: dict) -> dict[int, torch.Tensor]:
    """The outputs of the first sequence's tokens, from steps that end at `ends`, by the end."""
    cache = PagedKVCache(HEADS, D, num_seqs=len(seqs), scales=scales() if static else None)
    q, k, v = tokens(seqs)
    found, first = {}, 0
    for last in ends:
        cache.append(0, *(x[:, first:last].flatten(0, 1) for x in (k, v)))
        out = cache.attention(0, q[:, first:last].flatten(0, 1), batch_invariant=True, **options)
        found[last], first = out[: last - first], last
    return found


def sinks_of(name: str) -> dict:
    return {"sinks": torch.linspace(-1, 1, GROUP * HEADS)} if "sinks" in name else {}


@pytest.mark.parametrize("name", OPTIONS)
def test_batches_and_chunks_have_the_same_bits(name):
    options = OPTIONS[name] | sinks_of(name)
    (whole,) = outputs([LENGTH], [0], True, options).values()
    for seqs in ([0, 1, 2], list(range(8))):
        (beside,) = outputs([LENGTH], seqs, True, options).values()
        assert torch.equal(beside, whole), len(seqs)
    for ends in ([128, 256, LENGTH], [1, 2, 130, 256, 257, LENGTH - 1, LENGTH]):
        first = 0
        for last, out in outputs(ends, [0, 3], True, options).items():
            assert torch.equal(out, whole[first:last]), (ends, last)
            first = last


def test_chunks_of_whole_pages_need_no_calibrated_scales():
    (whole,) = outputs([LENGTH], [0], False, {}).values()
    found = outputs([128, 256, LENGTH], [0, 1], False, {})
    assert torch.equal(torch.cat(list(found.values())), whole)


def test_a_growing_scale_is_not_invariant():
    """Why other chunks need calibrated scales: a page's later token changes what an earlier step has seen."""
    cache = PagedKVCache(HEADS, D, backend="reference")
    _, k, v = (x[0, :2] for x in tokens([0]))
    k = k * torch.tensor([1.0, 9.0])[:, None, None].bfloat16()
    cache.append(0, k[:1], v[:1])
    before = cache.pages(0).k_scale.clone()
    cache.append(0, k[1:], v[1:])
    assert (cache.pages(0).k_scale > before).any()


def test_ragged_batches_have_the_same_bits():
    q, k, v = tokens([0, 1])
    (whole,) = outputs([LENGTH], [0], True, {}).values()
    cache = PagedKVCache(HEADS, D, num_seqs=2, scales=scales())
    counts = [LENGTH, 70]
    ragged = [torch.cat([x[0], x[1, :70]]) for x in (q, k, v)]
    cache.append(0, *ragged[1:], lengths=counts)
    assert torch.equal(cache.attention(0, ragged[0], batch_invariant=True)[:LENGTH], whole)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="compiled here")
def test_portable_kernels_refuse_it():
    cache = PagedKVCache(HEADS, D, backend="triton")
    q, k, v = (x[0, :2] for x in tokens([0]))
    cache.append(0, k, v)
    with pytest.raises(UsageError, match=r"backend 'triton' cannot keep batch_invariant"):
        cache.attention(0, q, batch_invariant=True)
    assert cache.attention(0, q).isfinite().all()


@pytest.mark.parametrize("static", [False, True])
def test_a_cache_of_transformers_passes_it_on(static, monkeypatch):
    """The bits of a model also depend on its own matrix products, so this looks at the call."""
    transformers = pytest.importorskip("transformers")
    from fp8attn.integrations.transformers import FP8Cache
    from fp8attn.integrations.transformers import attention as attention_module
    from tests.support.transformers_models import make, prompt

    assert transformers
    given, attend = [], attention_module.ops.run_attention

    def noting(name, q, pages, params):
        given.append(params.batch_invariant)
        return attend(name, q, pages, params)

    monkeypatch.setattr(attention_module.ops, "run_attention", noting)
    model = make()
    for wanted in (True, False):
        cache = FP8Cache(model, batch_invariant=wanted, max_cache_len=160 if static else None)
        with torch.no_grad():
            model(prompt(), past_key_values=cache)
        assert given and set(given) == {wanted}
        given.clear()


@pytest.mark.parametrize("window", [None, 100])
def test_padding_that_no_query_sees_does_not_change_bits(window):
    """The same bytes, behind a page of padding and without one."""
    q, k, v = (x[0] for x in tokens([0]))
    cache = PagedKVCache(HEADS, D)
    cache.append(0, k, v)
    pages = cache.pages(0)
    count, options = 20, {"window": window, "batch_invariant": True}
    out = attention(q[-count:], pages, **options)
    table = torch.cat([pages.page_table[:, 1:2], pages.page_table[:, :3]], 1)
    behind = pages.with_tables(table, pages.cache_seqlens + 128)
    padded = attention(q[-count:], behind, leftpad_k=torch.tensor([128], dtype=torch.int32), **options)
    assert torch.equal(padded, out)
