"""transformers models on an FP8 cache, against the same models with a plain cache of the dequantized values."""

import copy

import pytest
import torch
from transformers import CompileConfig, GenerationConfig, StaticCache
from transformers.cache_utils import DynamicLayer

from fp8attn import ops
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.integrations.transformers import FP8Cache, fp8_kv_attention, fp8_kv_mask
from fp8attn.integrations.transformers.tensors import pages_of
from fp8attn.numerics import relative_error
from tests.support.transformers_models import (  # noqa: F401
    FAMILIES,
    MIXED,
    Oracle,
    bare,
    close,
    generated,
    logits,
    make,
    one_thread,
    plain,
    prompt,
    using,
)


@pytest.fixture(scope="module")
def llama():
    return make()


# Models


@pytest.mark.parametrize(
    ("family", "keys"),
    [*((family, {}) for family in FAMILIES), *((family, {"key_dtype": "e4m3"}) for family in ("llama", "qwen2",
    "phi3-partial-rotary")),
     ("llama", {"key_dtype": "e4m3", "rotate_keys": False}), ("llama", {"rotate_keys": False})],
)  # fmt: skip
def test_every_family_equals_a_plain_cache_of_the_rounded_values(family, keys):
    model, ids = make(family), prompt()
    ours, read_back = logits(model, bare(model, **keys), ids), bare(model, **keys)
    follow = {index: layer.key_matrix for index, layer in enumerate(read_back.layers) if hasattr(layer, "key_matrix")}
    with using(model, "eager"):
        oracle = logits(model, Oracle(model.config, key_matrices=follow, **keys), ids)
        exact = logits(model, plain(model.config), ids)
        dequantized = logits(model, read_back, ids)
    close(ours, oracle)
    close(dequantized, oracle)
    close(logits(model, bare(model, max_cache_len=ids.shape[1], **keys), ids), oracle)
    # E4M3 rounds by 2 to 3%. gpt-oss has a router, which magnifies; Qwen2 has offsets in K.
    assert 1e-3 < relative_error(ours, exact) < (0.15 if "gpt" in family else 0.06)
    close(logits(model, plain(model.config), ids), exact)  # without our cache, `fp8_kv` is sdpa with sinks and softcaps


@pytest.mark.parametrize(
    "family", ["llama", "gemma3", "gemma3n-shared-kv", "diffllama-changes-v", "gpt-oss-sinks", "gemma2-softcap"]
)
@pytest.mark.parametrize("static", [False, True])
def test_left_padding(family, static):
    model, ids = make(family), prompt()
    mask = torch.ones_like(ids)
    mask[1, :37] = 0
    # Rows of padding see nothing: zeros here, an average in eager attention. So padding's K differs, which decides a
    # page's first scale. The codes of E4M3, a floating-point format, do not depend on it.
    cache = bare(model, key_dtype="e4m3", max_cache_len=160 if static else None)
    ours = logits(model, cache, ids, mask)
    with using(model, "eager"):
        oracle = logits(model, Oracle(model.config, key_dtype="e4m3"), ids, mask)
    assert ours.isfinite().all()
    close(ours[mask.bool()], oracle[mask.bool()])


def test_a_page_of_padding_changes_nothing(llama):
    ids = prompt(1)
    padded = torch.cat([torch.zeros(1, PAGE_SIZE, dtype=torch.long), ids], 1)
    both = torch.cat([padded, prompt(1, padded.shape[1])])
    mask = torch.ones_like(both)
    mask[0, :PAGE_SIZE] = 0
    tokens, scores = generated(llama, FP8Cache(llama), both, attention_mask=mask)
    alone, alone_scores = generated(llama, FP8Cache(llama), ids)
    assert torch.equal(tokens[:1], alone)
    close(scores[:1], alone_scores)


def test_padding_queries_see_nothing():
    cache = FP8Cache(make())
    k, v = cache.update(torch.randn(2, 2, 9, 64), torch.randn(2, 2, 9, 64), 0)
    mask = fp8_kv_mask(2, 9, 9, attention_mask=torch.arange(9) >= torch.tensor([[0], [4]]))
    out, weights = fp8_kv_attention(torch.nn.Module(), torch.randn(2, 4, 9, 64), k, v, mask)
    assert weights is None
    assert (out[1, :4] == 0).all()
    assert (out[1, 4:].abs().amax((1, 2)) > 0).all()
    assert (out[0].abs().amax((1, 2)) > 0).all()


