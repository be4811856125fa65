"""A layer's steps without an engine: the parts of a step, and what a layer writes and answers."""

import pytest
import torch

pytest.importorskip("vllm")

from types import SimpleNamespace

import fp8attn
from fp8attn import KVScales, LayerScales, UsageError, reference
from fp8attn.formats.rotation import rotate
from fp8attn.integrations.transformers.biases import layer_biases
from fp8attn.integrations.vllm.metadata import FP8AttentionMetadataBuilder
from fp8attn.params import AttentionParams
from tests.integrations.engine.models import qwen2
from tests.vllm.layers import GROUP, HEADS, D, Step, layer_impl, means_of, prompt


def test_decodes_and_prompts_are_two_parts(builder):
    step = Step([1, 1, 5, 200], [300, 20, 5, 456], [[i * 6 + j for j in range(6)] for i in range(4)])
    decodes, prompts = builder.build(0, step).parts
    assert (decodes.tokens, decodes.max_seqlen, decodes.cu_seqlens.tolist()) == (slice(0, 2), 1, [0, 1, 2])
    assert decodes.cache_seqlens.tolist() == [300, 20] and decodes.page_table.tolist() == [
        [0, 1, 2, 3, 4, 5],
        [6, 7, 8, 9, 10, 11],
    ]
    assert decodes.cache_seqlens.data_ptr() == step.seq_lens.data_ptr()  # CUDA graphs read vLLM's buffers
    # The prompts' table is as wide as the longest sequence.
    assert (prompts.tokens, prompts.max_seqlen, prompts.cu_seqlens.tolist()) == (slice(2, 207), 200, [0, 5, 205])
    assert prompts.cache_seqlens.tolist() == [5, 456] and prompts.page_table.tolist() == [
        [12, 13, 14, 15],
        [18, 19, 20, 21],
    ]
    for x in (prompts.cu_seqlens, prompts.cache_seqlens, prompts.page_table):
        assert x.data_ptr() % 16 == 0  # otherwise kernels would be compiled while serving


@pytest.mark.parametrize(("queries", "count"), [([1, 1, 1], 1), ([7, 200], 1), ([3, 3], 1)])
def test_a_step_of_one_kind_is_one_part(builder, queries, count):
    if queries == [3, 3]:  # verification of two drafts
        builder.reorder_batch_threshold = 3
    parts = builder.build(0, Step(queries, [300] * len(queries), [[0, 1, 2]] * len(queries))).parts
    assert len(parts) == count and parts[0].tokens == slice(0, sum(queries)) and parts[0].max_seqlen == max(queries)


@pytest.mark.parametrize(
    ("queries", "equal"), [([200], True), ([190, 190], True), ([190, 180], False), ([1, 190], False), ([90], False)]
)
def test_long_prompts_of_equal_lengths_need_no_bounds(builder, queries, equal):
    part = builder.build(0, Step(queries, [300] * len(queries), [[0, 1, 2]] * len(queries))).parts[-1]
    assert part.max_seqlen == max(queries) and (part.cu_seqlens is None) == equal


@pytest.mark.parametrize("causal", [False, torch.tensor([True, False])])
def test_a_step_that_is_not_causal_is_refused(builder, causal):
    """Of models that generate by diffusion; vLLM says it for all sequences or for each."""
    step = Step([1, 5], [300, 20], [[0, 1, 2], [3, 4, 5]])
    step.causal = causal
    with pytest.raises(UsageError, match=r"also attend to later ones .* leave out --attention-backend"):
        builder.build(0, step)


def test_padded_requests_of_a_graph(builder):
    """They have no tokens and a length of zero, and their tables name block 0."""
    step = Step([1, 1, 0, 0], [300, 20, 0, 0], [[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]])
    (part,) = builder.build(0, step).parts
    assert part.cu_seqlens.tolist() == [0, 1, 2, 2, 2] and part.cache_seqlens.tolist() == [300, 20, 0, 0]


