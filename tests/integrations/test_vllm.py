"""The parts of the vLLM plugin that need no vLLM. `tests/vllm` has the others; `make test-vllm` runs them."""

import tomllib
from pathlib import Path

import pytest
import torch

from fp8attn import KVScales, LayerScales, UsageError
from fp8attn.integrations.vllm import RELEASES, refused, register, unsupported_release
from fp8attn.integrations.vllm.options import Options
from fp8attn.rotation import rotate

ROOT = Path(__file__).parents[2]


def test_the_entry_point_names_the_function():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"fp8attn": f"{register.__module__}:{register.__name__}"}


def test_what_pip_installs_is_what_is_supported():
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    left_out = {f"0.{minor}" for minor in range(26, 33) if f"!=0.{minor}.*" in wanted}
    assert {f"0.{minor}" for minor in range(26, 33)} - left_out == set(RELEASES)
    assert ">=0.26" in wanted and "<0.33" in wanted


@pytest.mark.parametrize("version", ["0.26.0", "0.26.1", "0.32.0+cpu", "0.32.0.post1"])
def test_supported_releases(version):
    assert unsupported_release(version) is None


@pytest.mark.parametrize("version", ["0.25.1", "0.27.0", "0.3.2", "0.33.0", "1.0"])
def test_another_release_is_refused_by_name(version, monkeypatch):
    assert f"this is vLLM {version}" in unsupported_release(version) and "0.26.* and 0.32.*" in unsupported_release(version)
    monkeypatch.setattr(refused, "vllm_version", lambda: version)
    assert refused.RefusedBackend.validate_configuration(head_size=128, dtype=torch.bfloat16) == [unsupported_release(version)]


def test_options():
    assert Options.of({}) == Options.of({"other": 1}) == Options(None, "int8")
    assert Options.of({"fp8attn": {"key_dtype": "e4m3"}}).key_dtype == "e4m3"
    with pytest.raises(UsageError, match=r"has keys, skale; the options are scales, key_dtype"):
        Options.of({"fp8attn": {"skale": "x", "keys": "int8"}})
    with pytest.raises(UsageError, match=r"key_dtype must be one of"):
        Options.of({"fp8attn": {"key_dtype": "fp16"}})


def test_means_of_the_heads_of_a_rank(tmp_path):
    """Only the means are used. A layer that was not calibrated, and a mean that is zero, have none."""
    ones, mean = torch.ones(4), torch.arange(4 * 64).view(4, 64).float()
    layers = {i: LayerScales(ones, ones, mean + 100 * i, torch.zeros(4, 64)) for i in (0, 2)}
    KVScales(layers, num_layers=3, num_kv_heads=4, head_dim=64).save(tmp_path / "scales.safetensors")
    shape = {"num_layers": 3, "num_kv_heads": 4, "head_dim": 64}
    options = Options(str(tmp_path / "scales.safetensors"))
    k, v = options.means("model.layers.2.self_attn.attn", slice(2, 4), **shape)
    assert torch.equal(k, rotate(mean[2:] + 200)) and v is None
    assert options.means("model.layers.1.self_attn.attn", slice(0, 4), **shape) == (None, None)
    with pytest.raises(UsageError, match=r"num_layers is 3 in the scales and 5 in the model"):
        options.means("model.layers.2.self_attn.attn", slice(0, 4), **(shape | {"num_layers": 5}))
    with pytest.raises(UsageError, match=r"key_dtype='int8'"):
        Options(options.scales, "e4m3").means("model.layers.2.self_attn.attn", slice(0, 4), **shape)
    with pytest.raises(UsageError, match=r"no such file"):
        Options(str(tmp_path / "none")).means("model.layers.2.self_attn.attn", slice(0, 4), **shape)
    assert Options().means("model.layers.2.self_attn.attn", slice(0, 4), **shape) == (None, None)
