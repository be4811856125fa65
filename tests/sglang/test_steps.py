"""The sequences of SGLang's steps, and what a layer's call is refused for, without an engine."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from fp8attn import UsageError
from fp8attn_sglang.backend import FP8AttentionBackend


@pytest.fixture
def backend():
    """Request 2 has the pages 5, 1 and 7; request 0 the page 3. Other slots are never read."""
    made = object.__new__(FP8AttentionBackend)
    made.req_to_token = torch.full((4, 512), 10**6, dtype=torch.int32)
    for request, pages in ((2, (5, 1, 7)), (0, (3,))):
        for number, page in enumerate(pages):
            made.req_to_token[request, number * 128 : (number + 1) * 128] = page * 128 + torch.arange(128)
    made.forward_metadata = None
    return made


def batch(mode, lengths, counts=None):
    given = {"forward_mode": mode, "seq_lens": torch.tensor(lengths), "seq_lens_cpu": torch.tensor(lengths)}
    given |= {"req_pool_indices": torch.tensor([2, 0])}
    if counts is not None:
        given |= {"extend_seq_lens": torch.tensor(counts), "extend_seq_lens_cpu": counts}
    return SimpleNamespace(**given)


def test_decodes(backend):
    backend.init_forward_metadata(batch(ForwardMode.DECODE, [300, 40]))
    [part] = backend.forward_metadata.parts
    assert part.tokens == slice(0, 2) and part.cu_seqlens is None and part.max_seqlen == 1
    assert part.cache_seqlens.tolist() == [300, 40] and part.cache_seqlens.dtype == part.page_table.dtype == torch.int32
    assert part.page_table.tolist()[0] == [5, 1, 7] and part.page_table[1, 0] == 3


@pytest.mark.parametrize("mode", [ForwardMode.EXTEND, ForwardMode.MIXED])
def test_prompts(backend, mode):
    """Of which 256 and no tokens are in the cache."""
    backend.init_forward_metadata(batch(mode, [300, 40], [44, 40]))
    [part] = backend.forward_metadata.parts
    assert part.tokens == slice(0, 84) and part.cu_seqlens.tolist() == [0, 44, 84] and part.max_seqlen == 44
    assert part.cache_seqlens.tolist() == [300, 40] and part.page_table.shape == (2, 3)


def test_idle_and_other_steps(backend):
    backend.init_forward_metadata(batch(ForwardMode.IDLE, []))
    assert backend.forward_metadata is None
    for mode in (
        ForwardMode.TARGET_VERIFY,
        ForwardMode.DRAFT_EXTEND_V2,
        ForwardMode.SPLIT_PREFILL,
        ForwardMode.DLLM_EXTEND,
    ):
        with pytest.raises(UsageError, match=f"steps of the form {mode.name}"):
            backend.init_forward_metadata(batch(mode, [300, 40], [44, 40]))


def test_calls_that_are_refused(backend):
    """A keyword is never swallowed, and pages of another layer are not read."""
    layer = torch.nn.Module()
    layer.layer_id = 3
    backend.layers = defaultdict(object)
    q = torch.zeros(1, 64)
    for given, reason in (
        ({"k": None, "v": None}, "no new keys and values"),
        ({"k": q, "v": q, "save_kv_cache": False}, "no new keys and values"),
        ({"k": q, "v": q, "q_rope": q}, "arguments \\['q_rope'\\]"),
    ):
        with pytest.raises(UsageError, match=f"layer 3 has {reason}; use another --attention-backend"):
            backend.forward_decode(q, layer=layer, forward_batch=None, **given)
