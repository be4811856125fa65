"""The parts of the plugin that need no SGLang. `make test` runs them, too; the others of this folder need
`make test-sglang`.
"""

import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import fp8attn
from fp8attn import UsageError
from fp8attn.integrations.engine import Options
from fp8attn_sglang import RELEASE, register, unsupported_release
from fp8attn_sglang.options import VARIABLE, environment_options
from fp8attn_sglang.supported import (
    _OPTIONS,
    is_chosen,
    unsupported_layer,
    unsupported_model,
    unsupported_options,
)

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "plugins/sglang/pyproject.toml").read_text())["project"]


def test_the_entry_point_names_the_function():
    points = PROJECT["entry-points"]["sglang.srt.plugins"]
    assert points == {"fp8attn": f"{register.__module__}:{register.__name__}"}


def test_what_pip_installs_is_what_is_supported():
    assert PROJECT["version"] == fp8attn.__version__
    assert PROJECT["dependencies"] == [f"fp8attn[hf]=={fp8attn.__version__}", f"sglang=={RELEASE}"]
    assert f"sglang=={RELEASE}" in (ROOT / "Makefile").read_text()


@pytest.mark.parametrize(("version", "supported"), [("0.5.23", True), ("0.5.23.post1", True), ("0.5.23+cu130", True),
("0.5.24", False),
                                                    ("0.5.22", False), ("0.5.230", False), ("0.5.23rc1",
                                                    False)])  # fmt: skip
def test_releases(version, supported):
    reason = unsupported_release(version)
    assert reason is None if supported else f"works in SGLang 0.5.23, and this is SGLang {version}" in reason


def test_options_are_in_an_environment_variable(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    assert environment_options() == Options()
    monkeypatch.setenv(VARIABLE, '{"key_dtype": "e4m3"}')
    assert environment_options() == Options(key_dtype="e4m3")
    for text, reason in (("key_dtype=e4m3", "must be a JSON object of options; got 'key_dtype=e4m3'"), ("[]",
    "must be a JSON object"),
                         ('{"exact": 1}', "has exact 1; it must be true or false")):  # fmt: skip
        monkeypatch.setenv(VARIABLE, text)
        with pytest.raises(UsageError, match=f"the environment variable {VARIABLE} {reason}"):
            environment_options()


def given(**options):
    plain = {name: supported[0] for name, supported, _ in _OPTIONS}
    names = {"attention_backend": "fp8attn", "prefill_attention_backend": None, "decode_attention_backend": None}
    return SimpleNamespace(**(plain | names | {"page_size": 128, "kv_cache_dtype": "auto"} | options))


def test_options_of_sglang():
    assert unsupported_options(given()) is None
    assert unsupported_options(given(prefill_attention_backend="fp8attn")) is None
    for options, reason in (
        ({"page_size": 64}, "SGLang's would have 64: leave out --page-size, or pass 128"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "--kv-cache-dtype fp8_e4m3 is not used"),
        ({"decode_attention_backend": "triton"}, "prompts and decodes read the same pages"),
        (
            {"attention_backend": "triton", "prefill_attention_backend": "fp8attn"},
            "prompts and decodes read the same pages",
        ),
        (
            {"speculative_algorithm": "EAGLE"},
            "--speculative-algorithm is 'EAGLE'; a verified draft moves tokens inside pages",
        ),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap is True; fp8attn was not run with it"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode is 'prefill'; it moves tokens of K and V"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache is True; it moves tokens"),
        ({"pp_size": 2}, "--pp-size is 2; it divides a sequence's pages, or the layers, over GPUs"),
    ):
        assert reason in unsupported_options(given(**options)), options


def test_only_where_the_backend_is_named():
    assert not is_chosen(given(attention_backend="triton")) and is_chosen(given())
    assert is_chosen(given(attention_backend="triton", decode_attention_backend="fp8attn"))


def test_models():
    def reason(has_states=False, **attributes):
        plain = {
            "attention_arch": SimpleNamespace(name="MHA"), "is_encoder_decoder": False, "dtype": torch.bfloat16,
            "head_dim": 128,
            "v_head_dim": 128, "is_hybrid_swa": False, "attention_chunk_size": None,
        }  # fmt: skip
        return unsupported_model(SimpleNamespace(**(plain | attributes)), has_states)

    assert reason() is None
    assert "multi-head latent attention" in reason(attention_arch=SimpleNamespace(name="MLA"))
    assert "Mamba or linear attention" in reason(has_states=True)
    assert "has an encoder" in reason(is_encoder_decoder=True)
    assert "pass --dtype bfloat16" in reason(dtype=torch.float32)
    assert "there are no pages k128.int8-v64.e4m3: K and V must have one head_dim" in reason(v_head_dim=64)
    assert "head_dim must be one of (64, 80, 96, 128, 192, 256, 512); got 100" in reason(head_dim=100, v_head_dim=100)
    assert "pass --disable-hybrid-swa-memory" in reason(is_hybrid_swa=True)
    assert "in chunks of 8192 tokens" in reason(attention_chunk_size=8192)


def test_layers():
    def reason(**attributes):
        plain = {
            "layer_id": 3, "attn_type": SimpleNamespace(value="decoder"), "is_cross_attention": False, "head_dim": 128,
            "v_head_dim": 128,
            "logit_cap": 0.0, "logit_capping_method": "tanh", "pos_encoding_mode": "NONE", "xai_temperature_len": -1,
            "use_irope": False,
        }  # fmt: skip
        return unsupported_layer(SimpleNamespace(**(plain | attributes)))

    assert reason() is None and reason(logit_cap=50.0) is None
    assert "layer 3 is not that of a decoder" in reason(attn_type=SimpleNamespace(value="encoder_only"))
    assert "layer 3 is not that of a decoder" in reason(is_cross_attention=True)
    assert "layer 3: there are no pages k128.int8-v64.e4m3: K and V must" in reason(v_head_dim=64)
    assert "a logit cap of another form" in reason(logit_cap=30.0, logit_capping_method="sigmoid")
    for has in ({"pos_encoding_mode": "ALIBI"}, {"xai_temperature_len": 1024}, {"use_irope": True}):
        assert "which fp8attn does not support" in reason(**has)
