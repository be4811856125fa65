"""FP8 attention in transformers models without a cache."""

import torch

from fp8attn.mode import AttentionPolicy, fp8_attention
from fp8attn.numerics import relative_error
from tests.mode.nets import ANY, FP8_ERROR, ran


def sdpa_model(cls, config):
    torch.manual_seed(0)
    model = cls(config).eval()
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            p.data.normal_(std=0.9 / p.shape[-1] ** 0.5 if "embed" not in name else 1.0)
    model.set_attn_implementation("sdpa")
    return model


def tokens(batch, length, seed=0):
    return torch.randint(3, 89, (batch, length), generator=torch.Generator().manual_seed(seed))


def test_bert_padded_is_exact_and_unpadded_in_fp8():
    from transformers import BertConfig, BertModel

    model = sdpa_model(
        BertModel,
        BertConfig(vocab_size=89, hidden_size=128, num_hidden_layers=3, num_attention_heads=2, intermediate_size=128),
    )
    ids = tokens(2, 60)
    mask = torch.ones_like(ids)
    mask[0, 45:] = 0
    padded, full = model(ids, attention_mask=mask)[0], model(ids)[0]
    with fp8_attention(ANY, model) as report:
        assert torch.equal(model(ids, attention_mask=mask)[0], padded)
        assert report.fp8_calls == 0 and report.calls == 3
        assert 0 < relative_error(model(ids)[0], full) < 2 * FP8_ERROR
    assert report.fp8_calls == 3
    assert [row.layer for row in report.rows] == [0, 1, 2] * 2


def test_encoder_decoder_with_cross_attention():
    from transformers import BartConfig, BartModel

    model = sdpa_model(
        BartModel,
        BartConfig(
            vocab_size=89, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=128, decoder_ffn_dim=128, max_position_embeddings=128,
        ),
    )  # fmt: skip
    ids, targets = tokens(2, 70), tokens(2, 33, 1)
    expected = model(ids, decoder_input_ids=targets, use_cache=False)[0]
    with fp8_attention(ANY, model) as report:
        assert 0 < relative_error(model(ids, decoder_input_ids=targets, use_cache=False)[0], expected) < 2 * FP8_ERROR
    assert report.fp8_calls == report.calls == 6
    assert [(row.name.rpartition(".")[2], row.layer, row.queries, row.keys) for row in report.rows] == [
        ("self_attn", 0, (70, 70), (70, 70)), ("self_attn", 1, (70, 70), (70, 70)),
        ("self_attn", 2, (33, 33), (33, 33)), ("encoder_attn", 2, (33, 33), (70, 70)),
        ("self_attn", 3, (33, 33), (33, 33)), ("encoder_attn", 3, (33, 33), (70, 70)),
    ]  # fmt: skip
    only_self = AttentionPolicy(min_length=1, skip=("*.encoder_attn",))
    with fp8_attention(only_self, model) as report:
        model(ids, decoder_input_ids=targets, use_cache=False)
    assert report.fp8_calls == 4


def test_bidirectional_vision_model():
    from transformers import ViTConfig, ViTModel

    model = sdpa_model(
        ViTModel,
        ViTConfig(
            hidden_size=128,
            num_hidden_layers=3,
            num_attention_heads=2,
            intermediate_size=128,
            image_size=32,
            patch_size=4,
            num_channels=3,
        ),
    )
    pixels = torch.randn(2, 3, 32, 32)
    expected = model(pixels)[0]
    with fp8_attention(AttentionPolicy(min_length=1, skip_first=1), model) as report:
        assert 0 < relative_error(model(pixels)[0], expected) < 2 * FP8_ERROR
    assert ran(report) == {"fp8": [1, 2], "torch": {0: "left out by skip_first"}}
    assert report.rows[0].keys == (65, 65)


def small_llama(layers, heads, kv_heads):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=89,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=64,
    )
    return sdpa_model(LlamaForCausalLM, config)


def test_causal_model_without_a_cache():
    model = small_llama(3, 4, 2)
    ids = tokens(2, 90)
    expected = model(ids, use_cache=False).logits
    left_padded = torch.ones_like(ids)
    left_padded[1, :20] = 0
    exact = model(ids, attention_mask=left_padded, use_cache=False).logits
    with fp8_attention(ANY, model) as report:
        assert 0 < relative_error(model(ids, use_cache=False).logits, expected) < 3 * FP8_ERROR
        assert report.fp8_calls == 3
        assert torch.equal(model(ids, attention_mask=left_padded, use_cache=False).logits, exact)
    assert report.fp8_calls == 3 and report.calls == 6
    assert [row.layer for row in report.rows[:3]] == [0, 1, 2]


def test_a_transformers_model_is_compiled_by_its_layers():
    """Traced as a whole it makes a mask, which stays exact; its layers are given none."""
    torch._dynamo.reset()
    model, ids = small_llama(4, 2, 1), tokens(2, 90)
    policy = AttentionPolicy(min_length=1, skip_first=1)
    plain = model(ids, use_cache=False).logits
    with fp8_attention(policy, model):
        expected = model(ids, use_cache=False).logits
    whole = torch.compile(model, backend="eager")
    with fp8_attention(policy, model) as report:
        out = whole(ids, use_cache=False).logits
    if report.rows[-1].reason is not None:
        assert "a mask is given" in report.rows[-1].reason
        torch.testing.assert_close(out, plain, atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(out, expected)
    for layer in model.model.layers:
        layer.compile(fullgraph=True, backend="eager")
    with fp8_attention(policy, model) as report:
        torch.testing.assert_close(model(ids, use_cache=False).logits, expected)
    assert [(row.reason, row.compiled) for row in report.rows if row.compiled] == [
        ("left out by skip_first", 1),
        (None, 1),
    ]
    assert {row.name: row.calls for row in report.rows if row.calls} == {f"model.layers.{i}": 1 for i in (1, 2, 3)}
    torch._dynamo.reset()