@pytest.mark.parametrize("family", ["llama", "gpt-oss-sinks"])
@pytest.mark.parametrize("padding", [0, 37])
def test_without_an_fp8_layer_it_is_plain_attention(family, padding, monkeypatch):
    monkeypatch.setattr("fp8attn.integrations.transformers.attention.QUERY_BLOCK", 64)
    model, ids = make(family), prompt()
    mask = torch.ones_like(ids)
    mask[1, :padding] = 0
    for cache in (lambda: StaticCache(model.config, max_cache_len=160), lambda: plain(model.config)):
        ours = logits(model, cache(), ids, mask if padding else None)
        with using(model, "eager"):
            exact = logits(model, cache(), ids, mask)
        close(ours[mask.bool()], exact[mask.bool()], 1e-5)


def test_right_padded_scoring(llama):
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[1, -40:] = 0
    with torch.no_grad():
        ours = llama(ids, attention_mask=mask, past_key_values=FP8Cache(llama)).logits
        with using(llama, "sdpa"):
            oracle = llama(ids, attention_mask=mask, past_key_values=Oracle(llama.config)).logits
    close(ours[mask.bool()], oracle[mask.bool()])


# Ways to generate


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"do_sample": True, "temperature": 1.5, "top_k": 20},
        {"num_beams": 3},
        {"num_beams": 2, "do_sample": True},
        {"num_return_sequences": 3, "do_sample": True},
        {"num_beams": 3, "num_return_sequences": 2},
        {"prefill_chunk_size": 64},
    ],
    ids=lambda options: "+".join(options) or "greedy",
)
@pytest.mark.parametrize("static", [False, True])
def test_generate(llama, options, static):
    ids = prompt()
    mask = torch.ones_like(ids)
    mask[0, :20] = 0
    results = []
    for cache in (FP8Cache(llama, max_cache_len=170 if static else None), Oracle(llama.config)):
        torch.manual_seed(3)
        results.append(generated(llama, cache, ids, attention_mask=mask, **options))
    assert torch.equal(results[0][0], results[1][0])
    close(results[0][1], results[1][1])


# transformers#48700
@pytest.mark.parametrize("length", [100, 120, 128])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("skip", [(), (0,)])
def test_beams_take_all_of_their_tokens_with_them(llama, length, static, skip):
    """Reported: only those tokens of a quantized layer move between beams that are not yet quantized. Here 20 tokens
    end before, across and after the end of a page, and the first layer is in 8 or in 16 bits."""
    ids = prompt(length=length)
    options = {"num_beams": 4, "num_return_sequences": 3, "max_new_tokens": 20}
    oracle = Oracle(llama.config)
    for index in skip:
        oracle.layers[index] = DynamicLayer()
    ours, expected = (
        generated(llama, cache, ids, **options)
        for cache in (FP8Cache(llama, max_cache_len=160 if static else None, skip_layers=skip), oracle)
    )
    assert ours[0].shape == (2 * 3, 20) and torch.equal(ours[0], expected[0])
    close(ours[1], expected[1])


# transformers#45510
def test_two_models_share_the_options_of_their_caches_and_of_generate():
    """Reported: the first `generate` takes entries out of the caller's dict of options."""
    models, ids = [make("llama"), make("gemma3")], prompt(length=40)
    cache_options = {"key_dtype": "e4m3", "skip_layers": [0], "max_cache_len": None}
    config = GenerationConfig(do_sample=False, num_beams=2, max_new_tokens=6, pad_token_id=0)
    given = {"generation_config": config, "attention_mask": torch.ones_like(ids)}
    before = copy.deepcopy((cache_options, config.to_dict(), list(given)))
    rounds = [
        [m.generate(ids, past_key_values=FP8Cache(m, **cache_options), **given) for m in models] for _ in range(2)
    ]
    assert (cache_options, config.to_dict(), list(given)) == before
    for model, first, again in zip(models, *rounds, strict=True):
        assert torch.equal(first, again)
        alone = GenerationConfig(do_sample=False, num_beams=2, max_new_tokens=6, pad_token_id=0)
        cache = FP8Cache(model, key_dtype="e4m3", skip_layers=[0])
        assert torch.equal(first, model.generate(ids, past_key_values=cache, generation_config=alone))


