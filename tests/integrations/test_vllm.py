"""The parts of the vLLM plugin that need no vLLM. `tests/vllm` has the others; `make test-vllm` runs them."""

import logging
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8attn import UsageError
from fp8attn.integrations import vllm as plugin
from fp8attn.integrations.engine import Options
from fp8attn.integrations.vllm import NEWEST, OLDEST, RefusedBackend, register, unsupported_release
from fp8attn.integrations.vllm import _show_messages as show_messages
from fp8attn.integrations.vllm.connectors import exchanges_blocks, unsupported_connector
from fp8attn.integrations.vllm.options import config_options, layer_number

ROOT = Path(__file__).parents[2]


def test_the_entry_point_names_the_function():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["vllm.general_plugins"]
    assert points == {"fp8attn": f"{register.__module__}:{register.__name__}"}


def test_what_pip_installs_is_what_is_supported():
    (wanted,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]["vllm"]
    assert wanted == f"vllm>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}"


@pytest.mark.parametrize("version", ["0.28.0", "0.29.1", "0.32.0+cpu", "0.32.0.post1", "0.33.0+cu130"])
def test_supported_releases(version):
    assert unsupported_release(version) is None


@pytest.mark.parametrize("version", ["0.27.1", "0.34.0", "0.33.1rc1.dev12+g4ba787ec9", "0.3.2", "1.0", "1.30.0", "dev"])
def test_another_release_is_refused_by_name(version, monkeypatch):
    assert f"vLLM 0.28 to 0.33, and this is vLLM {version}" in unsupported_release(version)
    monkeypatch.setattr(plugin, "vllm_version", lambda: version)
    assert RefusedBackend.validate_configuration(head_size=128, dtype=torch.bfloat16) == [unsupported_release(version)]


def test_messages_of_the_engines_room_are_vllms(caplog, monkeypatch):
    """At vLLM's level, whenever vLLM sets it."""
    ours = logging.getLogger("fp8attn.integrations.engine")
    for name in ("handlers", "propagate", "level"):
        monkeypatch.setattr(ours, name, getattr(ours, name))
    show_messages()
    show_messages()
    for level, shown in ((logging.INFO, ["a warning", "an info"]), (logging.WARNING, ["a warning"])):
        caplog.clear()
        with caplog.at_level(level, "vllm"):
            logging.getLogger("fp8attn.integrations.engine.warm").warning("a warning")
            logging.getLogger("fp8attn.integrations.engine.warm").info("an info")
        assert caplog.messages == shown


def test_options_are_in_a_section_of_their_own():
    assert config_options({}) == config_options({"other": 1}) == config_options(None) == Options()
    assert config_options({"fp8attn": {"key_dtype": "e4m3"}}) == Options(key_dtype="e4m3")
    with pytest.raises(UsageError, match=r"additional_config\['fp8attn'\] has exact 'false'; it must be true or false"):
        config_options({"fp8attn": {"exact": "false"}})
    for name in ("fp8_attn", "FP8-Attention"):
        with pytest.raises(
            UsageError, match=f"additional_config has '{name}': the options of fp8attn are under 'fp8attn'"
        ):
            config_options({name: {"exact": True}})


def test_the_number_of_a_layer():
    assert layer_number("model.layers.13.self_attn.attn") == 13 and layer_number("draft") is None


def configured(name=None, **own):
    given = SimpleNamespace(kv_connector=name, kv_connector_extra_config=own)
    return SimpleNamespace(kv_transfer_config=None if name is None else given)


def test_kv_connectors():
    """LMCache's own connectors would cut pages. What stays in the own CPU's memory needs no mark."""
    multi = {"connectors": [{"kv_connector": "OffloadingConnector"}, {"kv_connector": "LMCacheConnectorV1"}]}
    for config in (configured("LMCacheConnectorV1"), configured("MultiConnector", **multi)):
        assert "LMCacheConnectorV1 moves tokens" in unsupported_connector(
            config
        ) and "LMCachePagesConnector" in unsupported_connector(config)
    assert "LMCacheMPConnector moves 2 * head_dim + 1 bytes" in unsupported_connector(configured("LMCacheMPConnector"))
    for config, exchanged in (
        (configured(), False), (configured("NixlConnector"), True), (configured("LMCachePagesConnector"), True),
        (configured("OffloadingConnector", cpu_bytes_to_use=1), False),
        (configured("OffloadingConnector", spec_name="TieringOffloadingSpec"), True),
        (configured("SimpleCPUOffloadConnector"), False), (configured("MultiConnector",
        connectors=multi["connectors"][:1]), False),
    ):  # fmt: skip
        assert unsupported_connector(config) is None and exchanges_blocks(config) == exchanged
