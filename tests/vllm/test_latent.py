"""Latent attention (MLA) without an engine: vLLM's own layer, builder and expansion of prompts, over our pages."""

import pickle
import re
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla", reason="this vLLM has no latent attention on CPUs")

from torch.utils._python_dispatch import TorchDispatchMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig

import fp8attn
from fp8attn import PageSpec, UsageError, ops
from fp8attn.integrations.engine import Options
from fp8attn.integrations.vllm import LATENT_NAME, register
from fp8attn.integrations.vllm.latent import FP8LatentBackend
from fp8attn.integrations.vllm.supported import unsupported_config, unsupported_latents
from tests.vllm.latents import HEADS, LAYER, RANK, ROPE, Layer, V
from tests.vllm.test_plugin import connected, good

TABLES = [[7, 2, 5, 0], [3, 8, 1, 0]]
CLOSE = 2**-8  # of BF16's results in vLLM's steps; 0.0023 to 0.0033 were measured


def error_of(layer, output, new, tables, lengths, from_pages):
    """The largest error of the sequences of a step, relative to the norm of what is expected.

    Args:
        new: queries, latents and keys with RoPE of the new tokens of each sequence.
        lengths: tokens of each sequence, with the new ones.
        from_pages: of each sequence, whether its new tokens are read from pages, as of decodes.
    """
    latents, ropes = layer.pages()
    errors = []
    for out, (q, latent, rope), table, length, decode in zip(
        output.split([len(q) for q, _, _ in new]), new, tables, lengths, from_pages, strict=True
    ):
        keys = [x[table].flatten(0, 1)[:length].clone() for x in (latents, ropes)]
        if not decode:
            for key, x in zip(keys, (latent, rope), strict=True):
                key[-len(q) :] = x.double()
        expected = layer.expected(q, *keys)
        errors.append(float((out.double() - expected).norm() / expected.norm()))
    return max(errors)


def step(layer, queries, lengths, tables, seed, **common):
    """A step of new tokens. Returns its output, the tokens, and the lengths of the sequences after it."""
    new = [layer.tokens(count, 10 * seed + seq) for seq, count in enumerate(queries)]
    lengths = [length + count for length, count in zip(lengths, queries, strict=True)]
    metadata = layer.builder.build(0, layer.common(queries, lengths, tables, **common))
    return layer.run(*map(torch.cat, zip(*new, strict=True)), metadata), new, lengths


