"""Gemma 4's layers whose keys follow from their values, as latents: vLLM engines on a CPU, and what keeps K and V."""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

pytest.importorskip("vllm")

from vllm.v1.attention.backends.registry import AttentionBackendEnum

from fp8attn.integrations.engine import Options
from fp8attn.integrations.vllm import ON_CPU, k_eq_v
from fp8attn.integrations.vllm.k_eq_v import keys_of
from tests.vllm.engines import engine
from tests.vllm.layers import connected
from tests.vllm.test_blocks import GEMMA4_31B, OPTIONS, flat, save

pytestmark = pytest.mark.skipif(not hasattr(AttentionBackendEnum, "register"), reason="K and V before vLLM 0.32")

MODEL = GEMMA4_31B | {
    "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "num_global_key_value_heads": 2,
}  # fmt: skip


def with_other_norms(folder, new, size):
    """The model, with weights of the keys' norms that differ by channel as those of trained models do, and in size."""
    generator = torch.Generator().manual_seed(round(10 * size))
    tensors = load_file(folder / "model.safetensors")
    for name, weight in tensors.items():
        if name.endswith("k_norm.weight") and len(weight) == 512:
            drawn = torch.randn(2, 512, generator=generator)
            tensors[name] = (size * drawn[0].mul(0.7).exp() * drawn[1].sign()).bfloat16()
    new.mkdir()
    save_file(tensors, new / "model.safetensors", {"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        (new / name).write_text((folder / name).read_text())
    return new


def distance(found, exact):
    return float((flat(found) - flat(exact)).abs().mean())


@pytest.fixture
def served():
    """A layer in its module, of which vLLM knows, and vLLM's configuration."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    from vllm.model_executor.models.gemma4 import Gemma4Attention

    layer, module = nn.Module(), Gemma4Attention.__new__(Gemma4Attention)
    layer.impl, layer._k_scale = SimpleNamespace(head_size=512, softcap=None), torch.ones(1)
    nn.Module.__init__(module)
    module.attn, module.k_norm, module.is_sliding, module.is_kv_shared_layer = layer, nn.Module(), False, False
    module.k_norm.weight = nn.Parameter(torch.linspace(0.1, 0.6, 512))
    module.rotary_emb = SimpleNamespace(rope_angles=64)
    module.config = SimpleNamespace(attention_k_eq_v=True, layer_types=["sliding_attention", "full_attention"])
    get_layerwise_info(module)
    return (
        layer,
        module,
        SimpleNamespace(lora_config=None, kv_transfer_config=None, load_config=SimpleNamespace(load_format="auto")),
    )


def test_weights_may_change_at_any_time(served):
    """Also where nothing tells the layer. What is stored was divided by the number of the turned channels: it stays."""
    layer, module, config = served
    keys = keys_of(layer, Options(), config)
    before = keys.matrix().clone()
    turned = [*range(64), *range(256, 320)]
    others = [i for i in range(512) if i not in turned]
    assert before.shape == (512, 640) and (before[turned, range(512, 640)] == 0.25).all()
    with torch.no_grad():
        module.k_norm.weight.mul_(3)
    after = keys.matrix()
    assert torch.equal(after.diagonal()[others], module.k_norm.weight.data[others]) and after.count_nonzero() == 512
    assert torch.equal(after[:, 512:], before[:, 512:]) and after is keys.buffers["key_matrix"]


CHANGES = {
    "exact": lambda layer, module, config, options: options.update(exact=True),
    "E4M3": lambda layer, module, config, options: options.update(key_dtype="e4m3"),
    "calibrated": lambda layer, module, config, options: options.update(scales="a file"),
    "LoRA": lambda layer, module, config, options: vars(config).update(lora_config=1),
    "marks": lambda layer, module, config, options: vars(config).update(kv_transfer_config=connected("NixlConnector")),
    "another head_dim": lambda layer, module, config, options: vars(layer.impl).update(head_size=256),
    "softcap": lambda layer, module, config, options: vars(layer.impl).update(softcap=30.0),
    "another projection": lambda layer, module, config, options: vars(module.config).update(attention_k_eq_v=False),
    "no windows": lambda layer, module, config, options: vars(module.config).update(layer_types=["full_attention"]),
    "RoPE turns more": lambda layer, module, config, options: vars(module.rotary_emb).update(rope_angles=128),
    "K and V of another layer": lambda layer, module, config, options: setattr(module, "is_kv_shared_layer", True),
    "no weights yet": lambda layer, module, config, options: vars(config.load_config).update(load_format="dummy"),
    "offloaded": lambda layer, module, config, options: setattr(module, "k_norm", module.k_norm.to("meta")),
    "another module": lambda layer, module, config, options: delattr(module, "attn"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_keeps_k_and_v(change, served):
    options = {}
    change(*served, options)
    layer, _, config = served
    assert keys_of(layer, Options(**options), config) is None


def test_what_else_keeps_k_and_v(served, monkeypatch):
    layer, _, config = served
    monkeypatch.setattr(k_eq_v, "unsupported_reason", lambda *given: "this GPU is another" if given[0] else None)
    layer._k_scale = layer._k_scale.to("meta")
    config.model_config = SimpleNamespace(dtype=torch.bfloat16)
    assert keys_of(layer, Options(), config) is None
    layer._k_scale = torch.ones(1)
    assert keys_of(layer, Options(), config) is not None
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert keys_of(layer, Options(), config) is None


def test_engines(tmp_path):
    """Prompts in chunks, from the prefix cache and with drafts; other weights, and sleep. Latents lose less than K and
    V, which `exact` keeps.
    """
    folder, windows, out = save(tmp_path, (1000, 30, 390), **MODEL)
    one, other = (with_other_norms(folder, tmp_path / str(size), size) for size in (0.6, 0.3))
    given = OPTIONS | {"enable_prefix_caching": True, "answer": 8}
    want = [engine(model, windows, out, {ON_CPU: "0"}, **given)["logprobs"] for model in (one, other)]
    given |= {"kv_cache_dtype": "fp8"}
    found, halves = (
        engine(one, windows, out, {ON_CPU: "1"}, reload=str(other), additional_config={"fp8attn": options}, **given)
        for options in ({}, {"exact": True})
    )
    for ours, theirs, exact in zip((found, found["again"]), (halves, halves["again"]), want, strict=True):
        lost, more = (distance(x["logprobs"], exact) for x in (ours, theirs))
        print(f"{lost:.4f} nats, K and V {more:.4f}, the other model {distance(*want):.2f}")
        assert 0 < lost < more < distance(*want) / 4
    assert found["buffers"] == found["again"]["buffers"]
    first, second = found["answers"]
    assert [x["cached"] for x in second] == [768, 0, 384] and [x["cached"] for x in halves["answers"][1]] == [
        768,
        0,
        256,
    ]
    assert [x["tokens"] for x in second] == [x["tokens"] for x in first]
    drafts = {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}}
    drafted = engine(one, windows, out, {ON_CPU: "1"}, sleep=True, **given | drafts)
    assert [x["tokens"] for x in drafted["answers"][0]] == [x["tokens"] for x in first]
    for level in "12":
        assert drafted["awake"][level]["answers"][0] == drafted["answers"][0]