@pytest.mark.parametrize("static", [False, True])
def test_prompt_lookup_equals_greedy(llama, static):
    ids = prompt(1, 40).repeat(1, 4)  # repeats, so that lookups find candidates, and miss
    greedy, scores = generated(llama, FP8Cache(llama), ids, max_new_tokens=24)
    cache = FP8Cache(llama, max_cache_len=200 if static else None)
    looked_up, looked_up_scores = generated(llama, cache, ids, max_new_tokens=24, prompt_lookup_num_tokens=5)
    assert torch.equal(looked_up, greedy)
    close(looked_up_scores, scores)


def test_assisted_generation_equals_greedy(llama):
    ids = prompt(1)
    options = ({"assistant_model": make(num_hidden_layers=1)}, {})
    assisted, greedy = (generated(llama, FP8Cache(llama), ids, **given)[0] for given in options)
    assert torch.equal(assisted, greedy)


@pytest.mark.parametrize("key_dtype", ["int8", "e4m3"])
@pytest.mark.parametrize("static", [False, True])
def test_bytes_do_not_depend_on_how_tokens_came(key_dtype, static):
    model = make(num_hidden_layers=1)
    k, v = torch.randn(2, 2, 2, 300, 64) * torch.linspace(0.1, 3.0, 300)[:, None]  # scales grow
    pools = []
    for cuts in ([300], [1] * 300, [100, 28, 1, 130, 41]):
        cache = FP8Cache(model, key_dtype=key_dtype, max_cache_len=384 if static else None)
        for k_part, v_part in zip(k.split(cuts, 2), v.split(cuts, 2), strict=True):
            cache.update(k_part, v_part, 0)
        pages = cache.pages(0)
        tables = [pages.page_table[seq, :3].long() for seq in range(2)]
        # Bytes of K past the last token are unspecified: the first two pages are full.
        pools.append(torch.stack([pages.pool[table[:2]] for table in tables]))
    assert torch.equal(pools[1], pools[0]) and torch.equal(pools[2], pools[0])


def test_a_conversation_goes_on_in_the_same_cache(llama):
    ids, more = prompt(), prompt(length=30)
    results = []
    for cache in (FP8Cache(llama), FP8Cache(llama, max_cache_len=256), Oracle(llama.config)):
        first = llama.generate(ids, past_key_values=cache, do_sample=False, max_new_tokens=8)
        results.append(generated(llama, cache, torch.cat([first, more], 1)))
    for tokens, scores in results[:2]:
        assert torch.equal(tokens, results[2][0])
        close(scores, results[2][1])


# The static form


def test_static_equals_dynamic_to_the_bit(llama):
    ids = prompt()
    dynamic, static = (logits(llama, FP8Cache(llama, max_cache_len=length), ids) for length in (None, 200))
    assert torch.equal(dynamic, static)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3.5-linear"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_compiled_step_is_one_graph_and_the_same(family, padded):
    types = {"gemma3": MIXED["layer_types"][:2], "qwen3.5-linear": ["linear_attention", "full_attention"]}
    model, ids = (
        make(family, num_hidden_layers=2, **({"layer_types": types[family]} if family in types else {})),
        prompt(length=60),
    )
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[1, : 9 * padded] = 0
    outs = []
    for compiled in (False, True):
        cache = FP8Cache(model, max_cache_len=80)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        with torch.no_grad():
            model(ids[:, :50], attention_mask=mask[:, :50] if padded else None, past_key_values=cache)
            step = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
            part = {"attention_mask": mask} if padded else {}
            outs.append(
                torch.cat([step(ids[:, i : i + 1], past_key_values=cache, **part).logits for i in range(50, 60)], 1)
            )
    # transformers' own static sliding layers count their tokens in an int, which costs one recompilation.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if family == "gemma3" else 1)
    close(outs[1], outs[0], 1e-5)