@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (256, 64), (512, 0)])
def test_a_layers_steps(tmp_path, rank, rope):
    """Prompts in chunks beside decodes, in scattered blocks full of other bytes. What a step reads from pages is what
    they hold, to BF16's rounding, and they hold what one append of all tokens writes, to the bit.
    """
    layer = Layer(tmp_path, rank=rank, rope=rope)
    assert layer.spec.page_size_bytes == 128 * (rank + 2 * rope + 4)
    lengths, tokens = [0, 0], [[], []]
    for number, queries in enumerate(([150, 300], [1, 90], [1, 1], [1, 1])):
        output, new, lengths = step(layer, queries, lengths, TABLES, number)
        decodes = [count == 1 for count in queries]
        assert error_of(layer, output, new, TABLES, lengths, decodes) < CLOSE
        for seq, one in enumerate(new):
            tokens[seq].append(one)
    for seq, parts in enumerate(tokens):
        _, latent, key = map(torch.cat, zip(*parts, strict=True))
        whole = fp8attn.KVPages.empty(4, 1, PageSpec.latent(rank, rope), 1, 4)
        fp8attn.append(whole, latent[:, None], key[:, None])
        written = whole.with_pool(layer.impl.engine_layer.pool[TABLES[seq]])
        for x, y in zip(written.read(0, lengths[seq]), whole.read(0, lengths[seq]), strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("rows", [128, 256, 1024])
def test_contexts_in_parts(tmp_path, monkeypatch, rows):
    """vLLM gathers the context of chunks in parts of `rows` tokens, which may end inside a sequence. 100 tokens are
    dequantized at a time. One prompt has no context.
    """
    monkeypatch.setattr("fp8attn.integrations.vllm.latent.CONTEXT_BLOCK", 100)
    layer, tables = Layer(tmp_path), [*TABLES, [6, 9, 10, 0]]
    layer.builder.chunked_prefill_workspace_size = rows
    lengths = step(layer, [200, 390], [0, 0], TABLES, 0)[2]
    output, new, lengths = step(layer, [100, 50, 40], [*lengths, 0], tables, 1)
    context = layer.builder.build(0, layer.common([100, 50, 40], lengths, tables)).prefill.chunked_context
    assert len(context.chunks) == {128: 6, 256: 3, 1024: 1}[rows]
    # vLLM rounds the output to BF16 with each part that it adds: 0.0043 was measured for 128.
    assert error_of(layer, output, new, tables, lengths, [False] * 3) < 2 * CLOSE


def test_drafts_are_verified_by_absorbed_queries(tmp_path):
    """A decode of one token, two that verify drafts of which one was cut, and a prompt."""
    layer, tables = Layer(tmp_path), [[7], [2], [5], [3]]
    layer.builder.reorder_batch_threshold = 4
    lengths = step(layer, [60, 61, 62], [0, 0, 0], tables[:3], 0)[2]
    output, new, lengths = step(layer, [1, 4, 3, 20], [*lengths, 0], tables, 1)
    assert error_of(layer, output, new, tables, lengths, [True, True, True, False]) < CLOSE
    metadata = layer.builder.build(0, layer.common([1, 4, 3], lengths[:3], tables[:3]))
    assert metadata.num_prefills == 0 and metadata.step.parts[0].max_seqlen == 4


def test_requests_that_pad_a_graph(tmp_path):
    """They have no tokens and a length of zero, and their tables name block 0. Tokens that pad the step are NaN."""
    layer = Layer(tmp_path)
    lengths = step(layer, [60, 200], [0, 0], TABLES, 0)[2]
    new = [layer.tokens(1, 5 + seq) for seq in range(4)]
    packed = [torch.cat(x) for x in zip(*new, strict=True)]
    alone = layer.cache.clone()
    expected = layer.run(
        *(x[:2] for x in packed), layer.builder.build(0, layer.common([1, 1], [lengths[0] + 1, lengths[1] + 1], TABLES))
    )
    written, layer.cache[:] = layer.cache.clone(), alone
    for x in packed:
        x[2:] = torch.nan
    common = layer.common([1, 1, 0, 0], [lengths[0] + 1, lengths[1] + 1, 0, 0], [*TABLES, [0] * 4, [0] * 4], tokens=4)
    metadata = layer.builder.build(0, common)
    assert metadata.step.parts[0].cache_seqlens.data_ptr() == common.seq_lens.data_ptr()  # graphs read vLLM's buffers
    assert metadata.step.parts[0].cu_seqlens.data_ptr() == common.query_start_loc.data_ptr()
    output = layer.run(*packed, metadata)
    assert torch.equal(layer.cache, written) and torch.equal(output[:2], expected) and not output[2:].any()


@pytest.mark.parametrize("draft_index", [1, 2])
def test_drafts_past_the_longest_sequence_write_nothing(tmp_path, draft_index):
    layer = Layer(tmp_path)
    step(layer, [60, 200], [0, 0], TABLES, 0)
    before = layer.cache.clone()
    common = layer.common([1, 1], [draft_index, 61], [[3, 8], [7, 2]])
    metadata = layer.builder.build_for_drafting(common, draft_index)
    layer.run(*layer.tokens(2, 9), metadata)
    assert torch.equal(layer.cache[3], before[3]) and not torch.equal(layer.cache[7], before[7])
    first = layer.builder.build_for_drafting(common, 0)
    assert first.step.parts[0].cache_seqlens.tolist() == [draft_index, 61]
    assert layer.builder.update_draft_decode_metadata(first) is None
    speculation = SimpleNamespace(num_speculative_tokens=3, parallel_drafting=False)
    config = SimpleNamespace(speculative_config=speculation, use_v2_model_runner=True)
    assert type(layer.builder).get_varlen_cudagraph_max_query_len(config, None) == 4


class Waits(TorchDispatchMode):
    """Ops that wait for a GPU, or have a result whose size depends on values."""

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        name = str(function)
        assert not any(word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "unique")), name
        return function(*arguments, **options or {})


