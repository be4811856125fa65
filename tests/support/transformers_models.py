"""Small random transformers models, and a plain cache that holds what an FP8 cache holds, dequantized.

The plain cache (`Oracle`) knows nothing of pages: transformers' own layers keep K and V and move them about, and every
read quantizes all of them at once. So it checks appending, cropping, reordering and masks, and not the quantizer
(test_numerics does).
"""

import pytest
import torch
from transformers import (
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3nForCausalLM,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer

from fp8attn import fake_quantize
from fp8attn.formats import latent
from fp8attn.formats.rotation import rotate_back
from fp8attn.integrations import k_eq_v
from fp8attn.integrations.transformers import FP8Cache
from fp8attn.numerics import relative_error

VOCABULARY = 89
SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MIXED = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"head_dim": 64}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"hidden_size": 256}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 128}),
    "mistral": (MistralForCausalLM, MistralConfig, {"head_dim": 64, "sliding_window": None}),
    "qwen2-mixed": (Qwen2ForCausalLM, Qwen2Config, dict(hidden_size=256, use_sliding_window=True, **MIXED)),
    "phi3-partial-rotary": (
        Phi3ForCausalLM,
        Phi3Config,
        {
            "hidden_size": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        },
    ),
    "gemma2-softcap": (
        Gemma2ForCausalLM,
        Gemma2Config,
        dict(head_dim=64, attn_logit_softcapping=3.0, query_pre_attn_scalar=64, **MIXED),
    ),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, dict(head_dim=64, query_pre_attn_scalar=64, **MIXED)),
    "gemma3n-shared-kv": (
        Gemma3nForCausalLM,
        Gemma3nTextConfig,
        {
            "head_dim": 64,
            "sliding_window": 32,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "intermediate_size": [96] * 4,
            "activation_sparsity_pattern": [0.0] * 4,
            "laurel_rank": 8,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "gemma4-512-k-is-v-shared-kv": (
        Gemma4ForCausalLM,
        Gemma4TextConfig,
        {
            "head_dim": 64,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "sliding_window": 32,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
        },
    ),
    "diffllama-changes-v": (DiffLlamaForCausalLM, DiffLlamaConfig, {"head_dim": 64}),
    "gpt-oss-sinks": (
        GptOssForCausalLM,
        GptOssConfig,
        dict(head_dim=64, num_local_experts=2, num_experts_per_tok=1, **MIXED),
    ),
    "qwen3.5-linear": (
        Qwen3_5ForCausalLM,
        Qwen3_5TextConfig,
        {
            "head_dim": 64,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "nemotron-h-mamba": (
        NemotronHForCausalLM,
        NemotronHConfig,
        {
            "head_dim": 64,
            "layers_block_type": ["mamba", "attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 2,
        },
    ),
    "lfm2-conv": (Lfm2ForCausalLM, Lfm2Config, {"hidden_size": 256, "layer_types": ["conv", "full_attention", "conv"]}),
    "falcon-h1-hybrid": (
        FalconH1ForCausalLM,
        FalconH1Config,
        {
            "head_dim": 64,
            "mamba_d_ssm": 64,
            "mamba_n_heads": 4,
            "mamba_d_head": 16,
            "mamba_d_state": 16,
            "mamba_n_groups": 1,
        },
    ),
}
HYBRIDS = ("qwen3.5-linear", "nemotron-h-mamba", "lfm2-conv", "falcon-h1-hybrid")


def make(family="llama", **changes):
    """A random float32 model whose attention is neither flat nor one-hot, on `fp8_kv`."""
    cls, config, options = FAMILIES[family]
    torch.manual_seed(0)
    model = cls(config(**{**SHAPE, **options, **changes})).eval()
    for name, p in model.named_parameters():
        if p.dim() >= 2:
            p.data.normal_(std=0.9 / p.shape[-1] ** 0.5 if "embed" not in name else 1.0)
        elif name.endswith("sinks"):
            p.data.normal_(1.0)
    for name, p in model.named_parameters():
        if name.endswith(
            "k_proj.bias"
        ):  # Qwen2.5's K has offsets many times its own spread, where the rotation is slow
            p.data.unflatten(0, (-1, 2, 32))[:, :, 20:] = 10.0
    model.set_attn_implementation("fp8_kv")
    model.generation_config.eos_token_id = None
    return model


def two_shapes():
    """A Llama whose layer 1 has 4 KV heads, and the others 2. No model of transformers 5.23 has such full-attention
    layers by itself.
    """
    model = make()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        attention = type(model.model.layers[1].self_attn)(
            LlamaConfig(**{**SHAPE, "head_dim": 64, "num_key_value_heads": 4}), 1
        )
        for p in attention.parameters():
            p.data.normal_(std=0.9 / p.shape[-1] ** 0.5)
    attention.config = model.config
    model.model.layers[1].self_attn = attention
    model.config.per_layer_config = {1: {"num_key_value_heads": 4}}
    return model.eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread: with small matrices, more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class OracleLayer(DynamicLayer):
    options: dict
    key_matrix = None  # of keys that follow from values

    def update(self, key_states, value_states, *args, **kwargs):
        k, v = super().update(key_states, value_states, *args, **kwargs)
        if self.key_matrix is None:
            return fake_quantize(k, v, **self.options)
        rank, (x, rope) = v.shape[-1], k_eq_v.to_latent(k, v, self.key_matrix)
        codes, scale = latent.quantize(x.float(), rope=rope.float())
        x, rope = (rotate_back(codes * scale[..., None])[..., part] for part in (slice(rank), slice(rank, None)))
        return k_eq_v.key_of(x, rope, self.key_matrix).to(k.dtype), x.to(v.dtype)


class OracleHybridLayer(LinearAttentionAndFullAttentionLayer, OracleLayer):
    pass


ORACLES = {DynamicLayer: OracleLayer, LinearAttentionAndFullAttentionLayer: OracleHybridLayer}


class Oracle(DynamicCache):
    """The contents of FP8Cache, dequantized: all tokens are quantized at once, at every read."""

    def __init__(self, config, key_dtype="int8", rotate_keys=True, key_matrices=None):
        super().__init__(config=config)
        for index, layer in enumerate(self.layers):
            if type(layer) in ORACLES:
                self.layers[index] = ORACLES[type(layer)]()
                self.layers[index].options = {"key_dtype": key_dtype, "rotate_keys": rotate_keys}
                self.layers[index].key_matrix = (key_matrices or {}).get(index)


def bare(model, rotate_keys=True, **options):
    """An `FP8Cache` without what it reads from the weights: no means, and keys rotated as given.
    `Oracle` has neither.
    """
    cache = FP8Cache(model, rotate_keys=rotate_keys, **options)
    for group in cache.groups:
        for layer in group.layers:
            layer.k_mean, layer.v_mean, layer.rotate_keys = None, None, rotate_keys
        group.make_early()
    return cache


def plain(config, **_):
    return DynamicCache(config=config)


def prompt(batch=2, length=150):
    return torch.randint(3, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, cache, ids, mask=None, steps=6):
    """Logits of a prefill of all but `steps` tokens, and of the rest one by one."""
    n = ids.shape[1] - steps
    outs = [model(ids[:, :n], attention_mask=None if mask is None else mask[:, :n], past_key_values=cache).logits]
    for i in range(n, ids.shape[1]):
        part = None if mask is None else mask[:, : i + 1]
        outs.append(model(ids[:, i : i + 1], attention_mask=part, past_key_values=cache).logits)
    return torch.cat(outs, 1)


def generated(model, cache, ids, **options):
    """Tokens after the prompt, and their logits."""
    options = {
        "do_sample": False,
        "max_new_tokens": 8,
        "return_dict_in_generate": True,
        "output_logits": True,
    } | options
    out = model.generate(ids, past_key_values=cache, **options)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


def close(a, b, tolerance=2e-3):
    error = relative_error(a, b)
    assert error < tolerance, error


class using:
    """A context with another attention implementation."""

    def __init__(self, model, name):
        self.model, self.name = model, name

    def __enter__(self):
        self.model.set_attn_implementation(self.name)

    def __exit__(self, *_):
        self.model.set_attn_implementation("fp8_kv")
