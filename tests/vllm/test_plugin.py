"""What vLLM asks the plugin before the start, without an engine: its name, the bytes of blocks, what is refused."""

import multiprocessing
import pickle
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from pydantic import ValidationError
from vllm.config import ModelConfig, SpeculativeConfig
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from fp8attn import UsageError
from fp8attn.formats.spec import PageSpec
from fp8attn.integrations import vllm as plugin
from fp8attn.integrations.engine import Options
from fp8attn.integrations.vllm import LATENT_NAME, NAME, ON_CPU, register, specs, supported
from fp8attn.integrations.vllm.backend import FP8AttentionBackend
from fp8attn.integrations.vllm.supported import (
    unsupported_config,
    unsupported_invariance,
    unsupported_layer,
    unsupported_on_cpu,
    unsupported_recipe,
)
from fp8attn_tools.checkpoints.recipe import layers_to_choose, write_recipe
from tests.support.answers import MODEL
from tests.vllm.layers import HEADS, LAYER, PLAIN, D, connected, layer_impl


def path_in_a_new_process(pickled, answer):
    answer.put(pickle.loads(pickled).get_path())


@pytest.mark.skipif(not hasattr(AttentionBackendEnum, "register"), reason="this vLLM has CUSTOM only")
def test_the_name_arrives_in_a_spawned_process():
    """The process reads vLLM's config, with the backend in it, before it loads plugins. Plugins may be loaded several
    times.
    """
    register()
    register()
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    process = context.Process(target=path_in_a_new_process, args=(pickle.dumps(AttentionBackendEnum[NAME]), answer))
    process.start()
    assert answer.get(timeout=120).endswith("vllm.backend.FP8AttentionBackend")
    process.join(60)
    for member in AttentionBackendEnum:
        assert pickle.loads(pickle.dumps(member)) is member


@pytest.mark.parametrize(
    ("variable", "said"), [("1", "runs in fp8attn's backend reference"), ("0", "is installed and not used")]
)
def test_on_a_cpu_a_warning_says_what_is_used(variable, said, monkeypatch):
    warnings = []
    monkeypatch.setenv(ON_CPU, variable)
    monkeypatch.setattr(plugin.logger, "warning", lambda text, *given: warnings.append(text % given))
    plugin._say_what_cpus_use.cache_clear()
    register()
    register()
    (warning,) = warnings  # once in a process
    assert said in warning and ON_CPU in warning
    if variable == "1":
        members = AttentionBackendEnum.__members__
        own = {"CPU_ATTN": "CUSTOM", "CPU_MLA": LATENT_NAME if LATENT_NAME in members else "CUSTOM"}
        for name in own.keys() & members:
            assert members[name].get_path() == members[own[name]].get_path()


@pytest.mark.parametrize("pages", [1, 3])
@pytest.mark.parametrize("window", [None, 256])
def test_a_block_is_pages_of_each_head(window, pages):
    """Stock FP8 has 2 * head_dim bytes a token and head, a page 0.8% more at 64."""
    given = PLAIN | {"block_size": 128 * pages}
    spec = FullAttentionSpec(**given) if window is None else SlidingWindowSpec(**given, sliding_window=window)
    found = FP8AttentionBackend.customize_spec(spec)
    assert FP8AttentionBackend.customize_spec(found) == found
    assert (
        found.page_size_bytes
        == pages * HEADS * PageSpec.of(D).layout.nbytes
        == spec.page_size_bytes + pages * HEADS * 128
    )
    assert isinstance(found, type(spec))
    (tokens,) = FP8AttentionBackend.get_supported_kernel_block_sizes(found)
    assert pages * found.copy_with_new_block_size(tokens).page_size_bytes == found.page_size_bytes
    shape = FP8AttentionBackend.get_kv_cache_shape(7 * pages, tokens, HEADS, D)
    assert torch.Size(shape).numel() == 7 * found.page_size_bytes


