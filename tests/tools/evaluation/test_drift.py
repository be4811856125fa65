"""Long decoding: an exact cache does not drift after any move of sequences, and an FP8 cache stays within its first
error.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fp8attn_tools.evaluation import models  # noqa: E402
from fp8attn_tools.evaluation.caches import cache_factory  # noqa: E402
from fp8attn_tools.evaluation.drift import OPERATIONS, drift  # noqa: E402


@pytest.fixture(scope="module")
def tokens(tokens):
    return models.windows(tokens, 60 + 8 * 20 + 5, 2)


def test_an_exact_cache_does_not_drift(loaded, tokens):
    model, calls = loaded[0], []

    def exact():
        return transformers.DynamicCache(config=model.config)

    rows = drift(
        model, tokens, exact, exact, prompt=60, segment=20, chunk=64, progress=lambda *done: calls.append(done)
    )
    assert [(row.start, row.stop) for row in rows][-2:] == [(200, 220), (220, 224)]
    assert [row.operation for row in rows] == [*OPERATIONS, *OPERATIONS, OPERATIONS[0]]
    assert calls[-1] == (164, 164)
    for row in rows:
        assert row.kl < 1e-5 and row.top1_agreement == 1.0
        assert row.nll == pytest.approx(row.baseline_nll, abs=1e-4)


@pytest.mark.parametrize("room", [None, 224])
def test_fp8_stays_near_through_all_operations(loaded, tokens, room):
    model = loaded[0]
    make = cache_factory("fp8", model, max_cache_len=room)
    rows = drift(model, tokens, make, cache_factory("bf16", model), prompt=60, segment=20)
    assert all(0 < row.kl < 0.05 for row in rows)
    early, late = (sum(row.kl for row in part) for part in (rows[:4], rows[4:8]))
    assert late < 2 * early


def test_wrong_lengths(loaded, tokens):
    model = loaded[0]
    make = cache_factory("bf16", model)
    with pytest.raises(ValueError, match=r"less than the 224 tokens of a window, .*; got 300 and 512"):
        drift(model, tokens, make, make, prompt=300)


def test_every_copied_page_is_let_go(loaded, tokens):
    """After copies, crops and reorderings, every page in use belongs to a sequence."""
    model, made = loaded[0], []

    def make():
        made.append(cache_factory("fp8", model)())
        return made[-1]

    drift(model, tokens, make, cache_factory("bf16", model), prompt=60, segment=20)
    paged = made[0].paged
    for layer in range(paged.num_layers):
        pages = paged.pages(layer)
        assert paged.num_pages - paged.num_free_pages == len(pages.page_table.unique()) == 3  # they share the first
        assert torch.equal(pages.cache_seqlens, torch.tensor([224, 224], dtype=torch.int32))
