"""The plugin's parts with vLLM, without an engine: blocks, the parts of a step, a layer's forward, what is refused."""

import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from fp8attn import KVPages, KVScales, LayerScales, UsageError, reference
from fp8attn.integrations.transformers.biases import layer_biases
from fp8attn.integrations.vllm import impl as impl_module
from fp8attn.integrations.vllm import metadata as metadata_module
from fp8attn.integrations.vllm import metrics as metrics_module
from fp8attn.integrations.vllm import specs
from fp8attn.integrations.vllm.backend import FP8AttentionBackend
from fp8attn.integrations.vllm.impl import FP8AttentionImpl, overflows
from fp8attn.integrations.vllm.metadata import FP8AttentionMetadataBuilder
from fp8attn.integrations.vllm.supported import unsupported_config, unsupported_layer
from fp8attn.layout import page_bytes
from fp8attn.params import AttentionParams
from fp8attn.rotation import rotate
from tests.integrations.test_vllm import qwen2

HEADS, GROUP, D = 2, 2, 64
PLAIN = {"block_size": 128, "num_kv_heads": HEADS, "head_size": D, "dtype": torch.uint8}


@pytest.mark.parametrize("window", [None, 256])
def test_a_block_is_a_page_of_each_head(window):
    """In both ways in which vLLM's releases learn it. Stock FP8 has 2 * head_dim bytes a token and head, a page 0.8% more at 64."""
    spec = FullAttentionSpec(**PLAIN) if window is None else SlidingWindowSpec(**PLAIN, sliding_window=window)
    if specs.BACKEND_IS_ASKED:
        found = FP8AttentionBackend.customize_spec(spec)
        assert FP8AttentionBackend.customize_spec(found) == found
    else:
        found = specs.of_layer(lambda config: spec)(None)
    assert found.page_size_bytes == HEADS * page_bytes(D) == spec.page_size_bytes + HEADS * 128
    assert isinstance(found, type(spec))
    shape = FP8AttentionBackend.get_kv_cache_shape(7, 128, HEADS, D)
    assert torch.Size(shape).numel() == 7 * found.page_size_bytes


class Step(SimpleNamespace):
    """What a builder reads of a step: `queries` new tokens of sequences of `lengths` tokens, in the blocks of `tables`."""

    def __init__(self, queries, lengths, tables):
        bounds = torch.tensor([0, *queries]).cumsum(0).int()
        super().__init__(
            num_reqs=len(queries), num_actual_tokens=sum(queries), max_query_len=max(queries), query_start_loc=bounds,
            query_start_loc_cpu=bounds, seq_lens=torch.tensor(lengths, dtype=torch.int32), max_seq_len=max(lengths),
            block_table_tensor=torch.tensor(tables, dtype=torch.int32), is_prefilling=None,
        )  # fmt: skip


@pytest.fixture
def builder(monkeypatch):
    monkeypatch.setattr(metadata_module.AttentionMetadataBuilder, "__init__", lambda self, *args: None)
    made = object.__new__(FP8AttentionMetadataBuilder)
    made.reorder_batch_threshold = 1
    return made


def test_decodes_and_prompts_are_two_parts(builder):
    step = Step([1, 1, 5, 200], [300, 20, 5, 456], [[i * 6 + j for j in range(6)] for i in range(4)])
    decodes, prompts = builder.build(0, step).parts
    assert (decodes.tokens, decodes.max_seqlen, decodes.cu_seqlens.tolist()) == (slice(0, 2), 1, [0, 1, 2])
    assert decodes.cache_seqlens.tolist() == [300, 20] and decodes.page_table.tolist() == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]]
    assert decodes.cache_seqlens.data_ptr() == step.seq_lens.data_ptr()  # CUDA graphs read vLLM's buffers
    # The prompts' table is as wide as the longest sequence.
    assert (prompts.tokens, prompts.max_seqlen, prompts.cu_seqlens.tolist()) == (slice(2, 207), 200, [0, 5, 205])
    assert prompts.cache_seqlens.tolist() == [5, 456] and prompts.page_table.tolist() == [[12, 13, 14, 15], [18, 19, 20, 21]]
    for x in (prompts.cu_seqlens, prompts.cache_seqlens, prompts.page_table):
        assert x.data_ptr() % 16 == 0  # otherwise kernels would be compiled while serving


