"""FP8 attention in whole models: which calls the mode takes, the policy, and the report."""

import asyncio
import copy
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention  # imported before any context
from torch.overrides import TorchFunctionMode

from fp8attn.dense import sdpa
from fp8attn.mode import AttentionCall, AttentionPolicy, fp8_attention
from fp8attn.mode import mode as fp8_mode
from fp8attn.mode.policy import MIN_LENGTH
from fp8attn.numerics import relative_error

ANY = AttentionPolicy(min_length=1)
FP8_ERROR = 0.04  # of attention: rounding to FP8 moves V by 2.6%, and K likewise


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(128, 384)

    def forward(self, x, mask=None):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 64)).permute(2, 0, 3, 1, 4)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()

    def forward(self, x):
        return x + self.attention(x)


class Net(nn.Module):
    def __init__(self, layers=5):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


@pytest.fixture
def net():
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x():
    return torch.randn(2, 40, 128, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.inference_mode():
        yield
    assert torch._C._len_torch_function_stack() == 0  # every context has ended


def ran(report):
    """The layers, by where they ran."""
    return {
        "fp8": [row.layer for row in report.rows if row.reason is None],
        "torch": {row.layer: row.reason for row in report.rows if row.reason is not None},
    }


def qkv(length=40, heads=2):
    generator = torch.Generator().manual_seed(2)
    return (torch.randn(1, heads, length, 64, generator=generator) for _ in range(3))


# What is caught


@pytest.mark.parametrize(
    "function", [scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention, torch._C._nn.scaled_dot_product_attention]
)
def test_catches_the_function_however_it_was_imported(function):
    q, k, v = qkv()
    plain, ours = function(q, k, v, is_causal=True), sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)
    with fp8_attention(ANY) as report:
        assert torch.equal(function(q, k, v, is_causal=True), ours)
        assert torch.equal(function(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=True, scale=None), ours)
    assert torch.equal(function(q, k, v, is_causal=True), plain)
    assert 0 < relative_error(ours, plain) < FP8_ERROR
    assert (report.fp8_calls, report.calls) == (2, 2)


def test_what_fp8_cannot_do_is_torchs_own():
    q, k, v = qkv()
    mask = torch.ones(40, 40, dtype=torch.bool).tril(3)
    calls = [
        (q, k, v, mask),
        (q, k, v, mask.float()),
        (q.double(), k.double(), v.double()),
        (q.squeeze(0)[:, None], k, v),  # broadcasts
    ]
    expected = [scaled_dot_product_attention(*call) for call in calls]
    with fp8_attention(ANY) as report:
        for call, out in zip(calls, expected, strict=True):
            assert torch.equal(scaled_dot_product_attention(*call), out)
        torch.manual_seed(0)
        dropped = scaled_dot_product_attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(0)
    assert torch.equal(dropped, scaled_dot_product_attention(q, k, v, dropout_p=0.5))
    assert (report.fp8_calls, report.calls) == (0, 5)
    assert "a mask is given" in str(report) and "dropout" in str(report) and "float64" in str(report)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_nested_tensors_are_torchs_own(layout):
    parts = [torch.randn(n, 2, 64) for n in (30, 50)] if layout == torch.jagged else [torch.randn(2, n, 64) for n in (30, 50)]
    q = torch.nested.nested_tensor(parts, layout=layout)
    q = q.transpose(1, 2) if layout == torch.jagged else q
    expected = scaled_dot_product_attention(q, q, q)
    with fp8_attention(AttentionPolicy()) as report:
        out = scaled_dot_product_attention(q, q, q)
    assert all(torch.equal(a, b) for a, b in zip(out.unbind(), expected.unbind(), strict=True))
    assert report.calls == 1 and "nested" in report.rows[0].reason and report.rows[0].keys is None


