"""Calibration against direct computation on the K and V that an ordinary cache holds."""

import copy
from dataclasses import replace

import pytest
import torch

from fp8attn import PagedKVCache, UsageError
from fp8attn.formats.codec import E4M3, INT8, codec_of
from fp8attn.formats.rotation import rotate
from fp8attn_tools import calibrate
from fp8attn_tools.diagnostics import saturation

transformers = pytest.importorskip("transformers")
from fp8attn_tools import check_scales, context_of, pack_tokens  # noqa: E402


@pytest.fixture(scope="module")
def model(tiny_model):
    """A model whose last layer has a V with offsets of up to 8 deviations, and a K whose slowest pair has an offset of
    20.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.bias.copy_(torch.linspace(-10, 10, 128))  # deviations are about 1.2
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias[31] = 24.0
    return model


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 257, (4, 200), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def kept(model, ids):
    """K and V `[tokens, heads, dim]` of each layer in a plain cache."""
    cache = transformers.DynamicCache(config=model.config)
    model(input_ids=ids, past_key_values=cache)
    return [tuple(x.transpose(1, 2).flatten(0, 1) for x in (layer.keys, layer.values)) for layer in cache.layers]


def several(x):
    """The mean of `x [T, H, D]` in channels where it is 4 deviations or more."""
    x = x.double()
    return torch.where(x.mean(0).abs() >= 4 * x.std(0, correction=0), x.mean(0), 0.0).float()


WAYS = [("int8", True), ("int8", False), ("e4m3", True), ("e4m3", False)]


@pytest.mark.parametrize(("key_dtype", "rotate_keys"), WAYS)
def test_absmax_is_exact(model, ids, key_dtype, rotate_keys):
    found = calibrate(model, ids.split(1), key_dtype=key_dtype, rotate_keys=rotate_keys)
    assert (found.key_dtype, found.rotate_keys) == (key_dtype, rotate_keys)
    assert (found.num_layers, found.num_kv_heads, found.head_dim, found.tokens, found.method) == (
        2,
        2,
        64,
        800,
        "absmax",
    )
    assert found.model_id.endswith("tiny-llama")
    for index, pair in enumerate(kept(model, ids)):
        layer = found.layer(index)
        k, v = pair
        torch.testing.assert_close(layer.v_mean, several(v), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(layer.v_scale, (v - layer.v_mean).abs().amax((0, 2)) / 448, rtol=1e-5, atol=0)
        assert index == 0 or 20 < layer.v_mean.count_nonzero() < 100, "the model was built to have offsets"
        # Of K the slowest pair alone: its channel 31 has the bias, which RoPE turns by 0.03 over these tokens.
        assert layer.k_mean.nonzero().tolist() == [[0, 31]] and layer.k_mean[0, 31] == pytest.approx(
            k[:, 0, 31].mean().item()
        )
        stored = k - layer.k_mean
        stored = rotate(stored) if rotate_keys else stored
        top = INT8.max if key_dtype == "int8" else E4M3.max
        torch.testing.assert_close(layer.k_scale, stored.abs().amax((0, 2)) / top, rtol=1e-5, atol=0)
        assert found.k_offsets.get(index, 0.0) < 5  # and 20 of the bias, if its mean stayed


def test_batches_may_be_an_iterator_and_of_any_shape(model, ids):
    whole = calibrate(model, [ids])
    pieces = calibrate(model, ({"input_ids": row} for row in ids.split([1, 2, 1])))
    for index in whole.layers:
        for name in ("k_scale", "v_scale", "k_mean", "v_mean"):
            torch.testing.assert_close(
                getattr(whole.layer(index), name), getattr(pieces.layer(index), name), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_not_counted(model, ids, side):
    rows = [ids[0, :150], ids[1, :90]]
    padded, mask = torch.zeros(2, 150, dtype=torch.long), torch.zeros(2, 150, dtype=torch.long)
    for number, row in enumerate(rows):
        place = slice(150 - len(row), None) if side == "left" else slice(len(row))
        padded[number, place], mask[number, place] = row, 1
    want, got = (
        calibrate(model, [row[None] for row in rows]),
        calibrate(model, [{"input_ids": padded, "attention_mask": mask}]),
    )
    assert got.tokens == want.tokens == 240
    for index in want.layers:
        for name in ("k_scale", "v_scale", "k_mean", "v_mean"):
            torch.testing.assert_close(
                getattr(got.layer(index), name), getattr(want.layer(index), name), rtol=1e-4, atol=1e-5
            )


NAMES = ("k_scale", "v_scale", "q_scale", "k_mean", "v_mean")


def same(got, want, exactly=True):
    assert list(got.layers) == list(want.layers)
    for index in want.layers:
        for name in NAMES:
            mine, theirs = (getattr(scales.layer(index), name) for scales in (got, want))
            assert torch.equal(mine, theirs) if exactly else torch.allclose(mine, theirs, rtol=1e-4, atol=1e-5), (
                index,
                name,
            )
    if exactly:
        assert (got.sqnr_db, got.k_offsets, got.tokens, got.method) == (
            want.sqnr_db,
            want.k_offsets,
            want.tokens,
            want.method,
        )


def test_a_generator_gives_what_a_list_gives(model, ids):
    calls = []
    generated = calibrate(model, (row for row in ids.split(1)), progress=lambda *call: calls.append(call))
    same(generated, calibrate(model, list(ids.split(1))))
    assert calls[-1] == (4, None)


@pytest.fixture
def few(monkeypatch):
    """Means from the first 2 batches of 200 tokens."""
    from fp8attn_tools.calibration import calibrate as module

    monkeypatch.setattr(module, "MEANS_TOKENS", 400)


def test_means_are_of_the_first_tokens_and_scales_of_all(model, ids, few):
    found = calibrate(model, ids.split(1))
    means = calibrate(model, ids[:2].split(1))
    assert found.tokens == 800 and means.tokens == 400
    for index, (_, v) in enumerate(kept(model, ids)):
        layer = found.layer(index)
        assert torch.equal(layer.v_mean, means.layer(index).v_mean) and torch.equal(
            layer.k_mean, means.layer(index).k_mean
        )
        magnitudes = (v - layer.v_mean).abs().transpose(0, 1).flatten(1)
        torch.testing.assert_close(layer.v_scale, magnitudes.amax(1) / 448, rtol=1e-5, atol=0)


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_a_long_batch_in_chunks(model, ids, side):
    batch = ids[:2]
    if side is not None:
        mask = torch.ones_like(batch)
        mask[0, slice(130) if side == "left" else slice(70, None)] = 0  # whole chunks of a sequence are padding
        batch = {"input_ids": batch, "attention_mask": mask}
    whole, chunked = calibrate(model, [batch]), calibrate(model, [batch], chunk=64)
    assert whole.tokens == chunked.tokens == {None: 400, "left": 270, "right": 270}[side]
    same(chunked, whole, exactly=False)  # FP32 attention over other blocks


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "fp8_kv"])
def test_queries_are_those_that_attention_gets(model, ids, implementation):
    """Against Q from the weights and transformers' own RoPE, under each implementation; and the model computes what it
    computed.
    """
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    ours = copy.deepcopy(model)
    ours.set_attn_implementation(implementation)
    before = ours(input_ids=ids).logits
    found = calibrate(ours, [ids], key_dtype="e4m3", rotate_keys=False)
    assert ours.config._attn_implementation == implementation and torch.equal(ours(input_ids=ids).logits, before)
    attention, norm = ours.model.layers[0].self_attn, ours.model.layers[0].input_layernorm
    q = attention.q_proj(norm(ours.model.embed_tokens(ids))).unflatten(-1, (4, 64)).transpose(1, 2)
    q, _ = apply_rotary_pos_emb(q, q, *ours.model.rotary_emb(q, torch.arange(200)[None]))
    torch.testing.assert_close(found.layer(0).q_scale, q.abs().amax((0, 2, 3)) / 448, rtol=1e-5, atol=0)
    rotated = calibrate(ours, [ids]).layer(0)
    torch.testing.assert_close(rotated.q_scale, rotate(q).abs().amax((0, 2, 3)) / 127, rtol=1e-5, atol=0)


def test_no_means(model, ids):
    """What stock vLLM wants: it subtracts none."""
    found = calibrate(model, ids.split(1), key_dtype="e4m3", rotate_keys=False, means=False)
    for index, (k, v) in enumerate(kept(model, ids)):
        layer = found.layer(index)
        assert not layer.k_mean.any() and not layer.v_mean.any()
        torch.testing.assert_close(layer.k_scale, k.abs().amax((0, 2)) / 448, rtol=1e-5, atol=0)
        torch.testing.assert_close(layer.v_scale, v.abs().amax((0, 2)) / 448, rtol=1e-5, atol=0)
        assert found.k_offsets[index] == pytest.approx(20, rel=0.5)  # of the bias, whose mean is not subtracted


def smaller(scales):
    """Scales of half the largest magnitude, so that a few percent of all values saturate."""
    layers = {
        index: replace(layer, k_scale=layer.k_scale * 0.5, v_scale=layer.v_scale * 0.5, q_scale=layer.q_scale * 0.5)
        for index, layer in scales.layers.items()
    }
    return replace(scales, layers=layers)


@pytest.mark.parametrize(("key_dtype", "rotate_keys"), WAYS)
def test_the_report_counts_what_scales_do_not_cover(model, ids, key_dtype, rotate_keys):
    """Against the codes of the K and V of an ordinary cache, on text that the scales are not from."""
    scales = smaller(calibrate(model, ids[:1].split(1), key_dtype=key_dtype, rotate_keys=rotate_keys))
    mask = torch.ones_like(ids[1:])
    mask[0, :50] = 0
    calls = []
    report = check_scales(model, [ids[1:]], scales, chunk=70, progress=lambda *call: calls.append(call))
    assert report.tokens == 600 and calls == [(1, 1)] and report.tensors == ("k", "v", "q")
    assert check_scales(model, [{"input_ids": ids[1:], "attention_mask": mask}], scales).tokens == 550
    for index, (k, v) in enumerate(kept(model, ids[1:])):
        layer = scales.layer(index)
        k = rotate(k - layer.k_mean) if rotate_keys else k - layer.k_mean
        for x, scale, codec, which in (
            (k, layer.k_scale, codec_of(key_dtype), "k"),
            (v - layer.v_mean, layer.v_scale, E4M3, "v"),
        ):
            y = x / scale[:, None]
            saturated = (y.abs() > codec.max).double().mean((0, 2))
            underflow = ((codec.encode(y, torch.ones(())) == 0) & (x != 0)).double().mean((0, 2))
            found = report.layers[index][which]
            # 38,400 values of a head; one on an edge may fall otherwise
            torch.testing.assert_close(found.saturated, saturated, rtol=0, atol=1e-4)
            torch.testing.assert_close(found.underflow, underflow, rtol=0, atol=1e-4)
            assert 0.02 < found.saturated.mean() < 0.1
    assert 0.02 < report.map("q", "saturated").mean() < 0.1


def test_scales_of_another_model_are_not_checked(model, ids):
    scales = calibrate(model, [ids])
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
    )
    with pytest.raises(ValueError, match="num_layers is 2 in the scales and 1 in the model"):
        check_scales(transformers.LlamaForCausalLM(config), [ids], scales)
    with pytest.raises(ValueError, match="the text has no tokens"):
        check_scales(model, [], scales)


@pytest.mark.parametrize("length", [1, 7, 10, 11, 100])
@pytest.mark.parametrize("separator", [None, 99])
def test_packing_keeps_all_tokens(length, separator):
    documents = [torch.arange(10), [], list(range(20, 43))]
    packed = list(pack_tokens(iter(documents), length, separator=separator))
    joined = [*range(10), *([] if separator is None else [99, 99]), *range(20, 43)]
    assert torch.cat([part[0] for part in packed]).tolist() == joined
    assert [len(part[0]) for part in packed[:-1]] == [length] * (len(packed) - 1) and 1 <= len(packed[-1][0]) <= length


def test_packing_streams_and_the_context(model):
    def endless():
        while True:
            yield [1, 2, 3]

    packed = pack_tokens(endless(), 4)
    assert [next(packed).tolist() for _ in range(2)] == [[[1, 2, 3, 1]], [[2, 3, 1, 2]]]
    assert (context_of(model.config), context_of(model.config, 1000)) == (4096, 1000)
    with pytest.raises(ValueError, match="length must be a positive number of tokens; got 0"):
        next(pack_tokens([[1]], 0))


@pytest.mark.parametrize(
    "document", ["text", {"input_ids": [1, 2]}, torch.ones(1, 5, dtype=torch.long), [[1, 2]], [1.5]], ids=repr
)
def test_documents_that_are_no_token_ids_are_refused(document):
    with pytest.raises(
        ValueError, match=r"document 1 must be token ids.*tokenizer\(text\)\.input_ids for text in texts"
    ):
        list(pack_tokens([[1, 2], document], 4))


def test_sensitivity(model, ids):
    found = calibrate(model, [ids])
    for k, v in found.sqnr_db.values():
        assert (
            36 < k < 55
        )  # INT8 with 4 deviations to the largest code keeps about 40 dB, and more where a mean is subtracted
        assert 28 < v < 60  # E4M3 keeps about 31.5 dB of a normal variable, and more where a mean is subtracted
    e4m3 = calibrate(model, [ids], key_dtype="e4m3")
    assert all(28 < k < 45 for k, _ in e4m3.sqnr_db.values())


@pytest.mark.parametrize(("key_dtype", "rotate_keys"), WAYS)
def test_static_cache_holds_the_calibrated_range_and_saturates_past_it(model, ids, key_dtype, rotate_keys):
    layer = calibrate(model, [ids], key_dtype=key_dtype, rotate_keys=rotate_keys).layer(1)
    k, v = kept(model, ids)[1]
    cache = PagedKVCache(2, 64, key_dtype=key_dtype, rotate_keys=rotate_keys, scales=layer)

    def stored(k, v):
        return rotate(k - layer.k_mean) if rotate_keys else k - layer.k_mean, v - layer.v_mean

    def bound(x, scale, int8):
        if int8:
            return INT8.needed_scale(scale * INT8.max)[:, None] * 0.5
        return 2.0**-4 * x.abs() + E4M3.needed_scale(scale * E4M3.max)[:, None] * 2.0**-10

    cache.append(0, k, v)
    ints = (key_dtype == "int8", False)
    for got, want, scale, int8 in zip(
        stored(*cache.read(0, 0)), stored(k, v), (layer.k_scale, layer.v_scale), ints, strict=True
    ):
        assert ((got - want).abs() <= bound(want, scale, int8) * 1.01 + 1e-5).all()  # and the last bits of values of 24
    cache.append(0, k * 1000, v * 1000)
    for got, scale, int8 in zip(stored(*cache.read(0, 0)), (layer.k_scale, layer.v_scale), ints, strict=True):
        limit = scale if int8 else E4M3.needed_scale(scale * E4M3.max)
        torch.testing.assert_close(got.abs().amax((0, 2)), limit * (INT8.max if int8 else E4M3.max), rtol=1e-3, atol=0)


def test_the_model_is_left_as_it_was(tiny_model, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = model.config.to_json_string()
    calls = []
    calibrate(model, ids.split(2), progress=lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]
    assert [module.training for module in model.modules()] == modes
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.config.to_json_string() == config


def test_under_our_attention_too(model, ids):
    import fp8attn.integrations.transformers  # noqa: F401

    ours = copy.deepcopy(model)
    ours.set_attn_implementation("fp8_kv")
    want, got = calibrate(model, [ids]), calibrate(ours, [ids])
    torch.testing.assert_close(got.layer(1).v_scale, want.layer(1).v_scale, rtol=1e-4, atol=0)


def test_a_model_of_windows_alone_has_nothing_to_calibrate(ids):
    config = transformers.MistralConfig(
        vocab_size=89, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64,
        sliding_window=512,
    )  # fmt: skip
    with pytest.raises(
        UsageError, match="only full-attention layers are calibrated, and every layer of 'mistral' has a window"
    ):
        calibrate(transformers.MistralForCausalLM(config), ids)


def test_sliding_layers_stay_in_16_bits(ids):
    config = transformers.Gemma3TextConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64, sliding_window=16, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    found = calibrate(transformers.Gemma3ForCausalLM(config), [ids[:1]])
    assert list(found.layers) == [1]
    assert found.num_layers == 3


def test_nan_is_named(tiny_model, ids):
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.bias[3] = torch.inf
    with pytest.raises(ValueError, match="V of layer 1 has NaN or Inf"):
        calibrate(model, [ids])


def test_heads_that_are_divided_over_processes_are_refused(tiny_model, ids):
    """Scales of a part of the heads would be wrong for the model."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model)
    model._tp_size = 2  # as `from_pretrained(tp_plan="auto")` in two processes sets it
    with pytest.raises(
        UsageError, match=r'heads are divided over 2 processes; load it in one process, with device_map="auto"'
    ):
        calibrate(model, [ids])


