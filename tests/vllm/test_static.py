"""What a layer writes once and keeps: means, static scales, marks. It outlives new weights and sleep."""

import pytest
import torch

pytest.importorskip("vllm")

from fp8attn import UsageError
from fp8attn.formats.page_layout import engine_marks_of
from tests.integrations.engine.models import qwen2
from tests.vllm.layers import GROUP, HEADS, LAYER, D, Step, connected, layer_impl, means_of, prompt

ADDED = ["fp8attn_k_mean", "fp8attn_v_mean", "fp8attn_page_scales"]


def test_new_weights_leave_what_is_static_at_its_address(builder, monkeypatch, file_of_scales):
    """vLLM prepares layers again after it has reloaded weights. CUDA graphs go on with the tensors."""
    given = {"fp8attn": {"scales": file_of_scales, "static_scales": True}}
    made, layer = layer_impl(monkeypatch, given)
    cache = torch.zeros(4, HEADS, 128, 2 * D + 1, dtype=torch.uint8)
    expected = prompt(builder, made, layer, cache)
    before = dict(layer.named_buffers())
    assert list(before) == ADDED and not layer.state_dict()
    for name in ADDED:
        before[name].zero_()  # as if the memory had been discarded
    made.process_weights_after_loading(torch.bfloat16)
    assert {name: x.data_ptr() for name, x in layer.named_buffers()} == {
        name: x.data_ptr() for name, x in before.items()
    }
    assert (
        made.engine_layer.format.stored_k_mean is before[ADDED[0]]
        and made.engine_layer.format.v_mean is before[ADDED[1]]
    )
    assert torch.equal(prompt(builder, made, layer, cache), expected)


def test_what_is_static_outlives_sleep(builder, monkeypatch, file_of_scales):
    """At level 2 vLLM discards weights, and saves and restores `named_buffers`."""
    made, layer = layer_impl(monkeypatch, {"fp8attn": {"scales": file_of_scales}}, sleep=True)
    cache = torch.zeros(4, HEADS, 128, 2 * D + 1, dtype=torch.uint8)
    expected = prompt(builder, made, layer, cache)
    saved = {name: x.clone() for name, x in layer.named_buffers()}
    assert list(saved) == ADDED[:2]
    for x in (*means_of(made), cache):
        x.fill_(0x7F)
    for name, x in layer.named_buffers():
        x.data.copy_(saved[name])
    assert torch.equal(prompt(builder, made, layer, cache), expected)


@pytest.mark.parametrize("late", [False, True])
def test_a_layer_reads_the_pages_of_another(builder, monkeypatch, file_of_scales, late):
    """It has the means of that layer, although the file has none for its own number. vLLM says which layer that is
    before the weights are loaded, or for draft layers of Gemma 4 (MTP) after. It gives such a layer no keys and values.
    """
    options = {"fp8attn": {"scales": file_of_scales}}
    target, beside = layer_impl(monkeypatch, options)
    made, layer = layer_impl(monkeypatch, options, name="model.layers.1.self_attn.attn", reads=None if late else LAYER)
    layer.kv_sharing_target_layer_name = LAYER
    made._config.compilation_config.static_forward_context[LAYER] = beside
    cache = torch.zeros(4, HEADS, 128, 2 * D + 1, dtype=torch.uint8)
    q, k, v = (torch.randn(200, heads, D) + 1 for heads in (GROUP * HEADS, HEADS, HEADS))
    step = builder.build(0, Step([200], [200], [[1, 2]]))
    expected = target.forward(beside, q, k, v, cache, step, q * 0)
    written = cache.clone()
    assert torch.equal(made.forward(layer, q, None, None, cache, step, q * 0), expected)
    assert torch.equal(cache, written) and expected.isfinite().all()
    for mean, same in zip(means_of(made), means_of(target), strict=True):
        assert same.any() and mean is same
    again, _ = layer_impl(monkeypatch, options, name="model.layers.1.self_attn.attn")
    assert not again.engine_layer.has_means  # its own number has none