@pytest.mark.parametrize(("queries", "count"), [([1, 1, 1], 1), ([7, 200], 1), ([3, 3], 1)])
def test_a_step_of_one_kind_is_one_part(builder, queries, count):
    if queries == [3, 3]:  # verification of two drafts
        builder.reorder_batch_threshold = 3
    parts = builder.build(0, Step(queries, [300] * len(queries), [[0, 1, 2]] * len(queries))).parts
    assert len(parts) == count and parts[0].tokens == slice(0, sum(queries)) and parts[0].max_seqlen == max(queries)


@pytest.mark.parametrize(("queries", "equal"), [([200], True), ([90, 90], True), ([90, 80], False), ([1, 90], False)])
def test_prompts_of_equal_lengths_need_no_bounds(builder, queries, equal):
    part = builder.build(0, Step(queries, [300] * len(queries), [[0, 1, 2]] * len(queries))).parts[-1]
    assert part.max_seqlen == max(queries) and (part.cu_seqlens is None) == equal


def test_padded_requests_of_a_graph(builder):
    """They have no tokens and a length of zero, and their tables name block 0."""
    step = Step([1, 1, 0, 0], [300, 20, 0, 0], [[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]])
    (part,) = builder.build(0, step).parts
    assert part.cu_seqlens.tolist() == [0, 1, 2, 2, 2] and part.cache_seqlens.tolist() == [300, 20, 0, 0]


LAYER = "model.layers.3.self_attn.attn"


def layer_impl(monkeypatch, additional_config=None, checkpoint="a model without a folder", rank=0, ranks=1, **options):
    model = SimpleNamespace(
        use_mla=False, is_hybrid=False, get_total_num_kv_heads=lambda: ranks * HEADS, hf_text_config=SimpleNamespace(num_hidden_layers=4),
        get_sliding_window=lambda: None, model=str(checkpoint), revision=None, max_model_len=512,
    )  # fmt: skip
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    config = SimpleNamespace(
        model_config=model, parallel_config=parallel, cache_config=SimpleNamespace(kv_cache_dtype_skip_layers=[]),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False), additional_config=additional_config or {},
        compilation_config=SimpleNamespace(static_forward_context={}),
    )  # fmt: skip
    monkeypatch.setattr(impl_module, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(impl_module, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(impl_module, "get_tensor_model_parallel_world_size", lambda: ranks)
    made = FP8AttentionImpl(GROUP * HEADS, D, 0.125, HEADS, kv_cache_dtype="fp8", **options)
    layer = torch.nn.Module()
    layer.impl, layer.layer_name, layer._k_scale = made, LAYER, torch.ones(1)
    layer.get_kv_cache_spec = lambda config: FullAttentionSpec(**PLAIN)
    config.compilation_config.static_forward_context[LAYER] = layer
    made.process_weights_after_loading(torch.bfloat16)
    return made, layer


@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"logits_soft_cap": 20.0}, {"sinks": torch.tensor([0.0, 1.0, 2.0, 3.0])}])
def test_a_layers_steps(builder, monkeypatch, options):
    """A prompt in two chunks beside a decode, in scattered poisoned blocks: the bytes of one append, and the reference's output."""
    torch.manual_seed(0)
    made, layer = layer_impl(monkeypatch, {"fp8attn": {"count_overflows": True}}, **options)
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
        whole = KVPages.from_dense(k[i : i + 1, :length].transpose(1, 2), v[i : i + 1, :length].transpose(1, 2), backend="reference")
        used = made._pool[tables[i]][: whole.num_pages]
        pages = KVPages.trusted(used, whole.page_table, whole.cache_seqlens, *whole.state[3:])
        for x, y in zip(pages.read(0, length), whole.read(0, length), strict=True):
            assert torch.equal(x, y)  # whatever the chunks were
        window, softcap, sinks = (options.get(name) for name in ("sliding_window", "logits_soft_cap", "sinks"))
        params = AttentionParams(None, length, True, 0.125, window or 0, softcap or 0.0, sinks)
        expected, _ = reference.attention(q[i, :length], whole, params)
        # The last step: equal but for a step of BF16, because the order of the reference's sums depends on the number of rows. Before it, a
        # page's scale can be smaller than in the end (`numerics.settle`): values of up to 5 then differ by 5 / 127 at most.
        torch.testing.assert_close(outputs[i][-1], expected[-len(outputs[i][-1]) :], rtol=2**-7, atol=2**-12)
        torch.testing.assert_close(torch.cat(outputs[i]), expected, rtol=0, atol=5 / 127)

    report = overflows(layer)
    assert [(row.layer, row.kind, row.tokens, row.saturated) for row in report.rows] == [(3, "k", 543, 0), (3, "v", 543, 0)]
    assert report.rows[0].rescaled > 0  # an INT8 page's scale is set by its first token, with little headroom