def test_nothing_waits_for_a_gpu(tmp_path, monkeypatch):
    """What the plugin does around an append and attention, which do not wait on a GPU, and the gather of a context."""
    layer = Layer(tmp_path)
    lengths = step(layer, [60, 200], [0, 0], TABLES, 0)[2]
    metadata = layer.builder.build(0, layer.common([1, 70], [lengths[0] + 1, lengths[1] + 70], TABLES))
    calls = []
    monkeypatch.setattr(ops, "run_append", lambda name, pages, x, rope, options: calls.append(len(x)))
    monkeypatch.setattr(ops, "run_attention", lambda name, q, *rest: (calls.append(len(q)) or q[..., :RANK], None))
    run = layer.impl
    _, latent, rope = layer.tokens(71, 1)
    monkeypatch.setattr(
        "fp8attn.integrations.vllm.latent.get_attention_context", lambda name: (metadata, None, None, None)
    )
    (chunk,) = metadata.prefill.chunked_context.chunks
    out = torch.empty(chunk.num_context_tokens, RANK + ROPE)
    with Waits(), torch.no_grad():
        run.do_kv_cache_update(latent, rope[:, None], layer.layer.kv_cache, None, "fp8", None, True)
        absorbed = torch.zeros(1, HEADS, RANK), torch.zeros(1, HEADS, ROPE)
        output, lse = run.forward_mqa(absorbed, layer.layer.kv_cache, metadata, layer.layer)
        run._gather(chunk, metadata.prefill.block_table[chunk.request_slice], out)
    assert calls == [1, 70, 1] and output.shape == (1, HEADS, RANK) and lse is None
    latents, ropes = (x[TABLES[1]].flatten(0, 1)[:200] for x in layer.pages())
    torch.testing.assert_close(out, torch.cat([latents, ropes], 1).float(), rtol=2**-11, atol=1e-6)


def test_kernels_are_compiled_at_the_start(tmp_path, monkeypatch):
    """On a GPU: those of all appends, and of attention of decodes only."""
    layer, calls = Layer(tmp_path), []
    monkeypatch.setattr("fp8attn.integrations.vllm.latent.warm_up", lambda *arguments: calls.append(arguments))
    device = torch.device("meta")
    FP8LatentBackend.get_builder_cls()(layer.spec, [LAYER], layer.config, device)
    assert calls == [([layer.impl.engine_layer], torch.bfloat16, device, 1)]


# What is refused


def test_the_backend_has_a_name_of_its_own():
    register()
    member = AttentionBackendEnum[LATENT_NAME]
    assert member.get_class() is FP8LatentBackend and pickle.loads(pickle.dumps(member)) is member
    assert FP8LatentBackend.is_mla() and FP8LatentBackend.get_name() == LATENT_NAME


def chosen(name, **changes):
    """What vLLM's platform for GPUs asks before it chooses the backend: an empty list if it does."""
    asked = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": None, "use_mla": True}
    options = AttentionSelectorConfig(**asked | changes)._asdict()
    return AttentionBackendEnum[name].get_class().validate_configuration(
        device_capability=SimpleNamespace(major=9, minor=0), **options
    )  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_sparse": True}, r"sparse \(DeepSeek V3.2, GLM 5\)"),
        ({"use_dcp": True}, "--decode-context-parallel-size"),
        ({"use_pcp": True}, "--prefill-context-parallel-size"),
        (
            {"use_mla": False},
            r"caches keys and values, .* --attention-backend FP8ATTN, .* \{\"full_attention\": \"FP8ATTN\"\}",
        ),
        ({"kv_cache_dtype": "auto"}, "pass --kv-cache-dtype fp8"),
        ({"use_batch_invariant": True}, "VLLM_BATCH_INVARIANT=1 .* leave it out"),
        ({"head_size": 160}, r"must have 512 \+ 64, 256 \+ 64, 512 \+ 0 channels"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"block_size": 64}, "leave out --block-size"),
    ],
)
def test_vllm_prints_the_reasons(changes, reason):
    register()
    assert chosen(LATENT_NAME) == chosen(LATENT_NAME, head_size=320, block_size=256) == []
    assert re.search(reason, chosen(LATENT_NAME, **changes)[-1])
    assert re.search("caches latents.*--attention-backend FP8ATTN_MLA", chosen("CUSTOM")[-1])


