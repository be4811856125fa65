"""A layer of the plugin without an engine: what vLLM gives it, as far as it reads that."""

from types import SimpleNamespace

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec

from fp8attn.integrations.vllm import impl as impl_module
from fp8attn.integrations.vllm.impl import FP8AttentionImpl

HEADS, GROUP, D = 2, 2, 64
PLAIN = {"block_size": 128, "num_kv_heads": HEADS, "head_size": D, "dtype": torch.uint8}


class Step(SimpleNamespace):
    """What a builder reads of a step: `queries` new tokens of sequences of `lengths` tokens, in the blocks
    of `tables`.
    """

    def __init__(self, queries, lengths, tables):
        bounds = torch.tensor([0, *queries]).cumsum(0).int()
        super().__init__(
            num_reqs=len(queries), num_actual_tokens=sum(queries), max_query_len=max(queries), query_start_loc=bounds,
            query_start_loc_cpu=bounds, seq_lens=torch.tensor(lengths, dtype=torch.int32), max_seq_len=max(lengths),
            block_table_tensor=torch.tensor(tables, dtype=torch.int32), is_prefilling=None,
            causal=True,
        )  # fmt: skip


LAYER = "model.layers.3.self_attn.attn"


def connected(name, **own):
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=own)


def layer_impl(
    monkeypatch, additional_config=None, checkpoint="a model without a folder", rank=0, ranks=1, connector=None,
    sleep=False, name=LAYER,
    target=None, recipe=None, reads=None, **options,
):  # fmt: skip
    model = SimpleNamespace(
        use_mla=False, is_hybrid=False, get_total_num_kv_heads=lambda: ranks * HEADS,
        hf_text_config=SimpleNamespace(num_hidden_layers=4), hf_config=SimpleNamespace(quantization_config=recipe),
        get_sliding_window=lambda: None, model=str(checkpoint), revision=None, max_model_len=512,
        enable_sleep_mode=sleep, dtype=torch.bfloat16,
    )  # fmt: skip
    parallel = SimpleNamespace(decode_context_parallel_size=1)
    cache = SimpleNamespace(kv_cache_dtype_skip_layers=[], prefix_match_unit=None, block_size=128)
    config = SimpleNamespace(
        model_config=model, parallel_config=parallel, cache_config=cache,
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        additional_config=additional_config or {}, diffusion_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}), kv_transfer_config=connector,
        speculative_config=target and SimpleNamespace(target_model_config=SimpleNamespace(model=target, revision=None,
        max_model_len=512)),
    )  # fmt: skip
    monkeypatch.setattr(impl_module, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(impl_module, "get_tensor_model_parallel_rank", lambda: rank)
    monkeypatch.setattr(impl_module, "get_tensor_model_parallel_world_size", lambda: ranks)
    made = FP8AttentionImpl(GROUP * HEADS, D, 0.125, HEADS, kv_cache_dtype="fp8", **options)
    layer = torch.nn.Module()
    layer.impl, layer.layer_name, layer._k_scale = made, name, torch.ones(1)
    layer.kv_sharing_target_layer_name = reads
    layer.get_kv_cache_spec = lambda config: FullAttentionSpec(**PLAIN)
    config.compilation_config.static_forward_context[name] = layer
    made.process_weights_after_loading(torch.bfloat16)
    return made, layer


def prompt(builder, made, layer, cache, length=200, table=(1, 2)):
    """The output of one prompt."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(length, heads, D, generator=generator) + 1 for heads in (GROUP * HEADS, HEADS, HEADS))
    return made.forward(layer, q, k, v, cache, builder.build(0, Step([length], [length], [list(table)])), q * 0)


def means_of(made):
    """The static means of K, as it is stored, and of V."""
    return made.engine_layer.format.stored_k_mean, made.engine_layer.format.v_mean