def test_counts_need_the_option(monkeypatch):
    with pytest.raises(UsageError, match=r"nothing was counted: pass .*count_overflows"):
        overflows(layer_impl(monkeypatch)[1])


def test_counts_are_metrics(builder, monkeypatch):
    """A step publishes what is new since the last time, every 10 seconds."""
    made, layer = layer_impl(monkeypatch, {"fp8attn": {"count_overflows": True}})
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(metrics_module.time, "monotonic", lambda: clock.now)
    builder.metrics = metrics_module.OverflowMetrics([made.overflows])
    cache = torch.zeros(3, HEADS, 128, 2 * D + 1, dtype=torch.uint8)
    for length, now in ((60, 103.0), (64, 111.0), (70, 112.0), (90, 122.0), (91, 123.0)):
        clock.now = now
        step = Step([length], [length], [[1, 2]])
        x = torch.linspace(1, 9, length)[:, None, None].repeat(1, HEADS, D)  # every page's scale grows
        made.forward(layer, x.repeat(1, GROUP, 1), x, x, cache, builder.build(0, step), torch.empty(length, GROUP * HEADS, D))
    found = {
        (sample.name, sample.labels["kind"]): sample.value
        for counter in metrics_module._counters()
        for metric in counter.collect()
        for sample in metric.samples
        if sample.name.endswith("_total")
    }
    report = overflows(layer)
    tokens = 60 + 64 + 70  # at the copy before the step of 90, which the last step has published
    assert found["fp8attn:pages_total", "k"] == found["fp8attn:pages_total", "v"] == tokens * HEADS / 128
    assert 0 < found["fp8attn:rescaled_pages_total", "k"] < report.rows[0].rescaled


def test_means_of_a_calibration(builder, monkeypatch, tmp_path):
    """A large offset of K and V, which the file's means remove: what is left of the error is a hundredth."""
    torch.manual_seed(0)
    offset = 50.0
    ones, mean = torch.ones(HEADS), torch.full((HEADS, D), offset)
    KVScales({3: LayerScales(ones, ones, mean, mean)}, num_layers=4, num_kv_heads=HEADS, head_dim=D).save(tmp_path / "scales.safetensors")
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
    """Chunks of a prompt, whose pages get no scales of their own: each chunk's output is that of the whole prompt, also inside a page."""
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
        assert made.has_static_scales
        cache = torch.full((5, HEADS, 128, 2 * D + 1), 0x7F, dtype=torch.uint8)
        done, parts = 0, []
        for chunk in chunks:
            now = slice(done, done + chunk)
            done += chunk
            parts.append(
                made.forward(layer, q[now], k[now], v[now], cache, builder.build(0, Step([chunk], [done], [[4, 1, 3]])), q[now] * 0)
            )
        outputs.append(torch.cat(parts))
        header = made._pool[:, :, -128:].view(torch.float32)
        assert torch.equal(header[:, :, 0], scales.expand(5, HEADS)) and (header[:, :, 1] == 2.0**-4).all()
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-6, atol=1e-6)  # the order of sums depends on the number of rows

    layer.kv_cache = cache
    refused = "layers.3.self_attn.attn shares its blocks with model.layers.2.self_attn.attn, .* leave out static"
    for impl, reason in ((made, refused), (SimpleNamespace(), "layers.2.self_attn.attn has another attention backend .* leave out static")):
        other = SimpleNamespace(kv_cache=cache, layer_name="model.layers.2.self_attn.attn", impl=impl)
        made._config.compilation_config.static_forward_context["other"] = other
        made._pool = None
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
        k_mean, v_mean = made._state[:2]
        assert v_mean is None and made.has_means
        torch.testing.assert_close(k_mean, rotate(expected.k_mean[2 * rank :][:2]), rtol=1e-5, atol=1e-4)
    assert not layer_impl(monkeypatch)[0].has_means