def test_multi_head_attention_modules(request):
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(128, 2, 64, batch_first=True), 3).eval()
    x = torch.randn(2, 40, 128)
    plain = model(x)
    padding = torch.zeros(2, 40, dtype=torch.bool)
    with fp8_attention(AttentionPolicy(min_length=1, skip_last=1), model) as report, fp8_attention(ANY, nn.Linear(1, 1)):
        assert 0 < relative_error(model(x), plain) < FP8_ERROR
    assert ran(report) == {"fp8": [0, 1], "torch": {2: "left out by skip_last"}} and report.rows[0].name == "layers.0.self_attn"
    with fp8_attention(ANY) as report:
        torch.testing.assert_close(model(x, src_key_padding_mask=padding), plain)
    assert [(row.calls, row.reason) for row in report.rows] == [(3, "a mask is given; FP8 attention is causal or full")]
    request.addfinalizer(lambda: torch.backends.mha.set_fastpath_enabled(True))
    torch.backends.mha.set_fastpath_enabled(False)  # Dynamo takes it below a mode as well, eager code does not
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with fp8_attention(ANY) as report:
        torch.testing.assert_close(compiled(x), model(x))
    assert [(row.calls, row.compiled, row.reason) for row in report.rows] == [(3, 3, None)]
    torch._dynamo.reset()


def test_a_gradient_is_torchs_own():
    with torch.inference_mode(False), torch.enable_grad(), fp8_attention(ANY) as report:
        q, k, v = (x.clone().requires_grad_() for x in qkv())
        scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad is not None and report.fp8_calls == 0


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # by torch.autograd.forward_ad
def test_derivatives_and_vmap_are_torchs_own():
    with torch.inference_mode(False), torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        q, k, v = qkv()
        tangent = torch.randn_like(k)

        def calls():
            def call(k):
                return scaled_dot_product_attention(q, k, v)

            with forward_ad.dual_level():
                dual = forward_ad.unpack_dual(call(forward_ad.make_dual(k, tangent))).tangent
            return *torch.func.jvp(call, (k,), (tangent,)), torch.vmap(call)(k[None]), dual

        expected = calls()
        with fp8_attention(ANY) as report:
            ours = calls()
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True)) and expected[1].norm() > 1.0
    assert {row.reason.partition(",")[0].partition(" (")[0]: row.calls for row in report.rows} == {
        "an input has a forward-mode tangent": 1,
        "a transform of torch.func is active": 2,
    }


def test_autocast_gives_torchs_dtype():
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        expected = scaled_dot_product_attention(q, k, v.bfloat16())
        with fp8_attention(ANY) as report:
            out = scaled_dot_product_attention(q, k, v.bfloat16())
    assert out.dtype == expected.dtype == torch.bfloat16 and report.fp8_calls == 1
    assert 0 < relative_error(out, expected) < FP8_ERROR


def test_ends_with_the_block_and_by_an_exception(net, x):
    plain, state, types = net(x), net.state_dict(), [type(module) for module in net.modules()]

    def fails(module, args):
        raise RuntimeError("a model fails")

    handle = net.blocks[2].attention.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="a model fails"), fp8_attention(ANY, net) as report:
        net(x)
    handle.remove()
    assert ran(report)["fp8"] == [0, 1]
    with fp8_attention(ANY, net):
        assert net.state_dict().keys() == state.keys() and [type(module) for module in net.modules()] == types
    for module in net.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks and not module._forward_hooks_always_called
    assert torch.equal(net(x), plain)


def test_a_copy_of_the_model_is_outside_of_the_context(net, x):
    plain = net(x)
    with fp8_attention(ANY, net) as report:
        inside = net(x)
        copies = [copy.deepcopy(net)]
        copies.append(copy.deepcopy(copies[0]))  # with the hooks of the first
        copies.append(pickle.loads(pickle.dumps(net)))
        assert all(torch.equal(other(x), plain) for other in copies)
        assert torch.equal(net(x), inside) and not torch.equal(inside, plain)
    assert report.calls == report.fp8_calls == 10
    for module in (*net.modules(), *copies[0].modules(), *copies[1].modules()):
        assert not module._forward_pre_hooks and not module._forward_hooks and not module._forward_hooks_always_called
    with fp8_attention(ANY, copies[0]) as report:
        assert torch.equal(copies[0](x), inside)
    assert report.fp8_calls == 5