# vllm#37442
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.0, 1.0, 2.0, 3.0])])
@pytest.mark.parametrize("padded", [0, 1])
def test_padded_requests_write_nothing_and_answer_zeros(builder, monkeypatch, padded, sinks):
    """Reported: rows of requests with a length of zero are never written, and what is in them spreads by a maximum of
    the batch. Here the padding has one token or none. Its Q, K and V, the output and block 0, which its tables name,
    are NaN."""
    made, layer = layer_impl(monkeypatch, sinks=sinks)
    cache = torch.full((4, HEADS, 128, 2 * D + 1), 0xFF, dtype=torch.uint8)
    prompt(builder, made, layer, cache)
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(3, heads, D, generator=generator) for heads in (GROUP * HEADS, HEADS, HEADS))
    real = Step([1], [201], [[1, 2]])
    again = cache.clone()
    expected = made.forward(
        layer, q[:1], k[:1], v[:1], again, builder.build(0, real), torch.full_like(q[:1], torch.nan)
    )
    for x in (q, k, v):
        x[1:] = torch.nan
    made.engine_layer.pool = None  # bind to the other copy
    step = Step([1, padded, padded], [201, 0, 0], [[1, 2], [0, 0], [0, 0]])
    step.num_actual_tokens = 3
    found = made.forward(layer, q, k, v, cache, builder.build(0, step), torch.full_like(q, torch.nan))
    assert torch.equal(cache, again)
    assert torch.equal(found[:1], expected) and expected.isfinite().all()
    assert not found[1:].any()


@pytest.mark.parametrize("queries", [[1, 1, 5, 200], [1, 1, 1], [7, 200], [200]])
def test_another_group_of_blocks_has_another_table_only(builder, queries):
    lengths = [max(300, n) for n in queries]
    first, second = (
        Step(queries, lengths, [[i * 6 + j + more for j in range(6)] for i in range(len(queries))]) for more in (0, 50)
    )
    expected = builder.build(0, second).parts
    found = builder.update_block_table(builder.build(0, first), second.block_table_tensor, None).parts
    assert len(found) == len(expected)
    for part, other in zip(found, expected, strict=True):
        assert torch.equal(part.page_table, other.page_table) and part.page_table.stride() == other.page_table.stride()
        assert (part.tokens, part.max_seqlen, part.cache_seqlens.tolist()) == (
            other.tokens,
            other.max_seqlen,
            other.cache_seqlens.tolist(),
        )
        if part.tokens.start == 0:
            assert part.page_table.data_ptr() == second.block_table_tensor.data_ptr()  # CUDA graphs read vLLM's buffer
        else:
            assert part.page_table.data_ptr() % 16 == 0


def test_drafting_in_cuda_graphs(builder):
    """vLLM records several drafts in one graph: metadata of decodes has views of vLLM's buffers, so an update has
    nothing to do.
    """
    step = Step([1, 1], [300, 20], [[1, 2, 3], [4, 5, 6]])
    metadata = builder.build(0, step)
    step.seq_lens += 1
    assert builder.supports_draft_decode_metadata_update and builder.update_draft_decode_metadata(metadata) is None
    assert (
        metadata.parts[0].cache_seqlens.tolist() == [301, 21]
        and metadata.parts[0].cu_seqlens.data_ptr() == step.query_start_loc.data_ptr()
    )
    speculation = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    config = SimpleNamespace(speculative_config=speculation, use_v2_model_runner=True)
    assert FP8AttentionMetadataBuilder.get_varlen_cudagraph_max_query_len(config, None) == 4