def config(**changes):
    """A configuration that is served, with changes."""
    space = SimpleNamespace(
        hf_text_config=SimpleNamespace(**{"index_topk": 2048} if "index_topk" in changes else {}),
        use_prefill_query_quantization=changes.get("use_prefill_query_quantization", False),
        fuse_rope_kvcache_cat_mla=changes.get("fuse_rope_kvcache_cat_mla", False),
        has_piecewise_cudagraphs=lambda: True,
        splitting_ops_contain_kv_cache_update=lambda: changes.get("splits", True),
    )
    configuration = good(use_mla=True, **changes)
    configuration.model_config.hf_text_config = space.hf_text_config
    configuration.attention_config = configuration.compilation_config = space
    space.pass_config = space.cudagraph_mode = space
    configuration.parallel_config.prefill_context_parallel_size = changes.get("prefill_context_parallel_size", 1)
    return configuration


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({"index_topk": 1}, {}, "sparse"),
        ({}, {"scales": "file"}, "option scales is for keys and values"),
        ({}, {"key_dtype": "e4m3"}, "in INT8: leave out the option key_dtype"),
        ({"is_hybrid": True}, {}, "linear attention layers beside latents"),
        ({"prefill_context_parallel_size": 2}, {}, "--prefill-context-parallel-size"),
        ({"decode_context_parallel_size": 2}, {}, "--decode-context-parallel-size"),
        ({"kv_transfer_config": connected("NixlConnector")}, {}, "no mark .* leave out --kv-transfer-config"),
        ({"use_prefill_query_quantization": True}, {}, "leave out use_prefill_query_quantization"),
        ({"fuse_rope_kvcache_cat_mla": True}, {}, '"fuse_rope_kvcache_cat_mla": false'),
        ({"splits": False}, {}, "FULL_DECODE_ONLY"),
        ({"kv_cache_dtype_skip_layers": ["0"]}, {}, "--kv-cache-dtype-skip-layers 0"),
        ({"dtype": torch.float32}, {}, "pass --dtype bfloat16"),
    ],
)
def test_configurations_that_are_refused(changes, options, reason):
    assert unsupported_config(config(), Options(), latents=True) is None
    assert unsupported_config(config(kv_transfer_config=connected("OffloadingConnector")), Options(), True) is None
    assert re.search(reason, unsupported_config(config(**changes), Options(**options), latents=True))
    assert LATENT_NAME in unsupported_config(config(), Options())
    assert unsupported_config(config(speculative_config=SimpleNamespace()), Options()) is None  # keys of a draft model


def test_batch_invariance_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert "VLLM_BATCH_INVARIANT=1" in unsupported_config(config(), Options(), latents=True)


def test_layers_that_are_refused(tmp_path, monkeypatch):
    assert unsupported_latents(PageSpec.latent(256, 64)) is None
    assert "have 448 + 64 channels, and must have 512 + 64," in unsupported_latents(PageSpec.latent(448, 64))
    layer = Layer(tmp_path)
    shape = {"q_lora_rank": None, "kv_lora_rank": RANK, "qk_nope_head_dim": 32, "qk_rope_head_dim": ROPE}
    shape |= {"qk_head_dim": 32 + ROPE, "v_head_dim": V, "kv_b_proj": layer.layer.kv_b_proj}
    monkeypatch.setattr("fp8attn.integrations.vllm.latent.get_current_vllm_config", lambda: layer.config)
    arguments = (HEADS, RANK + ROPE, 0.1, 1, None)
    for others, dtype, reason in (
        ({"indexer": object()}, "fp8", "has indexer, which fp8attn does not support"),
        ({"topk_indices_buffer": 1}, "fp8", "has topk_indices_buffer"),
        ({}, "auto", "Pass --kv-cache-dtype fp8"),
        ({}, "fp8_ds_mla", "Pass --kv-cache-dtype fp8"),
    ):
        with pytest.raises(UsageError, match=reason):
            FP8LatentBackend.get_impl_cls()(*arguments, None, dtype, None, **shape, **others)
    with pytest.raises(UsageError, match="has sliding_window"):
        FP8LatentBackend.get_impl_cls()(*arguments, 128, "fp8", None, **shape)

    class Own(type(layer.layer)):
        """A layer of a model that writes its blocks itself."""

    layer.layer.__class__, layer.impl.engine_layer = Own, None
    with pytest.raises(UsageError, match="its attention is a Own, and fp8attn knows vLLM's MLAAttention"):
        layer.impl.process_weights_after_loading(torch.bfloat16)
    assert LAYER in layer.config.compilation_config.static_forward_context