@pytest.fixture
def widths(monkeypatch):
    """The widths of the page tables of attention's launches, in forwards of three layers. Compiled launches are not
    recorded.
    """
    seen, attention = [], ops.run_attention

    def noting(name, q, pages, *options):
        if not torch.compiler.is_compiling():
            seen.append(pages.page_table.shape[1])
        return attention(name, q, pages, *options)

    monkeypatch.setattr(ops, "run_attention", noting)
    return seen


def early(cache):
    cache.early_initialization(2, 2, 64, torch.float32, torch.device("cpu"))
    return cache


@pytest.mark.parametrize("emptied", ["made", "early", "reset", "cropped", "reordered", "copied"])
def test_a_static_caches_first_prompt_is_launched_for_its_own_tokens(llama, widths, emptied):
    make, ids = lambda: FP8Cache(llama, max_cache_len=1000), prompt()
    expected = logits(llama, make(), ids)
    cache = make() if emptied == "made" else early(make())
    if emptied in ("reset", "cropped"):
        logits(llama, cache, prompt(length=400).flip(0))
        cache.reset() if emptied == "reset" else cache.crop(-400)
    elif emptied == "reordered":
        cache.reorder_cache(torch.tensor([1, 1]))
    elif emptied == "copied":
        cache = copy.deepcopy(cache)
    widths.clear()
    assert torch.equal(logits(llama, cache, ids), expected)
    assert widths == [2] * 3 + [8] * 3 * 6


