"""The counts, fits, samples and checks of the benchmarks that need no GPU."""

import math
from contextlib import nullcontext

import pytest
import torch

from tests.support import compiling

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from benchmarks import (
    accuracy,
    append,
    decode,
    engine,
    llama_decode,
    llama_prefill,
    measure,
    models,
    peers,
    portable,
    prefill,
    problem,
    sdpa,
    wan,
)
from benchmarks.problem import DEVICE, Shape
from fp8attn import AttentionPolicy, fp8_attention, reference
from fp8attn.formats.codec import key_type

RAGGED = Shape((300, 5, 0, 129), (7, 5, 0, 129), 4, 2, 64, True)


def attend(q, pages, params):
    return reference.attention(q, pages, params, compute_dtype=torch.float64, out_dtype=torch.float64)


# Counting


def small_llama(layers):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=100,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).bfloat16().eval().to(DEVICE)


def test_flops_count_what_is_seen():
    assert Shape((16,), (16,), 3, 1, 64, False).flops == 4 * 3 * 64 * 16 * 16
    assert Shape((16,), (16,), 3, 1, 64, True).flops == 4 * 3 * 64 * 16 * 16 / 2
    assert Shape((16,), (4,), 3, 1, 64, True).flops == 4 * 3 * 64 * (4 * 16 - 8)  # 13 to 16 keys, less half a pair each
    assert Shape((16, 8), (16, 8), 1, 1, 64, True).flops == 4 * 64 * (128 + 32)
    assert prefill.CASES["D128-causal-S16384"].flops == pytest.approx(1.0995e12, rel=1e-4)


def test_rows_and_last_keys_of_ragged_queries():
    assert [RAGGED.rows(seq) for seq in range(4)] == [slice(0, 7), slice(7, 12), slice(12, 12), slice(12, 141)]
    assert RAGGED.last_key(0, torch.arange(7)).tolist() == [293, 294, 295, 296, 297, 298, 299]
    assert Shape((3,), (3,), 1, 1, 64, False).last_key(0, torch.arange(3)) is None


def test_sampled_queries_hold_both_ends_once():
    assert measure.sampled_queries(5) == [0, 1, 2, 3, 4]
    assert measure.sampled_queries(1000) == [*range(32), *range(484, 516), *range(968, 1000)]
    assert accuracy.sampled(1) == [0]
    assert accuracy.sampled(100) == list(range(100))
    assert accuracy.sampled(1000) == [*range(64), *range(936, 1000)]


def test_a_layers_inputs_lie_as_its_case_says():
    contiguous, transposed = (sdpa.Case(8, True, sdpa.KV_HEADS, lies).inputs() for lies in (False, True))
    assert [tuple(x.shape) for x in contiguous] == [(1, 32, 8, 128), (1, 8, 8, 128), (1, 8, 8, 128)]
    assert all(torch.equal(a, b) for a, b in zip(contiguous, transposed, strict=True))
    assert all(a.is_contiguous() and b.transpose(1, 2).is_contiguous() for a, b in zip(contiguous, transposed, strict=True))
    assert {"full-S1024", "causal-S131072", "gqa-full-S1024", "full-S4096-transposed"} <= sdpa.CASES.keys()


def test_decibels_of_a_layer_are_those_of_its_rows():
    case = sdpa.Case(40, True, sdpa.KV_HEADS)
    q, k, v = case.inputs()
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True)
    assert sdpa.decibels(case, exact, q, k, v) > 200
    assert sdpa.decibels(case, exact * 1.01, q, k, v) == pytest.approx(40.0)


def test_cases_of_the_kernels():
    assert len(accuracy.CASES) == 3 * (3 * 15 + 2) + 16 + 21 + 2  # means, head_dims, adversarial data, a million equal terms
    assert accuracy.CASES["full-mean1-D128-S1048576"].shape == Shape((1 << 20,), (128,), 2, 2, 128, False)
    assert decode.CASES["B16-S8192-G16"] == Shape((8192,) * 16, (1,) * 16, 64, 4, 128, True)
    assert decode.CASES["B64-S8192-ragged"].keys[::63] == (8192, 1) and decode.CASES["B1-S8192"].kv_elements == 2 * 8192 * 8 * 128
    assert {shape.uniform for name, shape in prefill.CASES.items() if name != "varlen-mix"} == {True}


