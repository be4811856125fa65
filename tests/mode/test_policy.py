"""The policy of FP8 attention, and the report."""

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention  # imported before any context

from fp8attn.dense import sdpa
from fp8attn.mode import AttentionCall, AttentionPolicy, fp8_attention, sites
from fp8attn.mode.policy import MIN_LENGTH
from tests.mode.nets import ANY, qkv, ran


def test_short_calls_stay():
    q, k, v = qkv(40)
    with fp8_attention(AttentionPolicy(min_length=40)) as report:
        scaled_dot_product_attention(q, k, v)
        scaled_dot_product_attention(q[:, :, :39], k, v)
        scaled_dot_product_attention(q, k[:, :, :39], v[:, :, :39])
    assert [(row.reason, row.calls) for row in report.rows] == [(None, 1), ("shorter than 40 tokens", 2)]
    assert AttentionPolicy().min_length == MIN_LENGTH


def test_first_and_last_layers_stay(net, x):
    with fp8_attention(AttentionPolicy(min_length=1, skip_first=1, skip_last=2), net) as report:
        net(x)
    why = {0: "left out by skip_first", 3: "left out by skip_last", 4: "left out by skip_last"}
    assert ran(report) == {"fp8": [1, 2], "torch": why}
    assert [row.name for row in report.rows] == [f"blocks.{i}.attention" for i in range(5)]


def test_layers_may_be_said(net, x):
    with fp8_attention(
        AttentionPolicy(min_length=1, skip_first=1), net, layers=[net.blocks[3], net.blocks[1]]
    ) as report:
        net(x)
    assert [(row.layer, row.reason is None) for row in report.rows] == [
        (None, True),
        (1, True),
        (None, True),
        (0, False),
        (None, True),
    ]


def test_numbers_are_layers(net, x):
    with fp8_attention(AttentionPolicy(min_length=1, skip=(1, -1)), net) as report:
        net(x)
    assert ran(report) == {"fp8": [0, 2, 3], "torch": {1: "left out by number (1)", 4: "left out by number (4)"}}


def test_names_stay_with_all_inside(net, x):
    with fp8_attention(AttentionPolicy(min_length=1, skip=("blocks.1", "*.3.attention")), net) as report:
        net(x)
    assert ran(report) == {
        "fp8": [0, 2, 4],
        "torch": {1: "left out by name (blocks.1)", 3: "left out by name (*.3.attention)"},
    }


def test_functions_see_the_call(net, x):
    seen = []

    def odd(call):
        seen.append(call)
        return call.layer % 2 == 1

    with fp8_attention(AttentionPolicy(min_length=1, skip=[odd]), net) as report:
        net(x)
    assert ran(report) == {"fp8": [0, 2, 4], "torch": dict.fromkeys((1, 3), "left out by odd")}
    shape = torch.Size((2, 2, 40, 64))
    assert seen[2] == AttentionCall("blocks.2.attention", 2, shape, shape, False)


@pytest.mark.parametrize("steps", [range(1, 3), {1, 2}, lambda step: 0 < step < 3])
def test_steps_of_a_schedule(net, x, steps):
    plain = net(x)
    with fp8_attention(AttentionPolicy(min_length=1, steps=steps)) as report:
        exact = []
        for _ in range(4):
            exact.append(torch.equal(net(x), plain))
            report.step()
        report.step(1)
        exact.append(torch.equal(net(x), plain))
    assert exact == [True, False, False, True, False]
    assert [(row.reason, row.calls) for row in report.rows] == [("left out by steps", 10), (None, 15)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"skip_first": 1}, "need the model"),
        ({"skip": ("*.attention",)}, "need the model"),
        ({"skip": "*.attention"}, "skip is a sequence"),
        ({"skip": print}, "skip is a sequence"),
        ({"skip_last": -1}, "skip_last is a number of layers"),
        ({"min_length": -1}, "min_length is a number of tokens"),
        ({"skip_first": True}, "skip_first is a number of layers, 0 or more; got True"),
        ({"skip_first": "2"}, "skip_first is a number of layers, 0 or more; got '2'"),
        ({"min_length": 1.5}, "min_length is a number of tokens, 0 or more; got 1.5"),
        ({"skip": 3}, r"skip is a sequence of layers, patterns and functions: pass \(3,\)"),
        ({"skip": (3,)}, "numbers and patterns in skip, and layers need the model"),
        ({"skip": (3.0,)}, r"skip is a sequence of layers \(whole numbers\), patterns .* got \(3\.0,\)"),
        ({"skip": (True,)}, r"skip is a sequence of layers .* got \(True,\)"),
        ({"steps": 5}, "steps is a range, a set or a function .* got 5"),
        ({"steps": "5"}, "steps is a range, a set or a function .* got '5'"),
        ({"key_dtype": "fp8"}, "key_dtype must be one of 'int8', 'e4m3'; got 'fp8'"),
        ({"backend": "x"}, "unknown backend 'x'; choose 'auto', 'hopper', 'triton', 'reference', 'fa3'"),
    ],
)
def test_a_policy_that_cannot_be_meant(arguments, message):
    with pytest.raises(ValueError, match=message), fp8_attention(AttentionPolicy(**arguments)):
        pass