@pytest.mark.parametrize("size", [None, 200])
def test_a_batch_without_memory_may_be_followed_by_a_smaller_one(llama, monkeypatch, size):
    ids, cache = prompt(), FP8Cache(llama, max_cache_len=size)

    def full(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as small:
        small.setattr("fp8attn.integrations.transformers.layers.PagedKVCache", full)
        with pytest.raises(torch.OutOfMemoryError):
            logits(llama, cache, ids)
    assert not cache.is_initialized and int(cache.get_seq_length()) == 0
    expected = logits(llama, FP8Cache(llama, max_cache_len=size), ids[:1])
    assert torch.equal(logits(llama, cache, ids[:1]), expected)


def test_a_narrow_table_changes_no_values():
    cache = FP8Cache(
        make(num_hidden_layers=1), key_dtype="e4m3", max_cache_len=1000
    )  # INT8's scale might grow at the last token
    k = torch.randn(2, 2, 130, 64)
    prompt_k, _ = cache.update(k, k, 0)
    held = prompt_k.dequantize()
    step_k, _ = cache.update(k[:, :, :1], k[:, :, :1], 0)
    assert prompt_k.shape == step_k.shape == held.shape == (2, 2, 1000, 64)
    assert torch.equal(step_k.dequantize()[:, :, :130], held[:, :, :130]) and not held[:, :, 130:].any()


@torch.no_grad()
def test_what_follows_a_compiled_prompt_sees_all_of_it(llama, widths):
    ids = prompt(length=60)

    def last(forward, cache):
        for part in ids[:, :50].split(25, 1):  # an empty cache, and one that is not: the same graph
            forward(part, past_key_values=cache)
        widths.clear()
        return llama(ids[:, 50:], past_key_values=cache).logits

    expected = last(llama, FP8Cache(llama, max_cache_len=1000))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled, cache = (
        torch.compile(llama, fullgraph=True, backend="aot_eager"),
        early(FP8Cache(llama, max_cache_len=1000)),
    )
    for _ in range(2):
        close(last(compiled, cache), expected, 1e-5)
        assert widths == [8] * 3
        cache.reset()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_cache_that_is_in_a_cuda_graph_is_never_known_to_be_empty(llama, widths, monkeypatch):
    """A replay of the graph appends tokens without the host."""
    ids, cache = prompt(), early(FP8Cache(llama, max_cache_len=1000))
    expected = logits(llama, FP8Cache(llama, max_cache_len=1000), ids)
    widths.clear()
    with monkeypatch.context() as capturing, torch.no_grad():
        capturing.setattr("fp8attn.cache.page_table.is_capturing", lambda device: True)
        llama(ids[:, :100], past_key_values=cache)
    with torch.no_grad():
        llama(ids[:, 100:], past_key_values=cache)
    cache.reset()
    assert torch.equal(logits(llama, cache, ids), expected)
    assert widths == [8] * 3 * (1 + 1 + 7)


def test_tokens_that_the_host_does_not_know_of_are_not_left_out(llama):
    cache, k = early(FP8Cache(llama, max_cache_len=1000)), torch.zeros(2, 2, 10, 64)
    for lengths in cache.paged.table.cache_seqlens:
        lengths.fill_(300)
    cache.paged.sync()
    keys, _ = cache.update(k, k, 0)
    assert pages_of(keys).page_table.shape == (2, 8)


@pytest.mark.parametrize("padding", [0, 7])
def test_generate_compiles_the_static_form(llama, padding):
    """`generate` makes the mask of a compiled step outside of it."""
    ids = prompt(length=40)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    compile_config = CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compile_config._compile_all_devices = True
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    cache = FP8Cache(llama, max_cache_len=64, skip_layers=[0])
    compiled = generated(llama, cache, ids, compile_config=compile_config, attention_mask=mask)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    eager = generated(llama, FP8Cache(llama, skip_layers=[0]), ids, attention_mask=mask)
    assert torch.equal(compiled[0], eager[0])
    close(compiled[1], eager[1], 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("fullgraph", "length", "batch"), [(True, 64, 1), (False, 64, 2), (False, None, 2)], ids=str)
def test_generate_with_a_compiled_forward_gives_the_same_tokens(fullgraph, length, batch):
    """The first forward is compiled, too. A layer in 16 bits is transformers' own."""
    model, ids = make(num_hidden_layers=2), prompt(batch, 30)
    expected = generated(model, FP8Cache(model, skip_layers=[0]), ids, max_new_tokens=5)
    cache = FP8Cache(model, max_cache_len=length, skip_layers=[0])
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=fullgraph)
    tokens, scores = generated(model, cache, ids, max_new_tokens=5)
    assert torch.equal(tokens, expected[0])
    close(scores, expected[1], 1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_models_of_two_head_dims_compile_in_one_process():
    """Dynamo makes a number that changes between two compilations of the same code dynamic."""
    torch._dynamo.reset()
    for head_dim in (64, 128, 80):
        model, ids = make(head_dim=head_dim, num_hidden_layers=1), prompt(1, 20)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        outs = [logits(each, FP8Cache(model, max_cache_len=64), ids, steps=1) for each in (compiled, model)]
        close(*outs, 1e-5)


@pytest.mark.slow
@torch.no_grad()
def test_inductor_computes_positions_before_the_append_that_changes_them():
    model, ids = make(num_hidden_layers=1), prompt(1, 20)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    outs = [logits(each, FP8Cache(model, max_cache_len=64), ids, steps=2) for each in (compiled, model)]
    close(*outs, 1e-5)


@torch.no_grad()
def test_a_batch_that_compiled_code_cannot_allocate_names_the_call_that_can():
    model, ids = make(num_hidden_layers=1), prompt(2, 30)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"call cache\.early_initialization\(batch_size"):
        compiled(ids, past_key_values=FP8Cache(model, max_cache_len=64))
    cache = FP8Cache(model, max_cache_len=64)
    cache.early_initialization(2, 2, 64, torch.float32, torch.device("cpu"))
    close(compiled(ids, past_key_values=cache).logits, model(ids, past_key_values=FP8Cache(model)).logits, 1e-5)


def test_a_full_static_cache_stops(llama):
    cache = FP8Cache(llama, max_cache_len=16)
    with torch.no_grad(), pytest.raises(RuntimeError, match="larger max_cache_len"):
        llama(prompt(length=17), past_key_values=cache)


def test_early_initialization(llama):
    ids = prompt()
    for length in (None, 200):
        cache, late = FP8Cache(llama, max_cache_len=length), FP8Cache(llama, max_cache_len=length)
        early(cache)
        assert cache.is_initialized
        assert cache.get_seq_length() == 0
        assert torch.equal(logits(llama, cache, ids), logits(llama, late, ids))
