"""Fragile layers are planted in a small model, and found."""

import json
import math
from dataclasses import replace

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fp8attn import UsageError, plan  # noqa: E402
from fp8attn.evaluation.caches import cache_factory  # noqa: E402
from fp8attn.evaluation.sensitivity import Sensitivity, choose, divergence, sensitivity, vllm_arguments  # noqa: E402
from fp8attn.integrations.transformers import FP8Cache, shape_of  # noqa: E402
from tests.support.transformers_models import VOCABULARY, make, one_thread  # noqa: E402, F401

LAYERS, FRAGILE = 6, (1, 4)
WINDOWS = torch.randint(3, VOCABULARY, (2, 129), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def plant(model, k_layer, v_layer):
    """Two layers that 8 bits hurt, without a bias that would betray them, and with the same answers in exact arithmetic.

    - In `k_layer` one pair of K's channels, which RoPE rotates into each other, is 2^9 times as large, and Q's pair as small. The scale of a
      page then is for this pair, and the rounding error of all other channels is as large as they are.
    - In `v_layer` every two channels of V have a large common part, which the output projection subtracts: V's error is relative to it.
    """
    attention = model.model.layers[k_layer].self_attn
    for projection, factor in ((attention.k_proj, 2.0**9), (attention.q_proj, 2.0**-9)):
        projection.weight.view(-1, 2, 32, projection.in_features)[:, :, 5] *= factor
    attention = model.model.layers[v_layer].self_attn
    v, o = attention.v_proj.weight, attention.o_proj.weight
    o[:, 1::2] = -o[:, 0::2]
    common = torch.randn(len(v) // 2, v.shape[1], generator=torch.Generator().manual_seed(2)) * 30 * v.std()
    v[0::2] += common
    v[1::2] += common


@pytest.fixture(scope="module")
def planted():
    model = make(num_hidden_layers=LAYERS)
    plant(model, *FRAGILE)
    return model


@pytest.fixture(scope="module")
def report(planted):
    return sensitivity(planted, WINDOWS, chunk=64)


def test_two_planted_layers_are_found(planted, report):
    for row in report.layers:
        print(row)
    print(report)
    assert {*report.ranking[:2]} == {*FRAGILE}