def test_calls_outside_of_the_model_are_not_concerned(net, x):
    def fails(module, args, output):
        raise ValueError("a model fails")

    q, k, v = qkv()
    expected = scaled_dot_product_attention(q, k, v)
    with fp8_attention(ANY, net) as report:
        assert torch.equal(scaled_dot_product_attention(q, k, v), expected)
        handle = net.blocks[0].attention.register_forward_hook(fails)
        with pytest.raises(ValueError, match="a model fails"):
            net(x)
        handle.remove()
        assert torch.equal(scaled_dot_product_attention(q, k, v), expected)
    assert [row.name for row in report.rows] == ["blocks.0.attention"]


def test_two_models_with_a_context_each(net, x):
    other = Net(3).eval()
    first, last = AttentionPolicy(min_length=1, skip_first=1), AttentionPolicy(min_length=1, skip_last=1)
    with fp8_attention(ANY) as outer, fp8_attention(first, net) as report, fp8_attention(last, other) as report_of_other:
        other(net(x))
        scaled_dot_product_attention(*qkv())
    assert ran(report)["fp8"] == [1, 2, 3, 4] and ran(report_of_other)["fp8"] == [0, 1]
    assert (report.calls, report_of_other.calls, outer.calls) == (5, 3, 1)


def test_the_innermost_context_that_is_concerned_decides(net, x):
    with fp8_attention(ANY, net) as outer:
        everywhere = net(x)
        with fp8_attention(AttentionPolicy(min_length=1, skip_first=2), net) as inner:
            some = net(x)
        with fp8_attention(AttentionPolicy(min_length=1000)) as none:
            plain = net(x)
        assert torch.equal(net(x), everywhere)
    assert torch.equal(plain, net(x))
    assert ran(outer) == {"fp8": [0, 1, 2, 3, 4], "torch": {}} and outer.calls == 10
    assert ran(inner)["fp8"] == [2, 3, 4] and none.fp8_calls == 0
    assert len({float(out.sum()) for out in (everywhere, some, plain)}) == 3


def test_threads_do_not_affect_each_other(net, x):
    """Three threads use one model: one outside of the mode, two inside with different policies, all between the same two barriers."""
    policies = [None, AttentionPolicy(min_length=1, skip_first=1), AttentionPolicy(min_length=1, skip_last=2)]
    expected, results, reports = [], [[], [], []], [None] * 3
    for policy in policies:
        if policy is None:
            expected.append(net(x))
        else:
            with fp8_attention(policy, net):
                expected.append(net(x))
    barrier = threading.Barrier(3, timeout=3600)

    @torch.inference_mode()
    def work(i):
        def runs():
            barrier.wait()
            for _ in range(10):
                results[i].append(net(x))
            barrier.wait()

        if policies[i] is None:
            runs()
        else:
            with fp8_attention(policies[i], net) as reports[i]:
                runs()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outs, out in zip(results, expected, strict=True):
        assert len(outs) == 10 and all(torch.equal(each, out) for each in outs)
    assert ran(reports[1])["fp8"] == [1, 2, 3, 4] and ran(reports[2])["fp8"] == [0, 1, 2]
    assert [row.calls for row in reports[1].rows] == [10] * 5
    assert not fp8_mode._slots


@pytest.mark.parametrize("first_out", [0, 1])
def test_asyncio_tasks_do_not_affect_each_other(net, x, first_out):
    """Two tasks have different policies, and one has none. They alternate, and the contexts end in either order."""
    policies = [AttentionPolicy(min_length=1, skip_first=1), AttentionPolicy(min_length=1000)]
    plain = net(x)
    with fp8_attention(policies[0], net):
        inside = net(x)
    outs = {0: [], 1: [], "none": [], "child": []}
    reports = {}

    async def runs(name, count):
        for _ in range(count):
            outs[name].append(net(x))
            await asyncio.sleep(0)

    async def with_policy(i):
        with fp8_attention(policies[i], net) as reports[i]:
            child = asyncio.create_task(runs("child", 2)) if i == 0 else None
            await runs(i, 2 if i == first_out else 5)
            if child is not None:
                await child
        assert torch.equal(net(x), plain)

    async def main():
        await asyncio.gather(with_policy(0), with_policy(1), runs("none", 8))
        await runs("none", 1)

    asyncio.run(main())
    for name, expected, count in ((0, inside, 5 - 3 * (first_out == 0)), (1, plain, 5 - 3 * (first_out == 1)), ("none", plain, 9)):
        assert len(outs[name]) == count and all(torch.equal(out, expected) for out in outs[name]), name
    assert len(outs["child"]) == 2 and all(torch.equal(out, inside) for out in outs["child"])  # a task started inside
    assert (reports[0].calls, reports[0].fp8_calls) == (5 * len(outs[0]) + 10, 4 * len(outs[0]) + 8)
    assert (reports[1].calls, reports[1].fp8_calls) == (5 * len(outs[1]), 0)
    assert fp8_mode._thread.mode is None and fp8_mode._of_this_task.get() == () and not fp8_mode._slots