@pytest.mark.parametrize(
    "options", [{}, {"sliding_window": 100}, {"logits_soft_cap": 20.0}, {"sinks": torch.tensor([0.0, 1.0, 2.0, 3.0])}]
)
def test_a_layers_steps(builder, monkeypatch, options):
    """A prompt in two chunks beside a decode, in scattered poisoned blocks: the bytes of one append, and the
    reference's output.
    """
    torch.manual_seed(0)
    made, layer = layer_impl(monkeypatch, **options)
    cache = torch.full((9, HEADS, 128, 2 * D + 1), 0x7F, dtype=torch.uint8)
    tables = [[7, 2, 5, 0], [3, 8, 1, 0]]
    k, v = (torch.randn(2, 400, HEADS, D).bfloat16() + 1 for _ in range(2))
    q = torch.randn(2, 400, GROUP * HEADS, D).bfloat16()
    held, outputs = [0, 0], [[], []]
    for queries in ([150, 300], [1, 90], [1, 1]):
        spans = [(held[i], held[i] + n) for i, n in enumerate(queries)]
        packed = [torch.cat([x[i, a:b] for i, (a, b) in enumerate(spans)]) for x in (q, k, v)]
        output = torch.full_like(packed[0], torch.nan)
        step = Step(queries, [b for _, b in spans], tables)
        assert made.forward(layer, *packed, cache, builder.build(0, step), output) is output
        held = [b for _, b in spans]
        for i, out in enumerate(output.split(queries)):
            outputs[i].append(out)
    for i, length in enumerate(held):
        whole = fp8attn.from_dense(
            k[i : i + 1, :length].transpose(1, 2), v[i : i + 1, :length].transpose(1, 2), backend="reference"
        )
        pages = whole.with_pool(made.engine_layer.pool[tables[i]][: whole.num_pages])
        for x, y in zip(pages.read(0, length), whole.read(0, length), strict=True):
            assert torch.equal(x, y)  # whatever the chunks were
        window, softcap, sinks = (options.get(name) for name in ("sliding_window", "logits_soft_cap", "sinks"))
        params = AttentionParams(None, length, True, 0.125, window or 0, softcap or 0.0, sinks)
        expected, _ = reference.attention(q[i, :length], whole, params)
        # The last step: equal but for a step of BF16, because the order of the reference's sums depends on the number
        # of rows. Before it, a page's scale can be smaller than in the end (`numerics.settle`): values of up to 5 then
        # differ by 5 / 127 at most.
        torch.testing.assert_close(outputs[i][-1], expected[-len(outputs[i][-1]) :], rtol=2**-7, atol=2**-12)
        torch.testing.assert_close(torch.cat(outputs[i]), expected, rtol=0, atol=5 / 127)


@pytest.mark.parametrize("draft_index", [1, 2])
def test_drafts_past_the_longest_sequence_write_nothing(builder, monkeypatch, draft_index):
    """Model runner V1 gives them the lengths 1, 2, ...; the page at position 0 may be another request's, too."""
    made, layer = layer_impl(monkeypatch)
    cache = torch.zeros(6, HEADS, 128, 2 * D + 1, dtype=torch.uint8)
    prompt(builder, made, layer, cache)
    before = cache.clone()
    q, x = 50 * torch.randn(2, GROUP * HEADS, D), 50 * torch.randn(2, HEADS, D)
    drafts = Step([1, 1], [draft_index, draft_index + 1], [[1, 2], [3, 4]])
    made.forward(layer, q, x, x, cache, builder.build_for_drafting(drafts, draft_index), q * 0)
    assert torch.equal(cache[:3], before[:3]) and not torch.equal(cache[3], before[3])
    first = builder.build_for_drafting(drafts, 0).parts[0]  # a prompt of one token
    assert first.cache_seqlens.tolist() == [draft_index, draft_index + 1]


def test_means_of_a_calibration(builder, monkeypatch, tmp_path):
    """A large offset of K and V, which the file's means remove: what is left of the error is a hundredth."""
    torch.manual_seed(0)
    offset = 50.0
    ones, mean = torch.ones(HEADS), torch.full((HEADS, D), offset)
    KVScales({3: LayerScales(ones, ones, mean, mean)}, num_layers=4, num_kv_heads=HEADS, head_dim=D).save(
        tmp_path / "scales.safetensors"
    )
    k, v = (torch.randn(130, HEADS, D) + offset for _ in range(2))
    q = torch.randn(130, GROUP * HEADS, D)
    step = Step([130], [130], [[1, 2]])
    exact = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).double() for x in (q, k, v)), is_causal=True, scale=0.125, enable_gqa=True
    ).transpose(0, 1)
    errors = []
    for options in ({}, {"scales": str(tmp_path / "scales.safetensors")}):
        made, layer = layer_impl(monkeypatch, {"fp8attn": options})
        cache, output = torch.zeros(3, HEADS, 128, 2 * D + 1, dtype=torch.uint8), torch.empty_like(q)
        made.forward(layer, q, k, v, cache, builder.build(0, step), output)
        errors.append(float((output - exact).square().mean().sqrt()))
    assert errors[1] < 0.04 < errors[0] / 5, errors  # E4M3 rounds values of one by 2^-5 at most, and of 50 by 2


