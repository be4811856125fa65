"""SGLang's attention layers as layers of `fp8attn.integrations.engine`."""

from __future__ import annotations

from typing import Any

from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel

from fp8attn import UsageError
from fp8attn.integrations.engine.layer import EngineLayer
from fp8attn.integrations.engine.options import Options
from fp8attn.integrations.engine.static import ServedModel, static_state

from .pool import FP8PagePool
from .supported import unsupported_layer


def engine_layers(runner: Any, options: Options) -> dict[RadixAttention, EngineLayer]:
    """The attention layers of a model, with their pages bound. Two layers of one number would share pages, so they are
    refused.

    Args:
        runner: SGLang's `ModelRunner`, whose model and pools are loaded.
        options: of fp8attn.
    Raises:
        UsageError: a layer is not supported, or the file of scales is of another model.
    """
    pool, model, parallel = runner.token_to_kv_pool, runner.model_config, get_parallel()
    assert isinstance(pool, FP8PagePool), (
        f"SGLang made a {type(pool).__name__}; please report the model and the options"
    )
    total = model.get_total_num_kv_heads()
    served = ServedModel(model.model_path, model.revision, model.context_len, model.num_hidden_layers, total)
    first = parallel.attn_tp_rank * total // parallel.attn_tp_size
    layers: dict[RadixAttention, EngineLayer] = {}
    for name, layer in runner.model.named_modules():
        if not isinstance(layer, RadixAttention):
            continue
        if (reason := unsupported_layer(layer)) is not None:
            raise UsageError(f"fp8attn cannot serve this model: {reason}")
        if any(layer.layer_id == other.layer_id for other in layers):
            raise UsageError(
                f"fp8attn cannot serve this model: two of its layers have the keys of layer {layer.layer_id}"
            )
        heads = slice(first, first + layer.tp_k_head_num)
        window = layer.sliding_window_size
        layers[layer] = EngineLayer(
            layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim, options=options,
            static=static_state(options, served, layer.layer_id, heads, layer.head_dim), device=pool.device,
            softmax_scale=layer.scaling,
            window=window + 1 if window > -1 else None,  # SGLang's does not count the token itself
            softcap=layer.logit_cap or None, name=name,
        )  # fmt: skip
        layers[layer].bind(pool.pages[layer.layer_id - pool.start_layer])
    return layers