@pytest.mark.parametrize(
    ("window_heads", "heads", "tokens", "of_latents"),
    [(16, 4, (128, 256), (128, 384)), (8, 2, (128, 256), (128, 384)), (1, 1, (256, 128), (512, 384)),
     (2, 1, (128, 128), (256, 384))],
    ids=["31B", "26B-A4B", "E2B", "31B on 8 GPUs"],
)  # fmt: skip
def test_blocks_of_gemma_4_are_whole_pages(window_heads, heads, tokens, of_latents):
    """vLLM makes blocks of layers of other shapes equally large, by their tokens if the bytes divide; a block with a
    gap has no pages.
    """
    try:
        from vllm.v1.core.kv_cache_planning import unify_kv_cache_spec_page_size  # from vLLM 0.33
    except ImportError:
        from vllm.v1.core.kv_cache_utils import unify_kv_cache_spec_page_size

    window = SlidingWindowSpec(**PLAIN | {"num_kv_heads": window_heads, "head_size": 256}, sliding_window=1024)
    full = FullAttentionSpec(**PLAIN | {"num_kv_heads": heads, "head_size": 512})
    latents = specs.of_keys(lambda config: full)(None)
    for pages, spec, wanted in ((PageSpec.of(512), full, tokens), (specs.KEYS_PAGES, latents, of_latents)):
        given = {name: FP8AttentionBackend.customize_spec(x) for name, x in (("window", window), ("full", spec))}
        found = unify_kv_cache_spec_page_size(given)
        assert (found["window"].block_size, found["full"].block_size) == wanted
        of_window, of_full = (x.block_size // 128 * x.num_kv_heads for x in (found["window"], found["full"]))
        assert found["window"].page_size_bytes == of_window * PageSpec.of(256).layout.nbytes
        assert found["full"].page_size_bytes == of_full * pages.layout.nbytes == found["window"].page_size_bytes


def good(**changes):
    model = {
        "use_mla": False,
        "is_hybrid": False,
        "get_sliding_window": lambda: None,
        "dtype": torch.bfloat16,
        "enable_sleep_mode": False,
    }
    rest = {
        "kv_cache_dtype_skip_layers": [],
        "decode_context_parallel_size": 1,
        "disable_hybrid_kv_cache_manager": False,
    }
    rest |= {"prefix_match_unit": None, "block_size": 128}
    model |= {name: value for name, value in changes.items() if name in model}
    space = SimpleNamespace(**(rest | {name: value for name, value in changes.items() if name in rest}))
    return SimpleNamespace(model_config=SimpleNamespace(**model), cache_config=space, parallel_config=space,
    scheduler_config=space,
                           kv_transfer_config=changes.get("kv_transfer_config"),
                           speculative_config=changes.get("speculative_config"),
                           diffusion_config=changes.get("diffusion_config"))  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_mla": True}, "caches latents .* pass --attention-backend FP8ATTN_MLA"),
        ({"prefix_match_unit": 32}, "--prefix-match-unit 32 .* or pass a multiple of 128"),
        (
            {"kv_cache_dtype_skip_layers": ["0", "5"]},
            "--kv-cache-dtype-skip-layers 0 5 .* one attention backend, .* leave it out",
        ),
        ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size.* use --tensor-parallel-size"),
        (
            {"disable_hybrid_kv_cache_manager": True, "get_sliding_window": lambda: 128},
            "--disable-hybrid-kv-cache-manager",
        ),
        ({"dtype": torch.float32}, "pass --dtype bfloat16"),
        ({"diffusion_config": SimpleNamespace(canvas_length=256)}, "later ones .* has causal attention only"),
        ({"kv_transfer_config": connected("LMCacheConnectorV1")}, "LMCachePagesConnector"),
        (
            {"kv_transfer_config": connected("ExampleConnector"), "block_size": 256},
            "ExampleConnector cannot .*: leave out --block-size",
        ),
        (
            {"kv_transfer_config": connected("NixlConnector"), "enable_sleep_mode": True},
            "leave out it or --kv-transfer-config",
        ),
    ],
)
def test_configurations_that_are_refused(changes, reason):
    assert unsupported_config(good(), Options()) is None
    assert re.search(reason, unsupported_config(good(**changes), Options()))


