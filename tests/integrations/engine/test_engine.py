"""What an engine needs, by a small engine (`toy.py`): its answers are those of each request alone, in a
`PagedKVCache`.
"""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")

from fp8attn import KVScales, LayerScales, PagedKVCache, UsageError
from fp8attn.formats.page_layout import engine_marks_of
from fp8attn.formats.spec import SPARE, PageSpec
from fp8attn.integrations.engine import EngineLayer, Options, StaticState, Step, step_of
from fp8attn.integrations.k_eq_v import KeysOfNorm
from fp8attn.numerics import relative_error

from .toy import HEADS, KV_HEADS, WIDTH, D, Engine, Model

LAYERS = 2


@pytest.fixture
def scales(tmp_path):
    """A file of means and scales."""
    made = {
        index: LayerScales(
            torch.tensor([4 / 127, 5 / 127]), torch.full((2,), 2.0**-5), *torch.randn(2, 2, D).mul(0.3).unbind()
        )
        for index in range(LAYERS)
    }
    KVScales(made, num_layers=LAYERS, num_kv_heads=KV_HEADS, head_dim=D).save(tmp_path / "scales.safetensors")
    return str(tmp_path / "scales.safetensors")


def alone(model, prompt, wanted, key_dtype, **given):
    """A request in a cache of its own: the whole prompt, then a token at a time."""
    cache = PagedKVCache(num_kv_heads=KV_HEADS, head_dim=D, num_layers=LAYERS, num_seqs=1, key_dtype=key_dtype, **given)

    def attend(index, q, k, v):
        cache.append(index, k, v)
        return cache.attention(index, q, exact=True)

    tokens = x = prompt
    for _ in range(wanted):
        x = model.forward(x, attend)[-1:]
        tokens = torch.cat([tokens, x])
    return tokens


@pytest.mark.parametrize(
    "options", [{}, {"key_dtype": "e4m3"}, {"scales": True}, {"scales": True, "static_scales": True}]
)
def test_answers_are_those_of_each_request_alone(options, scales):
    """Prompts in chunks beside decodes, requests that wait for blocks, and blocks that had other requests' bytes."""
    torch.manual_seed(0)
    given = options | ({"scales": scales} if "scales" in options else {})
    model = Model.random(LAYERS)
    engine = Engine(model, Options(**given, exact=True), num_blocks=8, budget=150)
    lengths = (200, 3, 128, 300, 127, 1, 260)
    requests = [engine.add(torch.randn(length, WIDTH), wanted=6) for length in lengths]
    prompts = [request.tokens for request in requests]
    steps = sum(1 for _ in iter(engine.step, False))
    assert steps > 15 and len(engine.free) == 8 and not engine.waiting and not engine.running
    layers = [KVScales.load(scales).layer(index) for index in range(LAYERS)]
    own = (
        {"k_mean": [layer.k_mean for layer in layers], "v_mean": [layer.v_mean for layer in layers]}
        if "scales" in options
        else {}
    )
    if "static_scales" in options:
        own = {"scales": layers}
    for request, prompt in zip(requests, prompts, strict=True):
        expected = alone(model, prompt, 6, options.get("key_dtype", "int8"), **own)
        # A page's own scale grows at other tokens in chunks. With static scales only the order of sums differs.
        torch.testing.assert_close(request.tokens, expected, rtol=0, atol=1e-4 if "static_scales" in options else 0.02)
    for layer in engine.layers:
        assert (engine_marks_of(layer.pool) == layer.mark).all()  # appends leave them


def test_two_layers_share_pages():
    """A layer that writes nothing reads the pages of another."""
    torch.manual_seed(0)
    memory = torch.zeros(4, 1, KV_HEADS * PageSpec.of(D).layout.nbytes, dtype=torch.uint8)
    writer, reader = (
        EngineLayer(HEADS, KV_HEADS, D, options=Options(), static=StaticState(), device="cpu") for _ in range(2)
    )
    reader.read_from(writer)
    table, lengths, bounds = (torch.tensor(x, dtype=torch.int32) for x in ([[2, 1]], [140], [0, 140]))
    step = step_of(
        lengths,
        table,
        bounds,
        num_decodes=0,
        decode_tokens=0,
        max_decode=1,
        num_tokens=140,
        max_seqlen=140,
        longest=140,
    )
    q, k, v = (torch.randn(140, heads, D) for heads in (HEADS, KV_HEADS, KV_HEADS))
    outputs = []
    for layer in (writer, reader):
        layer.bind(memory)
        assert layer.is_bound(memory) and not layer.writes_at_the_start
        outputs.append(torch.full_like(q, torch.nan))
        layer.run(q, k, v, outputs[-1], step)
        k, v = k * torch.nan, v * torch.nan
    assert torch.equal(*outputs) and outputs[0].isfinite().all()
    assert not memory[[0, 3]].any()


