"""Which calls the mode takes, and where contexts end: exceptions, threads, tasks, generators."""

import asyncio
import copy
import pickle
import threading
from itertools import product

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention  # imported before any context

from fp8attn.dense import sdpa
from fp8attn.mode import AttentionPolicy, fp8_attention, sites
from fp8attn.numerics import relative_error
from tests.mode.nets import ANY, FP8_ERROR, Net, qkv, ran


@pytest.mark.parametrize(
    "function",
    [
        scaled_dot_product_attention,
        torch.nn.functional.scaled_dot_product_attention,
        torch._C._nn.scaled_dot_product_attention,
    ],
)
def test_catches_the_function_however_it_was_imported(function):
    q, k, v = qkv()
    plain, ours = function(q, k, v, is_causal=True), sdpa.scaled_dot_product_attention(q, k, v, is_causal=True)
    with fp8_attention(ANY) as report:
        assert torch.equal(function(q, k, v, is_causal=True), ours)
        assert torch.equal(
            function(query=q, key=k, value=v, attn_mask=None, dropout_p=0.0, is_causal=True, scale=None), ours
        )
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
    parts = (
        [torch.randn(n, 2, 64) for n in (30, 50)]
        if layout == torch.jagged
        else [torch.randn(2, n, 64) for n in (30, 50)]
    )
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
    with (
        fp8_attention(AttentionPolicy(min_length=1, skip_last=1), model) as report,
        fp8_attention(ANY, nn.Linear(1, 1)),
    ):
        assert 0 < relative_error(model(x), plain) < FP8_ERROR
    assert (
        ran(report) == {"fp8": [0, 1], "torch": {2: "left out by skip_last"}}
        and report.rows[0].name == "layers.0.self_attn"
    )
    with fp8_attention(ANY) as report:
        torch.testing.assert_close(model(x, src_key_padding_mask=padding), plain)
    assert [(row.calls, row.reason) for row in report.rows] == [(3, "a mask is given; FP8 attention is causal or full")]
    request.addfinalizer(lambda: torch.backends.mha.set_fastpath_enabled(True))
    torch.backends.mha.set_fastpath_enabled(False)  # Dynamo takes it below a mode as well, eager code does not
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    with fp8_attention(ANY) as report:
        torch.testing.assert_close(compiled(x), model(x))
    assert [(row.calls, row.compiled, row.reason) for row in report.rows] == [(6, 3, None)]  # three in each
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


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_a_model_is_not_copied_with_its_hooks(net, x, copied):
    """Hooks of a copy would stay after the context. Before and after it, copies are as ever."""
    with fp8_attention(ANY, net) as report:
        inside = net(x)
        with pytest.raises(RuntimeError, match=r"cannot be copied or pickled.* outside of the `with` block"):
            copied(net)
        assert torch.equal(net(x), inside)
    assert report.calls == report.fp8_calls == 10
    copied(net)
    other = copy.deepcopy(net)
    with fp8_attention(ANY, other):
        assert torch.equal(other(x), inside)


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
    with (
        fp8_attention(ANY) as outer,
        fp8_attention(first, net) as report,
        fp8_attention(last, other) as report_of_other,
    ):
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
    """Three threads use one model: one outside of the mode, two inside with different policies, all between the same
    two barriers.
    """
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
    assert not sites.slots


def test_contexts_that_end_out_of_order_are_an_error_and_leave_nothing(net, x):
    """The end of the outer context ends the inner one, too. Then nothing is changed on this thread."""
    q, k, v = qkv()
    plain, of_net = scaled_dot_product_attention(q, k, v), net(x)

    def context(policy, model=None):
        with fp8_attention(policy, model):
            yield

    outer, inner = context(ANY), context(AttentionPolicy(min_length=1), net)
    next(outer)
    next(inner)
    assert not torch.equal(scaled_dot_product_attention(q, k, v), plain)
    with pytest.raises(RuntimeError, match="must end in the reverse order"):
        outer.close()
    assert torch.equal(scaled_dot_product_attention(q, k, v), plain) and torch.equal(net(x), of_net)
    with pytest.raises(RuntimeError, match="must end in the reverse order"):
        inner.close()
    assert sites.thread.mode is None and not sites.slots
    with fp8_attention(ANY) as report:
        assert not torch.equal(scaled_dot_product_attention(q, k, v), plain)
    assert report.fp8_calls == 1


def test_tasks_of_asyncio_that_interleave_contexts_get_the_error():
    async def context(waits):
        with fp8_attention(ANY):
            for _ in range(waits):
                await asyncio.sleep(0)

    async def main():
        return await asyncio.gather(context(1), context(2), return_exceptions=True)

    first, second = asyncio.run(main())
    assert isinstance(first, RuntimeError) and isinstance(second, RuntimeError) and "asyncio" in str(first)
    assert sites.thread.mode is None


@pytest.mark.parametrize(("made", "entered", "called"), list(product([torch.inference_mode, torch.no_grad], repeat=3)))
def test_weights_context_and_call_are_of_inference_mode_or_not(net, x, made, entered, called):
    with fp8_attention(ANY, net):
        expected = net(x)
    with torch.inference_mode(False):
        with made():
            model, given = Net().eval(), x.clone()
            model.load_state_dict(net.state_dict())
        with entered():
            context = fp8_attention(ANY, model)
            report = context.__enter__()
        with called():
            out = model(given)
        context.__exit__(None, None, None)
        assert torch.equal(out, expected) and report.fp8_calls == 5
