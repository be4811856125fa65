import pytest
import torch

from fp8attn import KVScales, LayerScales
from tests.support.answers import PROMPTS
from tests.vllm.engines import answers


@pytest.fixture
def builder(monkeypatch):
    """A builder of steps, without vLLM's configuration."""
    from fp8attn.integrations.vllm import metadata as metadata_module

    monkeypatch.setattr(metadata_module.AttentionMetadataBuilder, "__init__", lambda self, *args: None)
    made = object.__new__(metadata_module.FP8AttentionMetadataBuilder)
    made.reorder_batch_threshold = 1
    return made


@pytest.fixture
def file_of_scales(tmp_path):
    """Means and scales of layer 3."""
    k_mean, v_mean = torch.randn(2, 2, 64, generator=torch.Generator().manual_seed(1)).unbind()
    layers = {3: LayerScales(torch.tensor([4 / 127, 5 / 127]), torch.full((2,), 2.0**-4), k_mean, v_mean)}
    KVScales(layers, num_layers=4, num_kv_heads=2, head_dim=64).save(tmp_path / "scales.safetensors")
    return str(tmp_path / "scales.safetensors")


@pytest.fixture(scope="session")
def plain():
    """An engine's greedy answers to 20 prompts of 20 to 900 tokens."""
    found = answers("plain", again=True)
    assert found["cached"] == 0 and len(found["answers"]) == PROMPTS
    return found
