"""FP8 attention under torch.compile. These backends show the graphs; what a graph is lowered to is their own matter."""

import copy
import threading

import pytest
import torch

from fp8attn.mode import AttentionPolicy, fp8_attention
from tests.mode.nets import ANY, Net


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
