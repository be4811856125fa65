"""Attention over parts of the keys is combined, in Triton's interpreter."""

import math

import pytest
import torch

pytest.importorskip("triton")


from fp8attn.kernels import combine as combining
from fp8attn.kernels.combine import MAX_SPLITS, combine, num_splits
from tests.support.interpreted import QUIET, dynamo_knows_torch, poisoned  # noqa: F401

pytestmark = QUIET


def test_splits_fill_the_machine():
    assert num_splits(1000, 64, 264) == 1
    assert 16 <= num_splits(8, 64, 264) <= 33
    assert num_splits(8, 1, 264) == 1
    assert num_splits(128, 64, 264) == 2
    assert num_splits(1, 8192, 264) <= MAX_SPLITS


@pytest.mark.triton36
@pytest.mark.parametrize(("splits", "many"), [(3, False), (3, True), (40, False), (40, True)])
def test_parts_come_together(splits, many, monkeypatch):
    monkeypatch.setattr(combining, "MANY", 1 if many else 1 << 20)
    combining._plan.cache_clear()
    batch, tokens, heads, dim = 2, 7, 3, 48  # 42 rows: not a multiple of what a program takes
    parts, lse = torch.randn(splits, batch * tokens * heads, dim), 4 * torch.randn(splits, batch * tokens * heads)
    hidden = torch.rand(lse.shape) < 0.3
    hidden[:, 5] = True  # a row that no part has keys for
    lse[hidden], parts[hidden] = -torch.inf, torch.nan
    mean_score, sinks = torch.randn(lse.shape[1]), torch.randn(heads)
    out, out_lse = torch.empty(batch, heads, tokens, dim).transpose(1, 2), torch.empty(batch, tokens, heads)
    combine(parts, torch.stack([lse, mean_score.expand_as(lse)]), sinks, out, out_lse)
    scores = torch.cat([(lse + mean_score) * math.log(2), sinks.repeat(batch * tokens)[None]]).double()
    weights = torch.softmax(scores, 0)[:-1]
    exact = (weights[:, :, None] * parts.double().nan_to_num()).sum(0).unflatten(0, (batch, tokens, heads))
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=2e-6)  # FP32, in another order
    torch.testing.assert_close(out_lse.double().flatten(), torch.logsumexp(scores, 0), rtol=2e-6, atol=2e-6)