def test_while_vllm_measures_memory(monkeypatch):
    output = torch.full((3, GROUP * HEADS, D), torch.nan)
    made, _ = layer_impl(monkeypatch)
    assert not made.forward(SimpleNamespace(), output, output, output, torch.empty(0), None, output).any()


def test_blocks_of_another_size_are_an_error(monkeypatch):
    made, layer = layer_impl(monkeypatch)
    with pytest.raises(RuntimeError, match=r"model.layers.3.self_attn.attn blocks of 32768 bytes .* needs 33024 bytes each"):
        made._bind(layer, torch.zeros(9, HEADS, 128, 2 * D, dtype=torch.uint8))


def good(**changes):
    model = {"use_mla": False, "is_hybrid": False, "get_sliding_window": lambda: None}
    rest = {"kv_cache_dtype_skip_layers": [], "decode_context_parallel_size": 1, "disable_hybrid_kv_cache_manager": False}
    model |= {name: value for name, value in changes.items() if name in model}
    space = SimpleNamespace(**(rest | {name: value for name, value in changes.items() if name in rest}))
    return SimpleNamespace(model_config=SimpleNamespace(**model), cache_config=space, parallel_config=space, scheduler_config=space)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "multi-head latent attention"),
        ({"is_hybrid": True}, "Mamba or linear attention"),
        ({"kv_cache_dtype_skip_layers": ["0", "5"]}, "--kv-cache-dtype-skip-layers 0 5 .* leave it out"),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size.* use --tensor-parallel-size"),
        ({"disable_hybrid_kv_cache_manager": True, "get_sliding_window": lambda: 128}, "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_configurations_that_are_refused(changes, reason):
    assert unsupported_config(good()) is None
    assert re.search(reason, unsupported_config(good(**changes)))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ((128, "auto", AttentionType.DECODER, None, {}), "Pass --kv-cache-dtype fp8"),
        ((128, "fp8_e5m2", AttentionType.DECODER, None, {}), "Pass --kv-cache-dtype fp8"),
        ((72, "fp8", AttentionType.DECODER, None, {}), "head_dim is 72"),
        ((128, "fp8", AttentionType.ENCODER_ONLY, None, {}), "causal attention of decoders only"),
        ((128, "fp8", AttentionType.DECODER, [0.5], {}), "ALiBi"),
        ((128, "fp8", AttentionType.DECODER, None, {"chunk_lookback": 1}), "chunk_lookback"),
    ],
)
def test_layers_that_are_refused(layer, reason):
    assert reason in unsupported_layer(*layer)


def test_layers_that_are_not_refused():
    assert unsupported_layer(128, "fp8", AttentionType.DECODER, None, {"chunk_lookback": -1, "use_alibi_sqrt": False}) is None
    assert unsupported_layer(64, "fp8_e4m3", AttentionType.DECODER, None, {}) is None


def chosen(**changes):
    """What vLLM's platform for GPUs asks before it chooses the backend: an empty list if it does."""
    asked = AttentionSelectorConfig(**({"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": None} | changes))
    return FP8AttentionBackend.validate_configuration(device_capability=SimpleNamespace(major=9, minor=0), **asked._asdict())


@pytest.mark.parametrize("feature", ["has_sliding_window", "has_sink", "use_kv_connector", "use_per_head_quant_scales"])
def test_layers_that_gpus_serve(feature):
    """On a CPU vLLM does not ask, so engines do not show it."""
    assert chosen(**{feature: True}) == []


def test_vllm_prints_the_reasons():
    assert chosen(block_size=128) == []
    assert "Pass --kv-cache-dtype fp8" in chosen(kv_cache_dtype="auto")[0]
    for changes, word in (({"block_size": 16}, "block"), ({"use_non_causal": True}, "non-causal"), ({"use_mm_prefix": True}, "multimodal")):
        (reason,) = chosen(**changes)
        assert word in reason
