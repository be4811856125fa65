"""The node of ComfyUI, called as ComfyUI calls it: under `torch.inference_mode`.
ComfyUI itself is on no package index.
"""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch

from fp8attn import AttentionPolicy
from fp8attn.numerics import relative_error


def load_node():
    """ComfyUI imports a node by its path."""
    path = Path(__file__).parents[2] / "examples" / "comfyui" / "fp8attn_node.py"
    spec = importlib.util.spec_from_file_location("node", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


node = load_node()
KEY, Override, fp8_model = node.KEY, node.Override, node.fp8_model

B, S, HEADS, D = 2, 130, 4, 64
EVERY = AttentionPolicy(min_length=0)


def heads_first(x, count):
    return x.unflatten(-1, (count, -1)).transpose(1, 2)


def own(q, k, v, heads, mask=None, attn_precision=None, skip_reshape=False, skip_output_reshape=False, **kwargs):
    """ComfyUI's function: attention in 16 bits, with its signature."""
    own.calls.append(kwargs)
    if not skip_reshape:
        q, k, v = heads_first(q, heads), *(heads_first(x, x.shape[-1] * heads // q.shape[-1]) for x in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, mask, scale=kwargs.get("scale"), enable_gqa=kwargs.get("enable_gqa", False)
    )
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


@pytest.fixture(autouse=True)
def inference():
    """A test runs as a node does."""
    own.calls = []
    with torch.inference_mode():
        yield


def override_of(model):
    return model.model_options["transformer_options"][KEY]


def attention(*args, **kwargs):
    """What a model of ComfyUI calls: the override, if the options of the model have one."""
    options = kwargs.get("transformer_options") or {}
    kwargs["_inside_attn_wrapper"] = True
    return options[KEY](own, *args, **kwargs) if KEY in options else own(*args, **kwargs)


class Model:
    """The part of ComfyUI's ModelPatcher that is used."""

    def __init__(self, options):
        self.model_options = options

    def clone(self):
        return Model(copy.deepcopy(self.model_options))


def tensors(kv_heads=HEADS, reshaped=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(B, S, n * D, generator=generator) for n in (HEADS, kv_heads, kv_heads))
    return tuple(heads_first(x, x.shape[-1] // D) for x in (q, k, v)) if reshaped else (q, k, v)


@pytest.mark.parametrize("reshaped", [False, True])
@pytest.mark.parametrize("reshape_output", [False, True])
@pytest.mark.parametrize("kv_heads", [HEADS, 2])
def test_both_layouts_are_right(reshaped, reshape_output, kv_heads):
    given = {
        "skip_reshape": reshaped,
        "skip_output_reshape": not reshape_output,
        "scale": 0.2,
        "enable_gqa": kv_heads < HEADS,
    }
    args = *tensors(kv_heads, reshaped), HEADS
    exact = own(*args, **given)
    out = attention(*args, **given, transformer_options={KEY: Override(EVERY)})
    assert out.shape == exact.shape == ((B, S, HEADS * D) if reshape_output else (B, HEADS, S, D))
    assert 1e-3 < relative_error(out, exact) < 0.06 and len(own.calls) == 1


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"mask": torch.ones(S, S, dtype=torch.bool).tril()}, "a mask is given"),
        ({"attn_precision": torch.float32}, "float32"),
        ({"low_precision_attention": False}, "low_precision_attention=False"),
        ({"scale": -1.0}, "the scale is not positive"),
    ],
)
def test_what_fp8_cannot_do_is_comfyuis(given, reason):
    override = Override(EVERY)
    out = attention(*tensors(), HEADS, **given, transformer_options={KEY: override})
    assert torch.equal(out, own(*tensors(), HEADS, **given))
    (row,) = override.report.rows
    assert reason in row.reason and override.report.fp8_calls == 0
    assert own.calls[0]["_inside_attn_wrapper"] and own.calls[0]["transformer_options"][KEY] is override