def test_what_is_no_causal_language_model_is_refused():
    ids = [torch.zeros(1, 4, dtype=torch.long)]
    with pytest.raises(TypeError, match=r"takes a transformers causal language model .*got Linear"):
        calibrate(torch.nn.Linear(2, 2), ids)
    config = transformers.T5Config(vocab_size=89, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(ValueError, match="'t5' is an encoder-decoder"):
        calibrate(transformers.T5ForConditionalGeneration(config), ids)


@pytest.mark.parametrize(
    "batch", ["text", [1, 2, 3], {"input_ids": [[1, 2, 3]]}, {"input_ids": torch.ones(1, 3), "attention_mask": [1]}]
)
def test_what_is_no_batch_is_refused(model, batch):
    with pytest.raises(TypeError, match=r"a batch must be a tensor input_ids .* got (str|list)\. Tokenize text first"):
        calibrate(model, [batch])


@pytest.mark.parametrize(
    "batches", [None, 3, "text", {"input_ids": torch.ones(1, 3, dtype=torch.long)}, torch.ones(1, 3, dtype=torch.long)]
)
def test_what_are_no_batches_is_refused(model, batches):
    message = (
        rf"batches must be an iterable of tensors input_ids .* got {type(batches).__name__}\. Put a single batch into "
        rf"a list"
    )
    with pytest.raises(TypeError, match=message):
        calibrate(model, batches)
    with pytest.raises(TypeError, match=message):
        check_scales(model, batches, None)


def test_what_are_no_scales_is_refused(model, ids):
    with pytest.raises(
        TypeError, match=r"scales must be a KVScales, as calibrate returns it or KVScales.load reads it; got NoneType"
    ):
        check_scales(model, [ids], None)


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([], {}, "calibration saw no tokens"),
        ([torch.zeros(1, 4, dtype=torch.long)], {"key_dtype": "int4"}, "key_dtype must be one of"),
        ([torch.zeros(4, dtype=torch.long)], {}, r"input_ids \[B, S\].*got \[4\]"),
        ([{"attention_mask": torch.ones(1, 4)}], {}, "must have input_ids .*got none"),
        (
            [{"input_ids": torch.zeros(1, 4, dtype=torch.long), "attention_mask": torch.ones(1, 5)}],
            {},
            r"got \[1, 4\] and mask \[1, 5\]",
        ),
    ],
)
def test_errors(model, batches, options, message):
    with pytest.raises(ValueError, match=message):
        calibrate(model, batches, **options)