# What is right


@pytest.mark.parametrize("impl", prefill.OURS)
def test_exact_is_attention_over_the_held_bytes(impl):
    q, pages = problem.given(impl, RAGGED, *accuracy.make("page-gains", RAGGED))
    out = problem.ours(attend, RAGGED, q, pages)()
    pairs = []
    for seq, keys in enumerate(RAGGED.keys):
        rows, last_key = RAGGED.rows(seq), RAGGED.last_key(seq, torch.arange(RAGGED.queries[seq], device=DEVICE))
        pairs.append((out[rows], measure.exact(q[rows], *pages.read(seq, keys, torch.float64), RAGGED.softmax_scale, last_key)))
    assert measure.relative(pairs) < 1e-13


def test_exact_gives_zeros_where_nothing_is_seen():
    q, k, v = (torch.randn(3, 2, 64, dtype=torch.float64) for _ in range(3))
    out = measure.exact(q, k, v, 0.1, torch.tensor([-1, 0, 2]))
    assert out[0].eq(0).all()
    torch.testing.assert_close(out[1], v[0])
    assert measure.exact(q, k[:0], v[:0], 0.1, torch.tensor([-1, -1, -1])).eq(0).all()


def test_relative_counts_all_pairs_together_and_shows_nan():
    one = torch.ones(4)
    assert measure.relative([(one * 1.5, one), (one, one)]) == pytest.approx((4 * 0.25 / 8) ** 0.5)
    assert measure.relative([(one * torch.nan, one)]) != measure.relative([(one * torch.nan, one)])


@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("keys", ["int8", "e4m3"])
def test_what_is_held_is_the_input_and_the_rest_is_poison(keys, rotate):
    _, k, v = accuracy.make("mean1", RAGGED)
    pages = problem.hold(RAGGED, k, v, key_dtype=keys, rotate_keys=rotate)
    assert (pages.key_dtype, pages.rotate_keys) == (key_type(keys), rotate)
    held = pages.read(3, 129)
    for x, y in zip(held, (k[305:], v[305:]), strict=True):
        assert measure.relative([(x, y.double())]) < 0.03  # E4M3's 2.6%, and INT8's 0.9%
    counts = torch.zeros(pages.num_pages, dtype=torch.int)
    counts[pages.page_table[0, :3].long()] += 1
    counts[pages.page_table[1, :1].long()] += 1
    counts[pages.page_table[3, :2].long()] += 1
    assert counts.max() == 1
    spare = counts == 0
    assert pages.k.view(torch.uint8)[spare].eq(0x7F).all() and pages.v.view(torch.uint8)[spare].eq(0x7F).all()
    assert pages.v_scale[spare].isnan().all() and pages.v_scale[~spare].isfinite().all()
    assert pages.k_scale[spare].isnan().all() and pages.k_scale[~spare].isfinite().all()
    last = pages.page_table[3, 1].long()
    assert pages.k.view(torch.uint8)[last, :, 1:].eq(0x7F).all() and pages.v[last].float().isfinite().all()


def test_empty_outputs_are_poisoned():
    empty = torch.empty
    with measure.poisoned():
        assert torch.empty(3).isnan().all() and torch.empty(3, dtype=torch.bfloat16).isnan().all()
        assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
    assert torch.empty is empty


@pytest.mark.parametrize("data", ["mean0", "mean5", "k-offset", "outliers", "page-gains", "needle", "flat", "flat-mean1", "constant"])
def test_data_is_what_it_says(data):
    shape = Shape((600,), (40,), 2, 2, 64, True)
    q, k, v = accuracy.make(data, shape)
    assert (q.shape, k.shape, v.shape) == ((40, 2, 64), (600, 2, 64), (600, 2, 64)) and q.dtype == k.dtype == v.dtype == torch.bfloat16
    again = accuracy.make(data, shape)
    assert all(torch.equal(x, y) for x, y in zip((q, k, v), again, strict=True))
    weights = torch.softmax(q[:, 0].double() @ k[:, 0].double().T / 8, -1)
    spread = float(weights.amax(-1).median() * 600)
    assert (spread > 0.9 * 600) == (data == "needle") and (spread < 1.2) == (data in ("flat", "flat-mean1", "constant"))
    assert float(v.float().mean()) == pytest.approx({"mean5": 5, "page-gains": 1, "flat-mean1": 1, "constant": 1}.get(data, 0), abs=0.2)