def test_keys_that_follow_from_values():
    """Given K and V, the layer stores latents; so does one that reads its pages. In two chunks, against float64."""
    torch.manual_seed(0)
    spec, heads, group, tokens = PageSpec.latent(512, 128, True, SPARE), 2, 3, 200
    norm = nn.RMSNorm(512)
    norm.weight.data = torch.randn(512).mul(0.7).exp() * 0.1
    v = nn.functional.rms_norm(torch.randn(tokens, heads, 512), (512,))
    k, turn = v * norm.weight.data, torch.rand(tokens, 1, 64)  # radians
    low, high = k[..., :64].clone(), k[..., 256:320].clone()
    k[..., :64], k[..., 256:320] = low * turn.cos() - high * turn.sin(), high * turn.cos() + low * turn.sin()
    q = torch.randn(tokens, group * heads, 512)
    writer, reader = (
        EngineLayer(
            group * heads, heads, spec, options=Options(), static=StaticState(), device="cpu", softmax_scale=1.0,
            keys=keys,
        )
        for keys in (KeysOfNorm(norm, 128), None)
    )  # fmt: skip
    reader.read_from(writer)
    memory = torch.full((3, heads * spec.layout.nbytes), 0x7F, dtype=torch.uint8)
    for layer in (writer, reader):
        layer.bind(memory)
    table, out = torch.tensor([[2, 0]], dtype=torch.int32), torch.full_like(q, torch.nan)
    for first, stop in ((0, 150), (150, 200)):
        lengths, bounds = (torch.tensor(x, dtype=torch.int32) for x in ([stop], [0, stop - first]))
        step = step_of(
            lengths, table, bounds, num_decodes=0, decode_tokens=0, max_decode=1, num_tokens=stop - first,
            max_seqlen=stop - first, longest=stop,
        )  # fmt: skip
        for layer in (writer, reader):
            before = out[first:stop].clone()
            layer.run(q[first:stop], k[first:stop], v[first:stop], out[first:stop], step)
            assert layer is writer or torch.equal(out[first:stop], before)
    scores = torch.einsum("qhgd,khd->hgqk", q.double().unflatten(1, (heads, group)), k.double())
    scores = scores.masked_fill(torch.ones(tokens, tokens).triu(1).bool(), -torch.inf)
    exact = torch.einsum("hgqk,khd->qhgd", scores.softmax(-1), v.double()).flatten(1, 2)
    assert relative_error(out, exact) < 0.02
    assert set(writer.buffers) == {"fp8attn_key_matrix", "fp8attn_kept"}


def test_sinks_of_other_heads_are_an_error():
    """A kernel would read past their end. SGLang passes them with each call."""
    layer = EngineLayer(
        HEADS, KV_HEADS, D, options=Options(), static=StaticState(), device="cpu", sinks=torch.zeros(HEADS - 1)
    )
    layer.bind(torch.zeros(4, KV_HEADS * PageSpec.of(D).layout.nbytes, dtype=torch.uint8))
    q, k = torch.randn(1, HEADS, D), torch.randn(1, KV_HEADS, D)
    with pytest.raises(ValueError, match=rf"sinks, one logit per query head, must be \({HEADS},\)"):
        layer.run(q, k, k, torch.empty_like(q), Step(()))


def test_memory_of_another_size_is_an_error():
    layer = EngineLayer(
        HEADS, KV_HEADS, D, options=Options(), static=StaticState(), device="cpu", name="model.layers.3"
    )
    for memory in (
        torch.zeros(9, KV_HEADS, 128, 2 * D),
        torch.zeros(9, KV_HEADS, 2 * PageSpec.of(D).layout.nbytes, dtype=torch.uint8)[:, :, ::2],
    ):
        with pytest.raises(
            RuntimeError, match=r"gave layer model.layers.3 blocks of .* needs 33024 bytes each without gaps"
        ):
            layer.bind(memory)


def test_a_new_table_of_the_same_step():
    lengths, bounds = torch.tensor([10, 20, 200], dtype=torch.int32), torch.tensor([0, 1, 2, 202], dtype=torch.int32)
    numbers = {
        "num_decodes": 2,
        "decode_tokens": 2,
        "max_decode": 1,
        "num_tokens": 202,
        "max_seqlen": 200,
        "longest": 200,
    }
    table, other = torch.arange(12, dtype=torch.int32).view(3, 4), torch.arange(12, 24, dtype=torch.int32).view(3, 4)
    found, expected = (
        step_of(lengths, table, bounds, **numbers).with_table(other),
        step_of(lengths, other, bounds, **numbers),
    )
    for part, same in zip(found.parts, expected.parts, strict=True):
        assert torch.equal(part.page_table, same.page_table) and part.tokens == same.tokens
    assert [part.page_table.shape for part in found.parts] == [(2, 4), (1, 2)]


def test_what_is_static_can_be_written_again(scales):
    with pytest.raises(UsageError, match="static_scales, which needs scales"):
        Options.of({"static_scales": True}, "config")
    static = StaticState(torch.randn(KV_HEADS, D), torch.randn(KV_HEADS, D), torch.rand(KV_HEADS, 2))
    layer = EngineLayer(HEADS, KV_HEADS, D, options=Options(scales, static_scales=True), static=static, device="cpu")
    assert list(layer.buffers) == ["fp8attn_k_mean", "fp8attn_v_mean", "fp8attn_page_scales"]
    addresses = {name: x.data_ptr() for name, x in layer.buffers.items()}
    for x in layer.buffers.values():
        x.fill_(torch.nan)
    layer.write_static()
    assert {name: x.data_ptr() for name, x in layer.buffers.items()} == addresses
    assert all(torch.equal(x, value) for x, value in zip(layer.buffers.values(), static[:3], strict=True))
