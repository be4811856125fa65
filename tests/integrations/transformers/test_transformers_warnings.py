"""Slow paths cause a warning or a log message: `FP8Cache` under an attention implementation that dequantizes, and
fallbacks of SDPA.
"""

import logging
import warnings

import pytest
import torch

transformers = pytest.importorskip("transformers")

from fp8attn import scaled_dot_product_attention  # noqa: E402
from fp8attn.integrations.transformers import FP8Cache  # noqa: E402
from tests.support.transformers_models import make, prompt  # noqa: E402


def test_a_cache_that_is_dequantized_at_every_step_warns_once_and_names_the_cure():
    model = make()
    cache = FP8Cache(model)
    model.set_attn_implementation("sdpa")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        model.generate(prompt(), past_key_values=cache, max_new_tokens=4, do_sample=False)
    (warning,) = (str(warning.message) for warning in caught if "dequantizes" in str(warning.message))
    for part in ("'sdpa'", "model.set_attn_implementation('fp8_kv')"):
        assert part in warning


def test_a_cache_sets_its_models_attention_implementation():
    model = make()
    model.set_attn_implementation("sdpa")
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        cache = FP8Cache(model)
        model(prompt(), past_key_values=cache)
    assert model.config._attn_implementation == "fp8_kv"
    assert cache.get_seq_length() == prompt().shape[1]


def test_a_fallback_of_sdpa_is_logged_with_its_reason(caplog):
    x = torch.randn(1, 2, 8, 64)
    with caplog.at_level(logging.DEBUG, logger="fp8attn"):
        scaled_dot_product_attention(x, x, x)
        assert not caplog.records
        scaled_dot_product_attention(x, x, x, attn_mask=torch.ones(8, 8, dtype=torch.bool))
    (record,) = caplog.records
    assert "a mask is given" in record.getMessage() and "[1, 2, 8, 64]" in record.getMessage()