def recipe(*names, algorithm="FP8"):
    """As ModelOpt writes it."""
    return {"kv_cache_quantized_layers": {name: {"quant_algo": algorithm} for name in names}}


def test_a_recipe_of_layers_is_obeyed_or_refused(monkeypatch):
    """In both of its places: a file of its own, and the `quantization_config` of config.json."""
    own, other = "model.layers.3.self_attn", "model.layers.0.self_attn"
    for served in (None, {"quant_method": "fp8"}, recipe(other, own), {"quantization": recipe(own)}):
        assert layer_impl(monkeypatch, recipe=served)[0].engine_layer is not None
    assert layer_impl(monkeypatch, recipe=recipe(other), reads=other)[0].engine_layer is not None
    for refused in (recipe(other), {"quantization": recipe(own, algorithm="NVFP4")}):
        with pytest.raises(UsageError, match=rf"does not have {LAYER} in FP8. .* choose the backend by the dtype of"):
            layer_impl(monkeypatch, recipe=refused)


def test_vllm_passes_a_recipe_on(tmp_path):
    """It reads the file and serves the model in 16 bits, or in 8 with --kv-cache-dtype fp8."""
    for file in Path(MODEL).iterdir():
        (tmp_path / file.name).symlink_to(file)
    attentions = layers_to_choose(tmp_path)
    write_recipe(tmp_path, attentions, [1, 2, 3, 4, 5])
    model = ModelConfig(str(tmp_path), max_model_len=512)
    assert model.quantization is None
    assert unsupported_recipe(model, "model.layers.1.self_attn.attn") is None
    assert "model.layers.0.self_attn.attn" in unsupported_recipe(model, "model.layers.0.self_attn.attn")


def test_sleep_mode_is_refused_where_it_loses_something():
    asleep = good(enable_sleep_mode=True)
    assert unsupported_config(asleep, Options("file")) is None
    assert "leave out it or the option static_scales" in unsupported_config(asleep, Options("file", static_scales=True))
    assert unsupported_config(good(), Options("file", static_scales=True)) is None
    offloading = good(enable_sleep_mode=True, kv_transfer_config=connected("OffloadingConnector"))
    assert unsupported_config(offloading, Options()) is None


def test_batch_invariance_is_vllm_s_switch(monkeypatch, file_of_scales):
    """A page's own scale can grow after a step has attended over it, and windows have no other."""
    assert FP8AttentionBackend.supports_batch_invariance()
    static = Options("file", static_scales=True)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    assert unsupported_invariance(Options(), 128) is None
    given = {"fp8attn": {"scales": file_of_scales, "static_scales": True}}
    assert not layer_impl(monkeypatch, given)[0].engine_layer.batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert unsupported_invariance(static, None) is None
    assert "static_scales" in unsupported_invariance(Options(), None) and "window" in unsupported_invariance(
        static, 128
    )
    assert layer_impl(monkeypatch, given)[0].engine_layer.batch_invariant
    with pytest.raises(UsageError, match="VLLM_BATCH_INVARIANT=1 asks for"):
        layer_impl(monkeypatch, {})


@pytest.mark.parametrize(
    ("changes", "options", "reason"),
    [
        ({}, Options("file", static_scales=True), "clears new blocks, .*: leave out the option static_scales"),
        (
            {"kv_transfer_config": connected("NixlConnector")},
            Options(),
            "clears new blocks, .*: leave out --kv-transfer-config",
        ),
        ({"speculative_config": SimpleNamespace()}, Options(), "leave out --speculative-config"),
    ],
)
def test_what_is_refused_beside_layers_with_a_state(changes, options, reason):
    """Layers of Mamba or linear attention."""
    assert unsupported_config(good(is_hybrid=True), Options("file")) is None
    assert unsupported_config(good(**changes), options) is None
    assert re.search(
        f"Mamba or linear attention layers, .*{reason}", unsupported_config(good(is_hybrid=True, **changes), options)
    )


