"""FP8 attention in diffusers' transformers: which blocks and steps run in FP8, the errors, and that the model is not
changed.
"""

from collections import Counter
from itertools import product

import pytest
import torch

from fp8attn import AttentionPolicy
from fp8attn.numerics import relative_error

pytest.importorskip("diffusers")

from diffusers import (
    ChromaTransformer2DModel,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    WanPipeline,
    WanTransformer3DModel,
    WanVACETransformer3DModel,
)
from diffusers.models import attention_dispatch

from fp8attn.integrations.diffusers import fp8_transformer, on_step_end

ERROR = 0.02  # of a transformer's output, whose residual stream carries most of it


def seeded(model):
    """Random weights with which attention changes the output. With the default ones it is near zero."""
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        if p.dim() == 2:
            p.data.normal_(std=1 / p.shape[1] ** 0.5, generator=generator)
    return model.eval()


def wan(blocks=5):
    torch.manual_seed(0)
    return seeded(
        WanTransformer3DModel(
            num_attention_heads=2, attention_head_dim=64, in_channels=4, out_channels=4, text_dim=32, freq_dim=32,
            ffn_dim=64,
            num_layers=blocks, rope_max_seq_len=64,
        )
    )  # fmt: skip


def wan_inputs():
    generator = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(1, 4, 3, 12, 10, generator=generator),  # 3 * 6 * 5 = 90 tokens
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 33, 32, generator=generator),
        "return_dict": False,
    }


def flux():
    torch.manual_seed(0)
    return seeded(
        FluxTransformer2DModel(
            in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=64, num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32, axes_dims_rope=(16, 24, 24),
        )
    )  # fmt: skip


def flux_inputs():
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(64, 3)
    ids[:, 1], ids[:, 2] = torch.arange(64) // 8, torch.arange(64) % 8
    return {
        "hidden_states": torch.randn(1, 64, 16, generator=generator),
        "encoder_hidden_states": torch.randn(1, 21, 32, generator=generator),
        "pooled_projections": torch.randn(1, 32, generator=generator),
        "timestep": torch.tensor([0.5]),
        "img_ids": ids,
        "txt_ids": torch.zeros(21, 3),
        "return_dict": False,
    }


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield


def by_layer(report):
    """{layer: {module: why it is torch's, or None}}"""
    found = {}
    for row in report.rows:
        found.setdefault(row.layer, {})[row.name.rpartition(".")[2]] = row.reason
    return found


def test_wan_self_attention_by_block():
    model, inputs = wan(), wan_inputs()
    plain = model(**inputs)[0]
    keys = model.state_dict().keys()
    with fp8_transformer(model, AttentionPolicy(min_length=64, skip_first=1, skip_last=2)) as report:
        ours = model(**inputs)[0]
        assert model.state_dict().keys() == keys
    assert 0 < relative_error(ours, plain) < ERROR
    inner = {"attn1": None, "attn2": "shorter than 64 tokens"}  # the prompt has 33
    first, last = (dict.fromkeys(inner, f"left out by {name}") for name in ("skip_first", "skip_last"))
    assert by_layer(report) == {0: first, 1: inner, 2: inner, 3: last, 4: last}
    assert {(row.queries, row.keys) for row in report.rows} == {((90, 90), (90, 90)), ((90, 90), (33, 33))}
    assert torch.equal(model(**inputs)[0], plain)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(("made", "called"), list(product([torch.inference_mode, torch.no_grad], repeat=2)))
def test_weights_and_calls_are_of_inference_mode_or_not(made, called):
    with torch.no_grad():
        expected = wan(2)(**wan_inputs())[0]
    with made():
        model, inputs = wan(2), wan_inputs()
    with fp8_transformer(model, AttentionPolicy(min_length=64)) as report:
        with called():
            first = model(**inputs)[0]
        with torch.no_grad():
            again = model(**inputs)[0]
    assert torch.equal(first, again) and 0 < relative_error(first, expected) < ERROR and report.fp8_calls == 4
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], expected)