@pytest.mark.parametrize("fresh", [False, True])
def test_blocks_of_an_engine_with_other_options_are_an_error(builder, monkeypatch, file_of_scales, fresh):
    """Blocks that one engine wrote, in the cache of another, also if they arrive before the other's first step."""
    connector = connected("ExampleConnector")
    made, layer = layer_impl(monkeypatch, connector=connector)
    written = torch.zeros(4, HEADS, 128, 2 * D + 1, dtype=torch.uint8)
    prompt(builder, made, layer, written)
    assert (engine_marks_of(made.engine_layer.pool) == made.engine_layer.mark).all()  # and appends leave it
    for options, ends in (
        ({}, False),
        ({"key_dtype": "e4m3"}, True),
        ({"scales": file_of_scales}, True),
        ({"exact": True}, False),
    ):
        other, layer = layer_impl(monkeypatch, {"fp8attn": options}, connector=connector)
        cache = torch.zeros_like(written)
        if not fresh:
            prompt(builder, other, layer, cache, length=20, table=[3])
        cache[1:3] = written[1:3]
        q, x = torch.randn(1, GROUP * HEADS, D), torch.randn(1, HEADS, D)
        step = builder.build(0, Step([1], [201], [[1, 2]]))
        if ends:
            with pytest.raises(RuntimeError, match=r"a KV connector brought blocks of another format"):
                other.forward(layer, q, x, x, cache, step, q * 0)
        else:
            assert other.forward(layer, q, x, x, cache, step, q * 0).isfinite().all() and step.checked


def test_layers_of_a_draft_model_have_the_mark_of_the_model(monkeypatch, tmp_path):
    """Groups of layers may share memory, and a page has one mark."""
    qwen2(num_attention_heads=8, num_key_value_heads=4, hidden_size=8 * D).save_pretrained(tmp_path)
    given = {"connector": connected("ExampleConnector"), "target": str(tmp_path)}
    target, draft = (
        layer_impl(monkeypatch, checkpoint=x, ranks=2, **given)[0] for x in (tmp_path, "a draft without biases")
    )
    assert (
        target.engine_layer.has_means
        and not draft.engine_layer.has_means
        and target.engine_layer.mark == draft.engine_layer.mark
    )
    assert layer_impl(monkeypatch, connector=given["connector"])[0].engine_layer.mark != target.engine_layer.mark


@pytest.mark.parametrize("head_dim", [D, 2 * D])
def test_marks_need_blocks_of_one_layout(builder, monkeypatch, head_dim):
    """Gemma 4 has layers of two head_dims, whose blocks come from one pool: K and V of one are where the other has its
    marks.
    """
    made, layer = layer_impl(monkeypatch, connector=connected("ExampleConnector"))
    other, beside = layer_impl(monkeypatch, name="model.layers.2.self_attn.attn")
    cache = beside.kv_cache = torch.zeros(4, HEADS, 128, 2 * D + 1, dtype=torch.uint8)
    other.head_size = head_dim
    made._config.compilation_config.static_forward_context["beside"] = beside
    if head_dim == D:
        prompt(builder, made, layer, cache)
    else:
        with pytest.raises(
            UsageError,
            match=r"shares its blocks with model.layers.2.* has another head_dim: leave out --kv-transfer-config",
        ):
            prompt(builder, made, layer, cache)


def test_a_file_of_scales_needs_layers_of_one_head_dim(monkeypatch, file_of_scales):
    made, layer = layer_impl(monkeypatch, {"fp8attn": {"scales": file_of_scales}})
    other, beside = layer_impl(monkeypatch)
    other.head_size = 2 * D
    made._config.compilation_config.static_forward_context["beside"] = beside
    with pytest.raises(
        UsageError, match=r"with the option scales: its layers have head_dim 64 and 128, .* leave it out"
    ):
        made._engine_layer(layer)


def test_without_a_connector_pages_have_no_mark(builder, monkeypatch):
    for connector in (None, connected("OffloadingConnector")):
        made, layer = layer_impl(monkeypatch, connector=connector)
        prompt(builder, made, layer, torch.zeros(4, HEADS, 128, 2 * D + 1, dtype=torch.uint8))
        assert made.engine_layer.mark is None and not engine_marks_of(made.engine_layer.pool).any()