# Peers


def test_peers_that_are_not_there_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(peers, "available", frozenset)
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    assert set(peers.runs(Shape((4,), (4,), 2, 2, 64, True), q, q, q)) == {"cudnn-bf16"}
    assert not peers.runs(Shape((4,), (2,), 2, 2, 64, True), q[:2], q, q)
    assert not peers.runs(Shape((3, 1), (3, 1), 2, 2, 64, True), q, q, q)
    assert "aligned to the start" in (said := capsys.readouterr().out) and "no ragged batches" in said


# Kernels and models of the benchmarks' own

COMPILE = """
from evidence import dry
dry.pretend({"capability": [9, 0], "sms": 132, "shared": 232448})
from benchmarks import problem, stream
from fp8attn.kernels.compile import compiled
from fp8attn.kernels.launch import recording
for keys in ("int8", "e4m3"):
    for dim in (64, 128, 256):
        shape = problem.steps(1000, 3, kv_heads=1, dim=dim)
        with recording(dry=True) as launches:
            call = stream.stream(shape, problem.hold(shape, *shape.inputs()[1:], key_dtype=keys))
            launches.clear()
            call()
        [made] = launches
        print(compiled(made.kernel, made.args, made.given).metadata.shared)
"""


def test_the_streaming_ceiling_follows_the_decode_kernel():
    assert len(compiling.run("-c", COMPILE).split()) == 6


def test_llama_systems_agree(monkeypatch):
    """All four systems on a tiny model, with float64 instead of the peers' kernels."""

    def exact_cache(q, k, v, used):
        last_key = [int(n) - q.shape[1] + torch.arange(q.shape[1], device=DEVICE) for n in used]
        return torch.stack([measure.exact(*x, q.shape[-1] ** -0.5, last) for *x, last in zip(q, k, v, last_key, strict=True)]).bfloat16()

    def paged_cache(shape, q, k, v, table, used):
        k, v = (x.view(torch.uint8)[table.long()].flatten(1, 2).view(x.dtype) for x in (k, v))
        return lambda: exact_cache(q.unflatten(0, (len(used), -1)), k, v, used).flatten(0, 1)

    monkeypatch.setattr(peers, "available", lambda: {"fa3", "vllm-fa3"})
    monkeypatch.setattr(peers.fa3, "cached", exact_cache)
    monkeypatch.setattr(peers.fa3, "vllm_attention", paged_cache)
    monkeypatch.setattr(llama_decode, "CHECKED", 64)
    monkeypatch.setattr(llama_decode, "graph_of", lambda step: (lambda: None, step()))
    model = small_llama(2)
    with torch.inference_mode():
        rows = list(llama_decode.agree(model, llama_decode.available()))  # asserts that logits agree
        assert [row["impl"] for row in rows] == ["bf16-sdpa", "bf16-fa3", "vllm-fp8", "fp8attn"] and rows[0]["rel_err"] == 0
        for system in llama_decode.available().values():
            cache = system.cache(model, 384)
            llama_decode.fill(cache, model.config, 3, 300)
            assert llama_decode.step_of(model, system, cache, torch.zeros(3, 1, dtype=torch.long))().isfinite().all()
            assert int(cache.get_seq_length()) == 301


@pytest.fixture
def float64_fa3(monkeypatch):
    """All peers are installed: FlashAttention-3 is float64, and cuDNN is what torch selects. A timed call takes a millisecond."""

    def fa3(shape, q, k, v):
        out = [
            measure.exact(q[rows], *(x.unflatten(0, (len(shape.keys), -1))[seq] for x in (k, v)), shape.softmax_scale, last_key)
            for seq in range(len(shape.keys))
            for rows, last_key in [(shape.rows(seq), shape.last_key(seq, torch.arange(shape.queries[seq], device=DEVICE)))]
        ]
        return lambda: torch.cat(out).to(q.dtype)

    def timed(calls, rounds, **options):
        return {name: float(call() is not None) for name, call in calls.items()}

    monkeypatch.setattr(peers, "available", lambda: {"fa3"})
    monkeypatch.setattr(peers.fa3, "attention", fa3)
    monkeypatch.setattr(models, "sdpa_kernel", lambda backend: nullcontext())
    monkeypatch.setattr(models, "interleaved", timed)
    monkeypatch.setattr(models, "graph_of", lambda call: (call, call()))