def test_flux_joint_attention_by_block():
    model, inputs = flux(), flux_inputs()
    plain = model(**inputs)[0]
    with fp8_transformer(model, AttentionPolicy(min_length=1, skip_first=1, skip_last=1)) as report:
        assert 0 < relative_error(model(**inputs)[0], plain) < ERROR
    skipped = {0: "left out by skip_first", 4: "left out by skip_last"}
    assert by_layer(report) == {layer: {"attn": skipped.get(layer)} for layer in range(5)}
    assert (
        report.rows[1].name == "transformer_blocks.1.attn" and report.rows[2].name == "single_transformer_blocks.0.attn"
    )
    assert report.rows[0].keys == (85, 85)  # image and text
    assert torch.equal(model(**inputs)[0], plain)


SIZE = {"attention_head_dim": 64, "num_attention_heads": 2}
OTHERS = {  # a model, inputs, and its blocks in order
    "Chroma": (  # lists of an embedding, without attention, come first
        lambda: ChromaTransformer2DModel(
            in_channels=16, num_layers=1, num_single_layers=2, joint_attention_dim=32, axes_dims_rope=(16, 24, 24),
            approximator_num_channels=64, approximator_hidden_dim=32, approximator_layers=1, **SIZE,
        ),
        lambda: {name: value for name, value in flux_inputs().items() if name != "pooled_projections"},
        ["transformer_blocks.0", "single_transformer_blocks.0", "single_transformer_blocks.1"],
    ),
    "SD3": (
        lambda: SD3Transformer2DModel(
            sample_size=16, in_channels=4, out_channels=4, num_layers=3, joint_attention_dim=32,
            caption_projection_dim=128, pooled_projection_dim=32, pos_embed_max_size=16, **SIZE,
        ),
        lambda: {
            "hidden_states": torch.randn(2, 4, 16, 16), "encoder_hidden_states": torch.randn(2, 21, 32),
            "pooled_projections": torch.randn(2, 32), "timestep": torch.tensor([500, 500]), "return_dict": False,
        },
        ["transformer_blocks.0", "transformer_blocks.1", "transformer_blocks.2"],
    ),
    "VACE": (
        lambda: WanVACETransformer3DModel(
            in_channels=4, out_channels=4, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=2, rope_max_seq_len=64,
            vace_layers=[0], vace_in_channels=8, **SIZE,
        ),
        lambda: wan_inputs() | {
            "control_hidden_states": torch.randn(1, 8, 3, 12, 10), "control_hidden_states_scale": torch.ones(1)
        },
        ["blocks.0", "blocks.1", "vace_blocks.0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_blocks_of_other_models(name):
    torch.manual_seed(0)
    make, make_inputs, blocks = OTHERS[name]
    model, inputs = seeded(make()), make_inputs()
    plain = model(**inputs)[0]
    with fp8_transformer(model, AttentionPolicy(min_length=64, skip_first=1)) as report:
        assert 0 < relative_error(model(**inputs)[0], plain) < ERROR
    found = {row.layer: (row.name.rpartition(".")[0], row.reason) for row in report.rows if "attn2" not in row.name}
    assert found == {i: (block, None if i else "left out by skip_first") for i, block in enumerate(blocks)}
    assert torch.equal(model(**inputs)[0], plain)


def test_blocks_compiled_one_by_one_as_diffusers_does():
    torch._dynamo.reset()
    model, inputs = wan(10), wan_inputs()
    policy = AttentionPolicy(min_length=64, skip_first=2, skip_last=2)
    plain = model(**inputs)[0]
    with fp8_transformer(model, policy):
        expected = model(**inputs)[0]
    model.compile_repeated_blocks(fullgraph=True, backend="eager")
    assert torch.equal(model(**inputs)[0], plain)
    with fp8_transformer(model, policy) as report:
        assert torch.equal(model(**inputs)[0], expected)
    compiled = Counter()
    for row in report.rows:
        compiled[row.reason] += row.compiled
    assert {reason: n for reason, n in compiled.items() if reason is None or "skip" in reason} == {
        "left out by skip_first": 2, None: 1, "left out by skip_last": 2,
    }  # fmt: skip
    assert (
        report.fp8_calls == len([row for row in report.rows if row.reason is None and row.calls]) == 6
    )  # the blocks between
    assert torch.equal(model(**inputs)[0], plain)
    torch._dynamo.reset()


def test_a_pipeline_follows_the_schedule():
    """Flux's pipeline from prompt embeddings to latents, without text encoders or an autoencoder, twice in
    one context.
    """
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(), vae=None, text_encoder=None, tokenizer=None, text_encoder_2=None,
        tokenizer_2=None,
        transformer=flux(),
    )  # fmt: skip
    pipe.set_progress_bar_config(disable=True)
    inputs = flux_inputs()

    def run(**options):
        return pipe(
            prompt_embeds=inputs["encoder_hidden_states"], pooled_prompt_embeds=inputs["pooled_projections"],
            height=128, width=128,
            num_inference_steps=4, output_type="latent", generator=torch.Generator().manual_seed(3), **options,
        ).images  # fmt: skip

    plain = run()
    with fp8_transformer(pipe.transformer, AttentionPolicy(min_length=1, steps=range(1, 3))) as report:
        first = run(callback_on_step_end=on_step_end(report))
        assert report.current_step == 0
        second = run(callback_on_step_end=on_step_end(report))
    assert 0 < relative_error(first, plain) < ERROR and torch.equal(first, second)
    assert [(row.reason, row.calls) for row in report.rows[:1] + report.rows[-1:]] == [
        ("left out by steps", 4),
        (None, 4),
    ]
    assert report.calls == 40 and report.fp8_calls == 20


def test_both_transformers_of_wan_22_follow_one_schedule():
    """The first one runs the noisier steps. Each has its own context and report, and a step is a step of the video."""
    models = {"transformer": wan(1), "transformer_2": wan(1)}
    pipe = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), boundary_ratio=0.5, **models)
    pipe.set_progress_bar_config(disable=True)
    call = {
        "prompt_embeds": torch.randn(1, 33, 32), "guidance_scale": 1.0, "output_type": "latent", "height": 128,
        "width": 128, "num_frames": 9, "num_inference_steps": 6,
    }  # fmt: skip
    policy = AttentionPolicy(min_length=64, steps=range(1, 5))
    with fp8_transformer(pipe.transformer, policy) as first, fp8_transformer(pipe.transformer_2, policy) as second:
        for _ in range(2):
            pipe(callback_on_step_end=on_step_end(first, second), **call)
    assert [(report.fp8_calls, report.calls, report.current_step) for report in (first, second)] == [(4, 12, 0)] * 2