def test_contexts_of_generators_end_in_any_order():
    q, k, v = qkv()
    plain, ours = scaled_dot_product_attention(q, k, v), sdpa.scaled_dot_product_attention(q, k, v)

    def context(policy):
        with fp8_attention(policy):
            yield

    class Foreign(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    outer, inner = context(ANY), context(AttentionPolicy(min_length=1000))
    next(outer)
    with Foreign():
        next(inner)
        assert torch.equal(scaled_dot_product_attention(q, k, v), plain)
        outer.close()
        assert torch.equal(scaled_dot_product_attention(q, k, v), plain)
        inner.close()
        outer, inner = context(AttentionPolicy(min_length=1000)), context(ANY)
        next(outer)
        next(inner)
        outer.close()
        assert torch.equal(scaled_dot_product_attention(q, k, v), ours)
        inner.close()
        assert torch.equal(scaled_dot_product_attention(q, k, v), plain)
    assert fp8_mode._thread.mode is None


# The policy


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
    with fp8_attention(AttentionPolicy(min_length=1, skip_first=1), net, layers=[net.blocks[3], net.blocks[1]]) as report:
        net(x)
    assert [(row.layer, row.reason is None) for row in report.rows] == [(None, True), (1, True), (None, True), (0, False), (None, True)]


def test_numbers_are_layers(net, x):
    with fp8_attention(AttentionPolicy(min_length=1, skip=(1, -1)), net) as report:
        net(x)
    assert ran(report) == {"fp8": [0, 2, 3], "torch": {1: "left out by number (1)", 4: "left out by number (4)"}}


def test_names_stay_with_all_inside(net, x):
    with fp8_attention(AttentionPolicy(min_length=1, skip=("blocks.1", "*.3.attention")), net) as report:
        net(x)
    assert ran(report) == {"fp8": [0, 2, 4], "torch": {1: "left out by name (blocks.1)", 3: "left out by name (*.3.attention)"}}


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


@pytest.mark.parametrize("keys", [{}, {"key_dtype": "e4m3"}, {"key_dtype": "e4m3", "rotate_keys": False}, {"rotate_keys": False}])
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
    assert fp8_mode._thread.mode is None


def test_a_model_that_does_not_fit_the_policy(net):
    for policy, model, options, message in [
        (AttentionPolicy(skip=("atention",)), net, {}, "no module of the model is called 'atention'"),
        (AttentionPolicy(skip=(1, 5, -6)), net, {}, r"skip names layers \[5, -6\], and the model has layers 0 to 4 \(-1 is the last\)"),
        (AttentionPolicy(skip=(0,)), net.blocks[0], {}, r"none in a ModuleList; pass them: fp8_attention\(policy, model, layers="),
        (AttentionPolicy(skip_last=1), net.blocks[0], {}, r"none in a ModuleList; pass them: fp8_attention\(policy, model, layers="),
        (AttentionPolicy(skip_last=1), net, {"layers": [nn.Linear(1, 1)]}, r"layers\[0\], a Linear, is not inside the model"),
    ]:
        with pytest.raises(ValueError, match=message), fp8_attention(policy, model, **options):
            pass
    assert not fp8_mode._slots
    with pytest.raises(ValueError, match="backend"), fp8_attention(AttentionPolicy(min_length=1, backend="nonsense")):
        scaled_dot_product_attention(*qkv())


def test_the_report_does_not_grow_with_use(net):
    with fp8_attention(AttentionPolicy(min_length=20), net) as report:
        for length in range(10, 31):
            net(torch.randn(1, length, 128))
    assert len(report.rows) == 10 and report.calls == 105 and report.fp8_calls == 55
    row = report.rows[-1]
    assert (row.name, row.calls, row.queries, row.keys, row.heads) == ("blocks.4.attention", 11, (20, 30), (20, 30), (2, 2))
    lines = str(report).splitlines()
    assert lines[0] == "55 of 105 calls in FP8" and len(lines) == 12
    assert " ".join(lines[2].split()) == "blocks.0.attention 0 10 0 10-19 10-19 2 torch: shorter than 20 tokens"
    assert " ".join(lines[-1].split()) == "blocks.4.attention 4 11 0 20-30 20-30 2 FP8"


# torch.compile. These backends show the graphs; what a graph is lowered to is their own matter.


@pytest.fixture
def graphs():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield lambda: torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])  # eager runs the graph as it is, under the mode
def test_a_whole_model_compiled_before(net, x, graphs, backend):
    policy, other = AttentionPolicy(min_length=1, skip_first=1), AttentionPolicy(min_length=1, skip=("*.2.*", lambda call: call.layer == 4))
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    plain = net(x)
    assert torch.equal(compiled(x), plain)
    for given in (policy, other, AttentionPolicy(min_length=1000), policy, other):
        with fp8_attention(given, net) as report:
            expected = net(x)
        with fp8_attention(given, compiled) as report:
            assert torch.equal(compiled(x), expected)
    assert report.calls == 0  # the graphs were there
    assert graphs() == 4
    assert torch.equal(compiled(x), plain) and graphs() == 4