def test_a_cache_takes_scales(model, ids):
    from fp8attn.integrations.transformers import FP8Cache

    one, scales = copy.deepcopy(model), calibrate(model, ids.split(1))
    cache = FP8Cache(one, scales=scales, max_cache_len=256)
    assert one.config._attn_implementation == "fp8_kv"
    with torch.no_grad():
        logits = one(input_ids=ids[:, :150], past_key_values=cache).logits
        expected = one(input_ids=ids[:, :150], past_key_values=FP8Cache(one, scales=scales)).logits
    torch.testing.assert_close(logits, expected)
    assert all(layer.scales is scales.layer(index) for index, layer in enumerate(cache.layers))


@pytest.mark.filterwarnings("ignore:FP8Cache under attn_implementation")
def test_a_model_that_outgrows_its_scales_is_noticed(model, ids):
    """V of the first layer becomes eight times as large as it was when it was calibrated. In 16 bits, that layer has no
    scales.
    """
    from fp8attn.integrations.transformers import FP8Cache

    scales = calibrate(model, ids.split(1))
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.model.layers[0].self_attn.v_proj.weight.mul_(8)
    for one, skipped, layers in ((model, (), []), (changed, (), [0]), (changed, (0,), [])):
        cache = FP8Cache(one, scales=scales, skip_layers=skipped)
        with torch.no_grad():
            for _ in range(2):
                one(input_ids=ids[:, :150], past_key_values=cache)
                one(input_ids=ids[:, 150:], past_key_values=cache)
        rows = [row for row in saturation({layer: cache.pages(layer) for layer in cache.fp8_layers}) if row.kind == "v"]
        assert [row.layer for row in rows] == list(cache.fp8_layers)
        assert [row.layer for row in rows if row.share > 0.001] == layers
