"""The plugin in SGLang without an engine: its registration, what SGLang refuses with it, and the memory of
the pages.
"""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("sglang")

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor import pool_configurator
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from transformers import DeepseekV2Config, LlamaConfig

from fp8attn import UsageError
from fp8attn.formats.spec import PageSpec
from fp8attn_sglang import supported_graphs
from fp8attn_sglang.pool import FP8PagePool
from tests.support.answers import MODEL


@pytest.fixture(autouse=True)
def loaded():
    load_plugins()


def resolved(**options):
    """SGLang's options, resolved."""
    given = ServerArgs(**({"model_path": MODEL, "device": "cpu", "attention_backend": "fp8attn"} | options))
    given.resolve_once()
    return resolved_view(given)


def test_sglang_finds_the_plugin():
    assert "fp8attn" in ATTENTION_BACKENDS


def test_pages_have_128_tokens_without_an_option():
    assert resolved().page_size == resolved(page_size=128).page_size == 128


def test_other_backends_are_left_alone():
    assert resolved(attention_backend="torch_native", page_size=64).page_size == 64


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"page_size": 64}, "a page has 128 tokens, and SGLang's would have 64: leave out --page-size"),
        (
            {"attention_backend": "torch_native", "decode_attention_backend": "fp8attn"},
            "prompts and decodes read the same pages",
        ),
        ({"kv_cache_dtype": "fp8_e5m2"}, "--kv-cache-dtype fp8_e5m2 is not used"),
        ({"enable_two_batch_overlap": True}, "--enable-two-batch-overlap is True"),
        ({"enable_hierarchical_cache": True}, "--enable-hierarchical-cache is True; it moves tokens of K and V"),
        ({"enable_lmcache": True}, "--enable-lmcache is True; it moves tokens of K and V"),
        ({"disaggregation_mode": "prefill"}, "--disaggregation-mode is 'prefill'; it moves tokens of K and V"),
        ({"pp_size": 2}, "--pp-size is 2"),
        ({"dtype": "float32"}, "must be bfloat16 or float16"),
    ],
)
def test_what_is_refused_before_the_start(options, reason):
    with pytest.raises(UsageError, match=f"fp8attn cannot serve this model: .*{reason}"):
        resolved(**options)


@pytest.mark.parametrize(
    ("decode", "prefill"), [("full", "breakable"), ("breakable", "full"), ("disabled", "disabled")]
)
def test_graphs_of_decodes_alone(caplog, decode, prefill):
    """Those that one graph records whole. Warnings name what has not run and what is not supported."""
    given = CudaGraphConfig.from_dict({"decode": {"backend": decode}, "prefill": {"backend": prefill}})
    found = supported_graphs(given)
    assert (found.decode.backend, found.prefill.backend) == ("full" if decode == "full" else "disabled", "disabled")
    assert (given.decode.backend, given.prefill.backend) == (decode, prefill)
    assert ("have never run on a GPU" in caplog.text) == (decode == "full")
    for phase, backend, stays in (
        ("decode", decode, decode != "breakable"),
        ("prefill", prefill, prefill == "disabled"),
    ):
        assert (f"CUDA graphs of the form {backend} are disabled for {phase}" in caplog.text) == (not stays)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            LlamaConfig(architectures=["LlamaForCausalLM"], hidden_size=400, num_attention_heads=4, head_dim=100),
            r"head_dim must be one of .*; got 100",
        ),
        (DeepseekV2Config(architectures=["DeepseekV2ForCausalLM"]), "it has multi-head latent attention"),
    ],
    ids=["head_dim", "mla"],
)
def test_models_that_are_refused_before_the_start(tmp_path, config, reason):
    config.save_pretrained(tmp_path)
    with pytest.raises(UsageError, match=f"fp8attn cannot serve this model: {reason}"):
        resolved(model_path=str(tmp_path), dtype="bfloat16")


def pool_of(size, page_size=128, **options):
    given = {"head_num": 2, "head_dim": 64, "layer_num": 3, "device": "cpu", "enable_memory_saver": False}
    return FP8PagePool(size, page_size=page_size, dtype=torch.bfloat16, **(given | options))


def test_the_budget_is_that_of_pages(monkeypatch):
    """As many tokens as fit with their headers; SGLang adds a page for padding, as it does in BF16."""
    parallel, kernel = SimpleNamespace(attn_tp_size=1, attn_dcp_size=1), SimpleNamespace(attention_backend="fp8attn")
    monkeypatch.setattr("sglang.srt.runtime_context.get_parallel", lambda: parallel)
    monkeypatch.setattr("sglang.srt.runtime_context.get_exec", lambda: SimpleNamespace(kernel=kernel))
    model = SimpleNamespace(head_dim=64, get_num_kv_heads=lambda *sizes: 2)
    found = object.__new__(pool_configurator.DefaultPoolConfigurator)
    found._cell_size, found._fixed_overhead_bytes = found._compute_cell_size(SimpleNamespace(model_config=model), 3), 0
    assert found._cell_size == 3 * 2 * PageSpec.of(64).layout.token_bytes == 3 * 2 * (2 * 64 + 1)
    budget = 1_000_000
    tokens = found.calculate_pool_sizes(budget, 128).max_total_num_tokens
    pool = pool_of(tokens)
    assert len(pool.pages) == 3 and pool.pages[0].shape == (tokens // 128 + 1, 2, 128 * 129)
    page = 128 * found._cell_size
    assert budget - page < pool.get_kv_size_bytes() - page <= budget


def test_nothing_writes_keys_and_values_by_tokens():
    """SGLang writes K and V itself where the pool has the dtype of the model."""
    pool = pool_of(256)
    assert isinstance(pool, MHATokenToKVPool) and pool.dtype == torch.uint8
    for call in (pool.get_key_buffer, pool.get_kv_buffer, pool.set_kv_buffer, pool.move_kv_cache, pool.get_cpu_copy):
        with pytest.raises(NotImplementedError, match="no K and V of single tokens"):
            call(0)


def test_pools_that_cannot_have_pages_are_refused():
    with pytest.raises(UsageError, match="pass --page-size 128"):
        pool_of(256, page_size=64)
    with pytest.raises(UsageError, match="64 channels and those of V 128"):
        pool_of(256, v_head_dim=128)
    with pytest.raises(UsageError, match="would add memory to the KV cache later"):
        pool_of(256, post_capture_active=True)