def test_static_scales(builder, monkeypatch, tmp_path):
    """Chunks of a prompt, whose pages get no scales of their own: each chunk's output is that of the whole prompt, also
    inside a page.
    """
    torch.manual_seed(0)
    scales = torch.tensor([4 / 127, 5 / 127])
    layer = LayerScales(scales, torch.full((HEADS,), 2.0**-4), torch.zeros(HEADS, D), torch.ones(HEADS, D))
    KVScales({3: layer}, num_layers=4, num_kv_heads=HEADS, head_dim=D).save(tmp_path / "scales.safetensors")
    given = {"fp8attn": {"scales": str(tmp_path / "scales.safetensors"), "static_scales": True}}
    q, k, v = torch.randn(300, GROUP * HEADS, D), torch.randn(300, HEADS, D), torch.randn(300, HEADS, D) + 1
    k[200] *= 20  # a page's own scale would grow here
    outputs = []
    for chunks in ([300], [130, 90, 79, 1]):
        made, layer = layer_impl(monkeypatch, given)
        assert made.engine_layer.has_static_scales
        cache = torch.full((5, HEADS, 128, 2 * D + 1), 0x7F, dtype=torch.uint8)
        done, parts = 0, []
        for chunk in chunks:
            now = slice(done, done + chunk)
            done += chunk
            parts.append(
                made.forward(
                    layer,
                    q[now],
                    k[now],
                    v[now],
                    cache,
                    builder.build(0, Step([chunk], [done], [[4, 1, 3]])),
                    q[now] * 0,
                )
            )
        outputs.append(torch.cat(parts))
        header = made.engine_layer.pool[:, :, -128:].view(torch.float32)
        assert torch.equal(header[:, :, 0], scales.expand(5, HEADS)) and (header[:, :, 1] == 2.0**-4).all()
    torch.testing.assert_close(
        outputs[0], outputs[1], rtol=1e-6, atol=1e-6
    )  # the order of sums depends on the number of rows

    layer.kv_cache = cache
    refused = "layers.3.self_attn.attn shares its blocks with model.layers.2.self_attn.attn, .* leave out static"
    for impl, reason in (
        (made, refused),
        (SimpleNamespace(), "layers.2.self_attn.attn has another attention backend .* leave out static"),
    ):
        other = SimpleNamespace(
            kv_cache=cache, layer_name="model.layers.2.self_attn.attn", impl=impl, kv_sharing_target_layer_name=None
        )
        made._config.compilation_config.static_forward_context["other"] = other
        made.engine_layer.pool = None
        with pytest.raises(UsageError, match=reason):
            made.forward(layer, q[:1], k[:1], v[:1], cache, builder.build(0, Step([1], [1], [[4]])), q[:1])


def test_means_of_biases(monkeypatch, tmp_path):
    """Each of two processes takes the means of its heads from the checkpoint."""
    model = qwen2(num_attention_heads=8, num_key_value_heads=4, hidden_size=8 * D)
    model.save_pretrained(tmp_path)
    expected = layer_biases(model, 512)[3]
    assert expected.k_mean.any() and expected.v_mean is None
    for rank in (0, 1):
        made, _ = layer_impl(monkeypatch, checkpoint=tmp_path, rank=rank, ranks=2)
        k_mean, v_mean = means_of(made)
        assert not v_mean.any() and made.engine_layer.has_means  # zeros: kernels have both means or none
        torch.testing.assert_close(k_mean, rotate(expected.k_mean[2 * rank :][:2]), rtol=1e-5, atol=1e-4)
    assert not layer_impl(monkeypatch)[0].engine_layer.has_means


def test_while_vllm_measures_memory(monkeypatch):
    output = torch.full((3, GROUP * HEADS, D), torch.nan)
    made, _ = layer_impl(monkeypatch)
    assert not made.forward(SimpleNamespace(), output, output, output, torch.empty(0), None, output).any()


def test_blocks_of_another_size_are_an_error(monkeypatch):
    made, _ = layer_impl(monkeypatch)
    with pytest.raises(
        RuntimeError, match=r"model.layers.3.self_attn.attn blocks of 32768 bytes .* needs 33024 bytes each"
    ):
        made.engine_layer.bind(torch.zeros(9, HEADS, 128, 2 * D, dtype=torch.uint8))