@pytest.mark.parametrize(
    "keys", [{}, {"key_dtype": "e4m3"}, {"key_dtype": "e4m3", "rotate_keys": False}, {"rotate_keys": False}]
)
def test_the_policy_says_how_keys_are_stored(keys):
    q, k, v = torch.randn(3, 1, 2, 40, 64)
    with fp8_attention(AttentionPolicy(min_length=1, **keys)):
        ours = scaled_dot_product_attention(q, k, v)
    assert torch.equal(ours, sdpa.scaled_dot_product_attention(q, k, v, **keys))
    others = [{"rotate_keys": rotate, "key_dtype": name} for rotate in (True, False) for name in ("int8", "e4m3")]
    same = [torch.equal(ours, sdpa.scaled_dot_product_attention(q, k, v, **other)) for other in others]
    assert same == [other == {"rotate_keys": True, "key_dtype": "int8", **keys} for other in others]


def test_arguments_of_another_type(net):
    with pytest.raises(TypeError, match=r"fp8_attention\(AttentionPolicy\(\), model\); got Net"), fp8_attention(net):
        pass
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module .*got list"), fp8_attention(ANY, [net]):
        pass
    assert sites.thread.mode is None


def test_a_model_that_does_not_fit_the_policy(net):
    for policy, model, options, message in [
        (AttentionPolicy(skip=("atention",)), net, {}, "no module of the model is called 'atention'"),
        (
            AttentionPolicy(skip=(1, 5, -6)),
            net,
            {},
            r"skip names layers \[5, -6\], and the model has layers 0 to 4 \(-1 is the last\)",
        ),
        (
            AttentionPolicy(skip=(0,)),
            net.blocks[0],
            {},
            r"none in a ModuleList; pass them: fp8_attention\(policy, model, layers=",
        ),
        (
            AttentionPolicy(skip_last=1),
            net.blocks[0],
            {},
            r"none in a ModuleList; pass them: fp8_attention\(policy, model, layers=",
        ),
        (
            AttentionPolicy(skip_last=1),
            net,
            {"layers": [nn.Linear(1, 1)]},
            r"layers\[0\], a Linear, is not inside the model",
        ),
    ]:
        with pytest.raises(ValueError, match=message), fp8_attention(policy, model, **options):
            pass
    assert not sites.slots
    with pytest.raises(ValueError, match="backend"), fp8_attention(AttentionPolicy(min_length=1, backend="nonsense")):
        scaled_dot_product_attention(*qkv())


def test_the_report_says_what_was_forgotten(net, x):
    with fp8_attention(AttentionPolicy(min_length=1, steps=range(2)), net) as report:
        assert str(report) == (
            "0 of 0 calls in FP8: no call of scaled_dot_product_attention reached this context on its thread"
        )
        net(x)
        stuck = "; all at step 0: call the report's step after each (in diffusers: on_step_end)"
        assert str(report).splitlines()[0] == f"5 of 5 calls in FP8{stuck}"
        report.step()
        assert str(report).splitlines()[0] == "5 of 5 calls in FP8"


def test_the_report_does_not_grow_with_use(net):
    with fp8_attention(AttentionPolicy(min_length=20), net) as report:
        for length in range(10, 31):
            net(torch.randn(1, length, 128))
    assert len(report.rows) == 10 and report.calls == 105 and report.fp8_calls == 55
    row = report.rows[-1]
    assert (row.name, row.calls, row.queries, row.keys, row.heads) == (
        "blocks.4.attention",
        11,
        (20, 30),
        (20, 30),
        (2, 2),
    )
    lines = str(report).splitlines()
    assert lines[0] == "55 of 105 calls in FP8" and len(lines) == 12
    assert " ".join(lines[2].split()) == "blocks.0.attention 0 10 0 10-19 10-19 2 torch: shorter than 20 tokens"
    assert " ".join(lines[-1].split()) == "blocks.4.attention 4 11 0 20-30 20-30 2 FP8"