def reasons(policy, **options):
    override = Override(policy)
    attention(*tensors(), HEADS, transformer_options={KEY: override, **options})
    (row,) = override.report.rows
    return row.reason


def test_blocks():
    policy = AttentionPolicy(min_length=0, skip_first=1, skip_last=2, skip=(3, -4))
    found = [reasons(policy, block_index=i, total_blocks=8, block_type="double") for i in range(8)]
    assert [reason is None for reason in found] == [False, True, True, False, False, True, False, False]
    assert found[0] == "left out by skip_first" and found[7] == "left out by skip_last"
    assert found[3:5] == ["left out by number (3)", "left out by number (4)"]
    assert "does not say which block" in reasons(policy) and "does not say which block" in reasons(
        policy, block_index=2
    )
    assert (
        reasons(AttentionPolicy(min_length=0, skip_first=1), block_index=2) is None
    )  # the number of blocks is not needed
    assert reasons(AttentionPolicy(min_length=S + 1)) == f"shorter than {S + 1} tokens"
    assert (
        reasons(AttentionPolicy(min_length=0, skip=(lambda call: call.layer == 5,)), block_index=5)
        == "left out by <lambda>"
    )


def test_steps_are_places_in_the_schedule():
    """A sampler of second order also calls between two places. Each call of the model has a new tensor of the noise."""
    override, schedule = (
        Override(AttentionPolicy(min_length=0, steps=range(1, 3))),
        torch.tensor([1.0, 0.7, 0.4, 0.1, 0.0]),
    )
    ran = []
    for noise in (1.0, 0.7, 0.68, 0.4, 0.1):
        sigmas = torch.full((B,), noise)
        for _ in range(2):  # two blocks of a step
            attention(
                *tensors(), HEADS, transformer_options={KEY: override, "sigmas": sigmas, "sample_sigmas": schedule}
            )
            ran.append((override.report.current_step, override.report.step_runs))
    assert ran == [(0, False)] * 2 + [(1, True)] * 4 + [(2, True)] * 2 + [(3, False)] * 2
    assert override.report.fp8_calls == 6
    assert "does not say which step" in reasons(override.policy)


def test_a_model_is_patched_as_a_copy():
    seen = []

    def others(func, *args, **kwargs):
        seen.append(kwargs)
        return func(*args, **kwargs)

    model = Model({"transformer_options": {"patches": {}, KEY: others}})
    patched = fp8_model(fp8_model(model, AttentionPolicy()), EVERY)
    assert (
        model.model_options["transformer_options"][KEY] is others
        and patched.model_options["transformer_options"]["patches"] == {}
    )
    options = patched.clone().model_options["transformer_options"]  # ComfyUI copies models
    attention(*tensors(), HEADS, transformer_options=options)
    assert not seen and not own.calls
    attention(*tensors(), HEADS, mask=torch.ones(S, S, dtype=torch.bool), transformer_options=options)
    assert len(seen) == len(own.calls) == 1
    assert str(override_of(patched).report).startswith("1 of 2 calls in FP8")


def test_patterns_of_modules_are_refused():
    with pytest.raises(ValueError, match=r"names no modules.* \*\.attn2"):
        Override(AttentionPolicy(skip=("*.attn2",)))


def test_the_node():
    cls = node.NODE_CLASS_MAPPINGS["FP8Attention"]
    inputs = cls.INPUT_TYPES()["required"]
    defaults = {name: given[1]["default"] for name, given in inputs.items() if name != "model"}
    (patched,) = getattr(cls(), cls.FUNCTION)(Model({}), **defaults)
    assert override_of(patched).policy == AttentionPolicy()
    (patched,) = getattr(cls(), cls.FUNCTION)(
        Model({}), **{**defaults, "skip_first": 2, "first_step": 3, "last_step": 20}
    )
    assert override_of(patched).policy == AttentionPolicy(skip_first=2, steps=range(3, 21))
