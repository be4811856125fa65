"""FP8 attention under torch.compile. These backends show the graphs; what a graph is lowered to is their own matter."""

import copy
import threading

import pytest
import torch

from fp8attn.mode import AttentionPolicy, fp8_attention
from tests.mode.nets import ANY, Net

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])  # eager runs the graph as it is, under the mode
def test_a_whole_model_compiled_before(net, x, graphs, backend):
    policy, other = (
        AttentionPolicy(min_length=1, skip_first=1),
        AttentionPolicy(min_length=1, skip=("*.2.*", lambda call: call.layer == 4)),
    )
    compiled = torch.compile(net, fullgraph=True, backend=backend)
    plain = net(x)
    assert torch.equal(compiled(x), plain)
    for given in (policy, other, AttentionPolicy(min_length=1000), policy, other):
        with fp8_attention(given, net) as eager:
            expected = net(x)
        with fp8_attention(given, compiled) as report:
            assert torch.equal(compiled(x), expected)
        assert report.fp8_calls == report.calls == eager.fp8_calls
    assert sum(row.compiled for row in report.rows) == 0  # the graphs were there
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
            assert [(row.name, row.reason) for row in report.rows if row.compiled] == [
                ("blocks.0", "left out by steps"), ("blocks.0", "left out by skip_first"), ("blocks.1", None),
                ("blocks.8", "left out by skip_last"),
            ]  # fmt: skip
            assert all(row.compiled <= 1 for row in report.rows)
            assert {row.name: (row.layer, row.calls) for row in report.rows if row.calls} == {
                f"blocks.{i}": (i, 2) for i in range(1, 8)
            }
        assert report.fp8_calls == report.calls == eager.fp8_calls
    assert graphs() == 4


def test_the_report_counts_what_compiled_code_ran_in_fp8(net, x, graphs):
    """Not only what was compiled; and it says that runs of torch's own function in compiled code are not counted."""
    compiled = torch.compile(net, fullgraph=True, backend="eager")
    with fp8_attention(AttentionPolicy(min_length=1, skip_last=2), compiled) as report:
        for _ in range(3):
            compiled(x)
    [fp8] = [row for row in report.rows if row.reason is None]
    assert (fp8.calls, fp8.compiled, fp8.queries, fp8.keys, fp8.heads) == (9, 3, (40, 40), (40, 40), (2, 2))
    first, _, *rows = str(report).splitlines()
    assert first == "9 of 9 calls in FP8; 2 compiled with torch's own SDPA, whose runs are not counted"
    assert [row.split()[2:4] for row in rows] == [["9", "3"], ["0", "2"]]


def test_the_report_names_modules_that_are_compiled(net, x, graphs):
    for block in net.blocks:
        block.attention.compile(fullgraph=True, backend="eager")
    with fp8_attention(ANY, net) as report:
        net(x)
        net(x)
    ran = {row.name: (row.layer, row.calls) for row in report.rows if row.calls}
    assert ran == {f"blocks.{i}.attention": (i, 2) for i in range(5)}
    assert report.fp8_calls == report.calls == 10


def test_runs_of_a_graph_count_in_the_context_that_runs_it(net, x, graphs):
    """One graph in two contexts, nested contexts, and outside, in another thread."""
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    with fp8_attention(ANY, net) as first:
        compiled(x)
    with fp8_attention(ANY, net) as second:
        compiled(x)
        thread = threading.Thread(target=lambda: torch.inference_mode()(compiled)(x))
        thread.start()
        thread.join()
    with fp8_attention(ANY) as outer, fp8_attention(ANY, net) as inner:
        compiled(x)
    assert [report.fp8_calls for report in (first, second, outer, inner)] == [5, 5, 0, 5]


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