def test_attention_is_swapped_for_fa3_and_inside_a_context_of_ours(float64_fa3):
    q, k, v = (torch.randn(2, heads, 20, 64, device=DEVICE).bfloat16() for heads in (4, 2, 2))
    attend = torch.nn.functional.scaled_dot_product_attention
    expected = attend(q, k, v, is_causal=True, enable_gqa=True)
    with models.bf16_systems()["fa3-bf16"]():
        torch.testing.assert_close(attend(q, k, v, is_causal=True, enable_gqa=True), expected, atol=0.02, rtol=0.02)
        ours = attend(q, k, v, enable_gqa=True)
        with fp8_attention(AttentionPolicy(min_length=100)) as report:
            assert torch.equal(attend(q, k, v, enable_gqa=True), ours)
    assert report.calls == 1 and report.fp8_calls == 0


def test_llama_prefill_runs_one_model_with_each_attention(float64_fa3, monkeypatch):
    model = small_llama(3)
    monkeypatch.setattr(llama_prefill.modeling_llama, "apply_rotary_pos_emb", None)  # back as it was after this test
    llama_prefill.prepare(model)
    monkeypatch.setattr(llama_prefill, "prepared", lambda: model)
    monkeypatch.setattr(llama_prefill, "CASES", {"short": 150})
    monkeypatch.setattr(llama_prefill, "LAYER_TOKENS", 2 * 150)
    rows = list(llama_prefill.measure("short"))
    assert {row["impl"]: row["layers"] for row in rows} == dict.fromkeys(("cudnn-bf16", "fa3-bf16", "fp8attn", "fp8attn-default"), 2)
    assert rows[0]["rel_err"] == 0 < rows[2]["rel_err"] and rows[2]["speedup"] == 1 and model.config.num_hidden_layers == 3
    assert rows[3]["rel_err"] == rows[1]["rel_err"]  # below its least length it is what is around it


def test_ours_is_compared_with_the_fastest_bf16_system(monkeypatch):
    times = {"fa3-bf16": 2.0, "cudnn-bf16": 1.5, "fp8attn": 1.2}
    monkeypatch.setattr(models, "interleaved", lambda calls, rounds: times)
    *_, ours = models.timed("a", dict.fromkeys(times), 1, layers=3)
    assert ours == {"case": "a", "impl": "fp8attn", "ms": 1.2, "layers": 3, "beside": "cudnn-bf16", "speedup": 1.25}


def test_outputs_that_differ_are_refused():
    one = torch.ones(4)
    assert models.errors({"a": one, "b": one * 1.25, "fp8": one * 1.5}, 0.26, 0.51) == {"a": 0, "b": 0.25, "fp8": 0.5}
    with pytest.raises(AssertionError, match=r"b differs from a by 0\.250"):
        models.errors({"a": one, "b": one * 1.25}, 0.25, 1)


def test_wan_blocks_and_stack(float64_fa3, monkeypatch):
    sizes = wan.Sizes(heads=2, head_dim=64, ffn=96, text=20)
    monkeypatch.setitem(wan.CASES, "tiny", wan.Case((3, 4, 10), 4, 1, 1, 1))
    rows = list(wan.measure("tiny", sizes, torch.float32))  # asserts that self-attention agrees, and where the stack's calls ran
    block = wan.built(sizes, torch.float32)
    blocks = wan.Stack(block, 3).blocks
    assert [(row["case"], row["impl"]) for row in rows] == [
        ("block-tiny", "cudnn-bf16"), ("block-tiny", "fa3-bf16"), ("block-tiny", "fp8attn"),
        ("stack-tiny", "cudnn-bf16"), ("stack-tiny", "fp8attn"),
    ]  # fmt: skip
    assert 0 < rows[2]["rel_err"] < 0.1 and rows[4]["bf16_layers"] == 2
    assert len({id(part) for b in blocks for part in b.modules()}) == 3 * len(list(block.modules()))
    assert {id(p) for b in blocks for p in b.parameters()} == {id(p) for p in block.parameters()}
    assert [math.prod(wan.CASES[name].grid) for name in ("720p", "1080p")] == [75600, 171360]


