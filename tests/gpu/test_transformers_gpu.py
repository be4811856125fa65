"""A small Llama in BF16 on the GPU: the kernels under `FP8Cache`, growing and static, uncompiled, compiled and in CUDA
graphs.
"""

import pytest
import torch

pytest.importorskip("transformers")

from transformers import CompileConfig, DynamicCache, LlamaConfig, LlamaForCausalLM

from fp8attn.integrations.transformers import FP8Cache
from fp8attn.numerics import relative_error

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PROMPT, NEW = 700, 40
CLOSE = 0.03  # BF16 rounds at 2^-9, in another order in every implementation, and FP8 codes flip with it
QUANTIZED = 0.10


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=997, hidden_size=512, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=128, max_position_embeddings=4096, bos_token_id=1, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, p in model.named_parameters():
        if p.dim() == 2:
            p.data.normal_(std=1.0 if "embed" in name else 0.9 / p.shape[1] ** 0.5)
    model = model.to("cuda", torch.bfloat16)
    model.set_attn_implementation("fp8_kv")
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(3, 997, (3, PROMPT), generator=torch.Generator().manual_seed(1)).cuda()


@pytest.fixture(scope="module")
def mask(ids):
    mask = torch.ones_like(ids)
    mask[1, :200] = 0
    mask[2, :13] = 0
    return mask


def generated(model, cache, ids, mask, **options):
    options = {
        "do_sample": False,
        "max_new_tokens": NEW,
        "return_dict_in_generate": True,
        "output_logits": True,
    } | options
    out = model.generate(ids, attention_mask=mask, past_key_values=cache, **options)
    return out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1)


@torch.no_grad()
def forced(model, cache, ids, mask, steps=20):
    """Logits of the last `steps` tokens of `ids`, fed one by one."""
    n = ids.shape[1] - steps
    model(ids[:, :n], attention_mask=mask[:, :n], past_key_values=cache, logits_to_keep=1)
    outs = [
        model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], past_key_values=cache).logits
        for i in range(n, ids.shape[1])
    ]
    return torch.cat(outs, 1)


def test_the_kernels_agree_with_the_dequantized_cache_and_with_bf16(model, ids, mask):
    ours = forced(model, FP8Cache(model), ids, mask)
    exact = forced(model, DynamicCache(config=model.config), ids, mask)
    model.set_attn_implementation("sdpa")
    dequantized = forced(model, FP8Cache(model), ids, mask)
    model.set_attn_implementation("fp8_kv")
    assert ours.isfinite().all()
    assert relative_error(ours, dequantized) < CLOSE
    assert relative_error(ours, exact) < QUANTIZED


def test_the_kernels_agree_with_the_reference(model, ids, mask):
    ours, reference = (
        forced(model, FP8Cache(model, backend=backend), ids, mask, 4) for backend in ("auto", "reference")
    )
    assert relative_error(ours, reference) < CLOSE


def test_left_padded_rows_equal_rows_alone(model, ids, mask):
    together = forced(model, FP8Cache(model), ids, mask)
    for row, padding in enumerate((0, 200, 13)):
        alone = ids[row : row + 1, padding:]
        assert (
            relative_error(together[row : row + 1], forced(model, FP8Cache(model), alone, torch.ones_like(alone)))
            < QUANTIZED
        )


def test_static_equals_growing(model, ids, mask):
    growing = generated(model, FP8Cache(model), ids, mask)
    static = generated(model, FP8Cache(model, max_cache_len=PROMPT + NEW), ids, mask, disable_compile=True)
    assert torch.equal(growing[0], static[0])
    assert relative_error(static[1], growing[1]) < 1e-6


@pytest.mark.parametrize("skip", [(), (0,)])
def test_cuda_graphs_change_nothing(model, ids, mask, skip):
    """Graphs replay the same kernels, so the tokens are the same."""
    eager = generated(
        model, FP8Cache(model, skip_layers=skip, max_cache_len=PROMPT + NEW), ids, mask, disable_compile=True
    )
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs = generated(
        model,
        FP8Cache(model, skip_layers=skip, max_cache_len=PROMPT + NEW),
        ids,
        mask,
        compile_config=CompileConfig(backend="cudagraphs", mode=None, fullgraph=True),
    )
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert torch.equal(graphs[0], eager[0])


def test_generate_compiles_with_inductor_and_cuda_graphs(model, ids, mask):
    """What `generate` does by itself with a static cache: mode="reduce-overhead"."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    caches = [FP8Cache(model, max_cache_len=PROMPT + NEW) for _ in range(2)]
    compiled = generated(model, caches[0], ids, mask, compile_config=CompileConfig(fullgraph=True))
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["inductor"]["cudagraph_skips"], dict(counters["inductor"])
    eager = generated(model, caches[1], ids, mask, disable_compile=True)
    same = (
        (compiled[0] == eager[0]).long().cumprod(1).bool()
    )  # fused BF16 arithmetic rounds otherwise: a near tie may fall differently
    assert same.float().mean() > 0.5
    assert relative_error(compiled[1][same], eager[1][same]) < CLOSE


def test_beam_search_and_prompt_lookup(model, ids, mask):
    beams = [
        generated(model, cache, ids, mask, num_beams=3, disable_compile=True)[0]
        for cache in (FP8Cache(model), FP8Cache(model, max_cache_len=PROMPT + NEW))
    ]
    assert torch.equal(*beams)
    repeated, ones = ids[:1, :100].repeat(1, 4), mask[:1, :400]
    greedy = generated(model, FP8Cache(model), repeated, ones)
    looked_up = generated(model, FP8Cache(model), repeated, ones, prompt_lookup_num_tokens=5)
    same = (greedy[0] == looked_up[0]).long().cumprod(1).bool()
    assert same.float().mean() > 0.5
    assert relative_error(looked_up[1][same], greedy[1][same]) < CLOSE