def test_what_is_refused(monkeypatch):
    model = wan(1)
    pipe = WanPipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), transformer=model)
    for wrong in (pipe, torch.nn.Linear(2, 2), None):
        message = rf"pipe\.transformer\); got {type(wrong).__name__}\. .*fp8_attention\(policy, module\)"
        with pytest.raises(ValueError, match=message), fp8_transformer(wrong):
            pass
    with pytest.raises(TypeError, match="must be an AttentionPolicy"), fp8_transformer(model, 4096):
        pass
    for wrong, got in (((), "none"), ((pipe, 0, 999, {}), "WanPipeline, int, int, dict"), ((None,), "NoneType")):
        with pytest.raises(TypeError, match=rf"callback_on_step_end=on_step_end\(report\); got {got}"):
            on_step_end(*wrong)
    monkeypatch.setattr(
        model.blocks[0].attn1.processor, "_attention_backend", attention_dispatch.AttentionBackendName.FLASH
    )
    with pytest.raises(ValueError, match="backend 'flash' does not call"), fp8_transformer(model):
        pass
    monkeypatch.undo()
    with attention_dispatch.attention_backend("native"), fp8_transformer(model):
        pass
    config = type("ParallelConfig", (), {"context_parallel_config": object(), "tensor_parallel_config": None})()
    monkeypatch.setattr(model, "_parallel_config", config)
    with pytest.raises(ValueError, match="context-parallel"), fp8_transformer(model):
        pass