def test_wan_positions_turn_channels_by_frame_row_and_column():
    cos, sin = wan.rope_tables((2, 3, 4), 128, torch.float64)
    assert cos.shape == sin.shape == (24, 64)
    angle = torch.atan2(sin, cos)
    assert (
        angle[23, 0] == pytest.approx(1) and angle[23, 22] == pytest.approx(2) and angle[23, 43] == pytest.approx(3)
    )  # 44, 42, 42 channels


@pytest.fixture
def on_a_cpu(monkeypatch):
    """A machine without peers and timers: our kernels are the reference, a graph is its call, and every call takes a millisecond."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(peers, "available", frozenset)
    monkeypatch.setattr(append, "HEADS", 2)  # the interpreter takes a program for each head
    for module in (measure, accuracy, append, decode, engine, prefill, sdpa):
        for name, stand_in in {
            "graph_of": lambda call: (call, call()),
            "interleaved": lambda calls, rounds, **options: dict.fromkeys(calls, 1.0),
            "between_reads": lambda call, rounds, **options: 1.0,
            "of_call": lambda impl, call: f"launches:{call() is not None}" if impl.startswith(("fp8attn", "ceil", "stream")) else "peer:",
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, stand_in)
    for kernel in (accuracy.prefill, accuracy.decode, portable.portable):
        monkeypatch.setattr(kernel, "attention", reference.attention)
    monkeypatch.setattr(prefill, "attention", reference.attention)
    monkeypatch.setattr(decode, "ceilings", lambda case: {"stream-ceiling": lambda: None})


SHORT = Shape((130,), (130,), 2, 2, 64, True)
STEP = problem.steps(130, 7, kv_heads=1, dim=64)


@pytest.mark.parametrize(
    ("module", "case", "expected"),
    [
        (prefill, lambda: SHORT, dict.fromkeys((*prefill.OURS, "fp8attn-exact"), "True")),
        (decode, lambda: STEP, dict.fromkeys(problem.KEYS, "True") | {"stream-ceiling": "False"}),
        (engine, lambda: Shape((130, 7, 140), (1, 1, 20), 2, 1, 64, True), {"fp8attn": "True"}),
        (
            sdpa,
            lambda: sdpa.Case(40, True, sdpa.KV_HEADS),
            dict.fromkeys((*problem.KEYS, "fp8attn-graph", "fp8attn-rope"), "True"),
        ),
        (accuracy, lambda: accuracy.one("decode", "mean1", 40)[1], dict.fromkeys(problem.KEYS, "True")),
        (portable, lambda: problem.steps(130, 130, kv_heads=1, dim=64), {"fp8attn-triton": "True"}),
        (append, lambda: append.Append(2, 1, 130), dict.fromkeys((*problem.KEYS, "fp8attn-counted"), "False")),
        (append, lambda: append.Append(1, 130), dict.fromkeys(problem.KEYS, "False") | {"ceiling": "True"}),
        (
            append,
            lambda: append.Quantize(130, 2),
            {f"{impl}{rope}": "True" for impl in problem.KEYS for rope in ("", "-rope")} | {"ceiling": "True"},
        ),
    ],
)
def test_rows_have_what_they_launched(on_a_cpu, monkeypatch, module, case, expected):
    """Rows are also checked before they are timed. Each benchmark runs whole."""
    here = case()
    name = "step" if here == append.Append(2, 1, 130) else "short"
    monkeypatch.setattr(module, "CASES", {name: here})
    rows = {row["impl"]: row for row in module.measure(name) if row["fingerprint"] != "peer:"}
    assert {impl: row["fingerprint"] for impl, row in rows.items()} == {impl: f"launches:{given}" for impl, given in expected.items()}
    assert all(row.get("ms", 1.0) == 1.0 and row["case"] == name for row in rows.values())
    assert all(row["timed"] == ("called" if impl == "fp8attn" else "graph") for impl, row in rows.items() if "timed" in row)
