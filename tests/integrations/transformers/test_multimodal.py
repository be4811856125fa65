"""Vision-language models: the cache is of the text model, and so are the RoPE and the biases that it reads."""

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from fp8attn import UsageError
from fp8attn.integrations.transformers import FP8Cache
from fp8attn.integrations.transformers.biases import layer_biases
from fp8attn.integrations.transformers.decoder import decoder_modules
from fp8attn.numerics import relative_error
from tests.support.multimodal_models import FAMILIES, HEAD_DIM, make
from tests.support.transformers_models import one_thread, prompt  # noqa: F401

IMAGE = 12  # tokens: 3 by 4 patches


def positions(length):
    """Positions [3, 2, length] of text with an image in it: its tokens have one time, and the heights and widths of
    their patches.
    """
    begin, end = 40, 40 + IMAGE
    each = torch.arange(length).repeat(3, 1)
    patch = torch.arange(IMAGE)
    each[:, begin:end] = begin + torch.stack([torch.zeros_like(patch), patch // 4, patch % 4])
    each[:, end:] = torch.arange(length - end) + begin + 4
    return each[:, None].expand(-1, 2, -1)


@torch.no_grad()
def logits(model, cache, ids, at):
    parts = [slice(0, 140), slice(140, 149), slice(149, 150)]
    return torch.cat(
        [
            model(ids[:, part], position_ids=None if at is None else at[..., part], past_key_values=cache).logits
            for part in parts
        ],
        1,
    )


@pytest.mark.parametrize("vision_head_dim", [80, HEAD_DIM])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_on_transformers_own_cache(family, vision_head_dim):
    """With biases in K, whatever the head_dim of the vision model is, for text and, where positions have three parts,
    for an image.
    """
    model, ids = make(family, vision_head_dim), prompt()
    for at in (None,) if family == "video_llama_3" else (None, positions(ids.shape[1])):
        model.set_attn_implementation("eager")
        exact = logits(model, DynamicCache(config=model.config), ids, at)
        for length in (None, 160):
            error = relative_error(logits(model, FP8Cache(model, max_cache_len=length), ids, at), exact)
            assert 1e-3 < error < 0.04, error  # 0.011 of Qwen, 0.029 of GLM: what 8 bits cost random weights


@pytest.mark.parametrize("vision_head_dim", [80, HEAD_DIM])
@pytest.mark.parametrize("family", FAMILIES)
def test_biases_are_those_of_the_text_model_alone(family, vision_head_dim):
    model = make(family, vision_head_dim)
    (inner,) = [m for _, m in decoder_modules(model) if isinstance(m, PreTrainedModel)]
    found, alone = layer_biases(model), layer_biases(inner)
    assert found.keys() == alone.keys() == {0, 1, 2}
    for index, biases in found.items():
        assert not biases.unread and biases.k_mean is not None
        torch.testing.assert_close(biases.k_mean, alone[index].k_mean, rtol=0, atol=0)
        assert (biases.k_offset, biases.k_step) == (alone[index].k_offset, alone[index].k_step)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl"])
def test_a_mean_is_that_of_the_keys_at_positions_of_text(family):
    """The mean of K's bias after RoPE, written out here: pairs are halves of the head, with angles
    `position * theta^(-pair / 64)`.
    """
    model = make(family, HEAD_DIM)  # where a vision model's RoPE would fit, too
    bias = model.model.language_model.layers[0].self_attn.k_proj.bias.detach().double()
    turn = torch.arange(2048).double()[:, None] * 1e6 ** (-torch.arange(64).double() / 64)
    x, y = bias[:64], bias[64:]
    mean = torch.cat([x * turn.cos() - y * turn.sin(), y * turn.cos() + x * turn.sin()], 1).mean(0)
    (found,) = layer_biases(model)[0].k_mean
    kept = found != 0
    assert kept.sum() == 16
    torch.testing.assert_close(
        found[kept].double(), mean[kept], rtol=1e-3, atol=1e-3
    )  # it takes 2,048 positions in float32, as here


def test_layers_that_lose_are_chosen_by_the_text_model_s_rope():
    """Where all of K's pairs have biases, those that rotate fast make 8 bits too coarse. The RoPE of a vision model of
    the same head_dim
    would hide it: it rotates other channels, and more slowly."""
    model = make("qwen2_5_vl", HEAD_DIM, slow=64)
    (inner,) = [m for _, m in decoder_modules(model) if isinstance(m, PreTrainedModel)]
    steps = [biases.k_step for biases in layer_biases(model).values()]
    assert min(steps) > 4 and steps == [biases.k_step for biases in layer_biases(inner).values()]


def test_several_ropes_are_refused_and_a_text_model_that_is_not_found():
    model = make("qwen2_vl")
    text = model.model.language_model
    other = type(text.rotary_emb)(text.config)
    other.inv_freq = other.inv_freq * 2
    text.other_rotary_emb = other
    with pytest.raises(
        UsageError,
        match=r"model\.language_model\.rotary_emb, model\.language_model\.other_rotary_emb of Qwen2VL.* different",
    ):
        FP8Cache(model)
    other.inv_freq = text.rotary_emb.inv_freq.clone()
    assert FP8Cache(model).fp8_layers == (0, 1, 2)
    text.config = type(text.config)(**text.config.to_dict())
    with pytest.raises(
        UsageError, match=r"no module of Qwen2VL.* has the config of its text model .*FP8Cache\(model\.language_model\)"
    ):
        FP8Cache(model)