def test_on_a_cpu_layers_with_a_state_need_blocks_of_one_page(monkeypatch):
    """vLLM clears other pages there. `run_engine.clear_whole_blocks` mends it for tests."""
    assert unsupported_on_cpu(good(block_size=384)) is None and unsupported_on_cpu(good(is_hybrid=True)) is None
    assert re.search(
        "blocks of 384 tokens, .* that are in use; use a GPU", unsupported_on_cpu(good(is_hybrid=True, block_size=384))
    )
    monkeypatch.setattr(supported, "CPU_CLEARS_OTHER_PAGES", False)
    assert unsupported_on_cpu(good(is_hybrid=True, block_size=384)) is None


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        ((128, "auto", AttentionType.DECODER, None, {}), "Pass --kv-cache-dtype fp8"),
        ((128, "fp8_e5m2", AttentionType.DECODER, None, {}), "Pass --kv-cache-dtype fp8"),
        ((72, "fp8", AttentionType.DECODER, None, {}), "got 72"),
        ((128, "fp8", AttentionType.ENCODER_ONLY, None, {}), "causal attention of decoders only"),
        ((128, "fp8", AttentionType.DECODER, [0.5], {}), "ALiBi"),
        ((128, "fp8", AttentionType.DECODER, None, {"chunk_lookback": 1}), "chunk_lookback"),
    ],
)
def test_layers_that_are_refused(layer, reason):
    assert reason in unsupported_layer(*layer)


def test_layers_that_are_not_refused():
    assert (
        unsupported_layer(128, "fp8", AttentionType.DECODER, None, {"chunk_lookback": -1, "use_alibi_sqrt": False})
        is None
    )
    assert unsupported_layer(64, "fp8_e4m3", AttentionType.DECODER, None, {}) is None


def chosen(**changes):
    """What vLLM's platform for GPUs asks before it chooses the backend: an empty list if it does."""
    asked = AttentionSelectorConfig(
        **({"head_size": 128, "dtype": torch.bfloat16, "kv_cache_dtype": "fp8", "block_size": None} | changes)
    )
    return FP8AttentionBackend.validate_configuration(
        device_capability=SimpleNamespace(major=9, minor=0), **asked._asdict()
    )


@pytest.mark.parametrize("feature", ["has_sliding_window", "has_sink", "use_kv_connector", "use_per_head_quant_scales"])
def test_layers_that_gpus_serve(feature):
    """On a CPU vLLM does not ask, so engines do not show it."""
    assert chosen(**{feature: True}) == []


def test_vllm_s_drafts_are_chains():
    """It removed trees of drafts and their backend (vllm#42121). If it has them again, the plugin must read or refuse
    their masks.
    """
    options = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    assert SpeculativeConfig(**options).num_speculative_tokens == 3
    with pytest.raises(ValidationError, match="speculative_token_tree"):
        SpeculativeConfig(**options, speculative_token_tree="[(0,), (1,)]")
    assert "TREE_ATTN" not in AttentionBackendEnum.__members__


def test_vllm_prints_the_reasons():
    assert chosen(block_size=128) == chosen(block_size=384) == chosen(head_size=512) == []
    assert "Pass --kv-cache-dtype fp8" in chosen(kv_cache_dtype="auto")[0]
    for changes, word in (
        ({"block_size": 16}, "leave out --block-size"), ({"block_size": 192}, "multiple of 128"),
        ({"dtype": torch.float32}, "pass --dtype bfloat16"),
        ({"use_non_causal": True}, "non-causal"), ({"use_mm_prefix": True}, "serve text alone"),
    ):  # fmt: skip
        (reason,) = chosen(**changes)
        assert word in reason
