"""Steps that CUDA graphs of decodes replay, called in the order of SGLang's `DecodeCudaGraphRunner`, on a CPU: no graph
is recorded.

What a graph would do is done by the layer with the step that was there when it was recorded.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from fp8attn import UsageError
from fp8attn.formats.spec import PageSpec
from fp8attn.integrations.engine.layer import EngineLayer
from fp8attn.integrations.engine.options import Options
from fp8attn.integrations.engine.static import StaticState
from fp8attn_sglang.backend import FP8AttentionBackend

Q_HEADS, HEADS, DIM, PAGES = 4, 2, 64, 12
MOST = 4  # sequences of the largest graph


def layer_of():
    """A layer and its pages. Page 0 takes padding."""
    layer = EngineLayer(Q_HEADS, HEADS, DIM, options=Options(), static=StaticState(None, None, None), device="cpu")
    layer.bind(torch.zeros(PAGES, HEADS, PageSpec.of(DIM).layout.nbytes, dtype=torch.uint8))
    return layer


@pytest.fixture
def backend():
    """Requests 1, 2 and 3 have pages; the row 0 is SGLang's padding."""
    made = object.__new__(FP8AttentionBackend)
    made.req_to_token = torch.zeros(5, 512, dtype=torch.int32)
    for request, pages in ((1, (5, 1, 7)), (2, (3, 9)), (3, (4, 2))):
        for number, page in enumerate(pages):
            made.req_to_token[request, number * 128 : (number + 1) * 128] = page * 128 + torch.arange(128)
    made.forward_metadata = None
    return made


class Runner:
    """The buffers of SGLang's runner, whose `capture_one_shape` and `load_batch` this follows."""

    def __init__(self, backend):
        self.backend = backend
        backend.init_cuda_graph_state(MOST, MOST)
        self.fill = backend.get_cuda_graph_seq_len_fill_value()
        self.seq_lens = torch.full((MOST,), self.fill, dtype=torch.int64)
        self.req_pool_indices = torch.zeros(MOST, dtype=torch.int64)
        self.steps = {}
        for size in (MOST, 2, 1):  # the largest first
            backend.init_forward_metadata_out_graph(self.batch(size), in_capture=True)
            backend.init_forward_metadata_in_graph(self.batch(size))
            self.steps[size] = backend.forward_metadata

    def batch(self, size, **others):
        views = {"seq_lens": self.seq_lens[:size], "req_pool_indices": self.req_pool_indices[:size]}
        return SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=size, seq_lens_cpu=None, **views, **others)

    def replay(self, requests, lengths):
        """The step that the graph of a batch reads."""
        size = min(size for size in self.steps if size >= len(requests))
        self.seq_lens.fill_(self.fill)
        self.req_pool_indices.zero_()
        self.seq_lens[: len(lengths)] = torch.tensor(lengths)
        self.req_pool_indices[: len(requests)] = torch.tensor(requests)
        self.backend.init_forward_metadata_out_graph(self.batch(size, num_padding=size - len(requests)))
        return self.steps[size]


def addresses(step):
    [part] = step.parts
    return [x.data_ptr() for x in (part.cu_seqlens, part.cache_seqlens, part.page_table)]


def test_graphs_read_the_sequences_of_each_step(backend):
    """Replayed and eager steps write the same bytes and give the same bits: with padding, over a page's end, with
    requests that come and go."""
    runner, graph, eager = Runner(backend), layer_of(), layer_of()
    before = {size: addresses(step) for size, step in runner.steps.items()}
    lengths = {1: 250, 2: 126, 3: 1}
    generator = torch.Generator().manual_seed(0)
    for requests in ([1, 2, 3], [1, 2, 3], [3, 1], [2], [2, 3], [1, 3, 2], [3], [1, 2, 3]):
        for request in requests:
            lengths[request] += 1
        held = [lengths[request] for request in requests]
        step, count = runner.replay(requests, held), len(requests)
        assert {size: addresses(step) for size, step in runner.steps.items()} == before
        size = step.parts[0].tokens.stop
        q, k, v = (torch.randn(size, heads, DIM, generator=generator).bfloat16() for heads in (Q_HEADS, HEADS, HEADS))
        out, want = torch.full_like(q, torch.nan), torch.full_like(q[:count], torch.nan)
        graph.run(q, k, v, out, step)
        backend.init_forward_metadata(
            SimpleNamespace(
                forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor(held), seq_lens_cpu=torch.tensor(held),
                req_pool_indices=torch.tensor(requests),
            )
        )  # fmt: skip
        eager.run(q[:count], k[:count], v[:count], want, backend.forward_metadata)
        assert torch.equal(out[:count], want) and want.isfinite().all() and want.abs().amin(-1).gt(0).any()
        assert out[count:].eq(0).all()
        assert torch.equal(graph.pool, eager.pool) and not graph.pool[0].any()
    assert lengths == {1: 255, 2: 132, 3: 8}


def test_nothing_is_written_while_graphs_are_recorded(backend):
    layer, runner = layer_of(), Runner(backend)
    for size, step in runner.steps.items():
        q = torch.randn(size, Q_HEADS, DIM).bfloat16()
        backend.init_forward_metadata_out_graph(runner.batch(size), in_capture=True)
        layer.run(q, q[:, :HEADS], q[:, :HEADS], torch.empty_like(q), step)
    assert not layer.pool.any()


def test_graphs_of_other_steps_are_refused(backend):
    runner = Runner(backend)
    for mode in (ForwardMode.EXTEND, ForwardMode.TARGET_VERIFY):
        given = runner.batch(1, num_padding=0)
        given.forward_mode = mode
        with pytest.raises(UsageError, match=f"CUDA graphs of SGLang's steps of the form {mode.name}"):
            backend.init_forward_metadata_out_graph(given)
