"""vLLM's own layer of latent attention with the plugin, without an engine: steps of sequences, and what they should
give.
"""

import torch
from torch.nn.functional import linear
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.v1.attention.backend import CommonAttentionMetadata

from fp8attn.integrations.vllm.latent import FP8LatentBackend
from tests.integrations.engine.models import deepseek_v3

RANK, ROPE, HEADS, NOPE, V = 512, 64, 4, 32, 16
SCALE = (NOPE + ROPE) ** -0.5
LAYER = "model.layers.1.self_attn.attn"


class Projection(torch.nn.Module):
    """`kv_b_proj`: it expands latents to keys without RoPE and values of all heads."""

    def __init__(self, rank):
        super().__init__()
        draw = torch.Generator().manual_seed(3)
        weight = torch.randn(HEADS * (NOPE + V), rank, generator=draw) * rank**-0.5
        self.weight = torch.nn.Parameter(weight.bfloat16(), requires_grad=False)
        self.quant_method = None

    def forward(self, x):
        return linear(x, self.weight), None


class Layer:
    """A layer of latents in vLLM, its blocks and sequences.

    Attributes:
        layer: vLLM's `MLAAttention`.
        config: vLLM's.
        builder: of metadata.
        cache: its blocks, full of 0x7F.
        latents: for each sequence, all its latents and keys with RoPE.
    """

    def __init__(self, folder, blocks=12, rank=RANK, rope=ROPE, speculation=None, **options):
        model = deepseek_v3(kv_lora_rank=rank, qk_rope_head_dim=rope)
        model.bfloat16().save_pretrained(folder)
        self.config = VllmConfig(
            model_config=ModelConfig(str(folder), dtype="bfloat16", skip_tokenizer_init=True, max_model_len=1024),
            cache_config=CacheConfig(block_size=128, cache_dtype="fp8"), compilation_config=CompilationConfig(mode=0),
            scheduler_config=SchedulerConfig(max_model_len=1024, is_encoder_decoder=False), **options,
        )  # fmt: skip
        self.config.cache_config.block_size = 128  # the platform for CPUs has changed it
        self.config.speculative_config = speculation
        with set_current_vllm_config(self.config):
            self.layer = MLAAttention(
                HEADS, SCALE, NOPE, rope, V, None, rank, Projection(rank), cache_config=self.config.cache_config,
                prefix=LAYER, attn_backend=FP8LatentBackend,
            )  # fmt: skip
            self.layer.process_weights_after_loading(torch.bfloat16)
            self.spec = FP8LatentBackend.customize_spec(self.layer.get_kv_cache_spec(self.config))
            self.builder = FP8LatentBackend.get_builder_cls()(self.spec, [LAYER], self.config, torch.device("cpu"))
        self.cache = torch.full((blocks, 1, 128, self.spec.state_content_bytes), 0x7F, dtype=torch.uint8)
        self.layer.bind_kv_cache(self.cache)
        self.rank, self.rope, self.latents = rank, rope, {}

    @property
    def impl(self):
        return self.layer.impl

    def common(self, queries, lengths, tables, tokens=None):
        """vLLM's metadata of a step."""
        bounds = torch.tensor([0, *queries]).cumsum(0).int()
        sizes = torch.tensor(lengths, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=bounds, query_start_loc_cpu=bounds, seq_lens=sizes, num_reqs=len(queries),
            num_actual_tokens=sum(queries) if tokens is None else tokens, max_query_len=max(queries),
            max_seq_len=max(lengths), block_table_tensor=torch.tensor(tables, dtype=torch.int32),
            slot_mapping=torch.zeros(tokens or sum(queries), dtype=torch.int64), seq_lens_cpu_upper_bound=sizes,
        )  # fmt: skip

    def run(self, q, latent, rope, metadata):
        """The output of a step `[T, HEADS * V]`."""
        slots = {LAYER: torch.zeros(len(q), dtype=torch.int64)}
        with set_forward_context({LAYER: metadata}, self.config, slot_mapping=slots), torch.no_grad():
            return self.layer(q, latent, rope[:, None], output_shape=(len(q), HEADS * V))

    def tokens(self, count, seed):
        """Queries, latents and keys with RoPE of new tokens."""
        draw = torch.Generator().manual_seed(seed)
        sizes = (HEADS, NOPE + self.rope), (self.rank,), (self.rope,)
        return [torch.randn(count, *size, generator=draw).bfloat16() for size in sizes]

    def pages(self):
        """The layer's pages of one sequence with all blocks, dequantized: latents and keys with RoPE
        `[blocks, 128, ...]`.
        """
        from fp8attn.pages import KVPages

        pool = self.impl.engine_layer.pool
        table = torch.arange(len(pool), dtype=torch.int32)[None]
        pages = KVPages(pool, table, torch.zeros(1, dtype=torch.int32), self.impl.engine_layer.format)
        return [pages.dequantize(which, table.long(), torch.float64)[0, 0].unflatten(0, (-1, 128)) for which in "kv"]

    def expected(self, q, latent, rope):
        """Attention of queries `[n, HEADS, NOPE + rope]`, the last of a sequence, to all its tokens, in float64."""
        q, latent, rope = (x.double() for x in (q, latent, rope))
        expanded = linear(latent, self.layer.kv_b_proj.weight.double()).view(-1, HEADS, NOPE + V)
        k, v = expanded.split([NOPE, V], -1)
        scores = torch.einsum("qhd,khd->hqk", q[..., :NOPE], k) + torch.einsum("qhd,kd->hqk", q[..., NOPE:], rope)
        hidden = torch.ones(len(q), len(k), dtype=torch.bool).triu(len(k) - len(q) + 1)
        weights = (SCALE * scores).masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hqk,khv->qhv", weights, v).flatten(1)