def test_a_model_compiled_by_its_blocks(graphs, x):
    """Ten blocks, more than Dynamo's limit of graphs a function; FP8 and torch by layer and by step."""
    torch.manual_seed(0)
    net = Net(10).eval()
    compiled = copy.deepcopy(net)
    for block in compiled.blocks:
        block.compile(fullgraph=True, backend="eager")
    policy = AttentionPolicy(min_length=1, skip_first=1, skip_last=2, steps=range(1, 3))
    for again in range(3):
        with fp8_attention(policy, net) as eager, fp8_attention(policy, compiled) as report:
            for _ in range(4):
                assert torch.equal(compiled(x), net(x))
                eager.step()
                report.step()
        if again == 0:
            assert {row.reason: row.compiled for row in report.rows} == {
                "left out by steps": 1, "left out by skip_first": 1, None: 1, "left out by skip_last": 1,
            }  # fmt: skip
    assert graphs() == 4


def test_a_context_inside_of_what_is_compiled(net, x, graphs):
    @torch.compile(fullgraph=True, backend="eager")
    def inside(x):
        with fp8_attention(ANY):
            return net(x)

    with fp8_attention(ANY):
        expected = net(x)
    assert torch.equal(inside(x), expected)


def test_compiled_code_outside_is_not_affected_by_a_thread_inside(net, x, graphs):
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    plain = net(x)
    outs = []
    with fp8_attention(ANY, net):
        inside = compiled(x)
        thread = threading.Thread(target=lambda: outs.append(torch.inference_mode()(compiled)(x)))
        thread.start()
        thread.join()
        assert torch.equal(compiled(x), inside)
    assert torch.equal(outs[0], plain) and not torch.equal(inside, plain)


# transformers models without a cache


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
        BertModel, BertConfig(vocab_size=89, hidden_size=128, num_hidden_layers=3, num_attention_heads=2, intermediate_size=128)
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
            vocab_size=89, d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
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
            hidden_size=128, num_hidden_layers=3, num_attention_heads=2, intermediate_size=128, image_size=32, patch_size=4, num_channels=3
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
    assert [(row.reason, row.compiled) for row in report.rows] == [("left out by skip_first", 1), (None, 1)]
    torch._dynamo.reset()
