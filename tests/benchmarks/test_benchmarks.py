"""What the benchmarks share: problems, counts, samples, checks."""

import pytest
import torch

from tests.support import compiling

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from benchmarks import accuracy, decode, measure, peers, prefill, problem, sdpa
from benchmarks.problem import DEVICE, Shape
from fp8attn import reference
from fp8attn.formats.codec import codec_of

RAGGED = Shape((300, 5, 0, 129), (7, 5, 0, 129), 4, 2, 64, True)


def attend(q, pages, params):
    return reference.attention(q, pages, params, compute_dtype=torch.float64, out_dtype=torch.float64)


# Counting


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


def test_decibels_of_a_layer_are_those_of_its_rows():
    shape = problem.square(128, True, 40, q_heads=sdpa.HEADS, kv_heads=sdpa.KV_HEADS)
    q, k, v = sdpa.make_inputs(shape)
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), is_causal=True, enable_gqa=True
    )
    assert sdpa.decibels(shape, exact, q, k, v) > 200
    assert sdpa.decibels(shape, exact * 1.01, q, k, v) == pytest.approx(40.0)


def test_cases_of_the_kernels():
    assert len(accuracy.CASES) == 3 * (3 * 8 + 2)  # means; phases and lengths; a million tokens
    assert accuracy.CASES["full-mean1-D128-S1048576"].shape == Shape((1 << 20,), (128,), 2, 2, 128, False)
    assert decode.CASES["B16-S8192-G16"] == Shape((8192,) * 16, (1,) * 16, 64, 4, 128, True)
    assert (
        decode.CASES["B64-S8192-ragged"].keys[::63] == (8192, 1)
        and decode.CASES["B1-S8192"].kv_elements == 2 * 8192 * 8 * 128
    )
    assert {shape.uniform for name, shape in prefill.CASES.items() if name != "varlen-mix"} == {True}


# What is right


@pytest.mark.parametrize("impl", prefill.OURS)
def test_exact_is_attention_over_the_held_bytes(impl):
    q, pages = problem.given(impl, RAGGED, *RAGGED.inputs(1.0))
    out = problem.ours(attend, RAGGED, q, pages)()
    pairs = []
    for seq, keys in enumerate(RAGGED.keys):
        rows, last_key = RAGGED.rows(seq), RAGGED.last_key(seq, torch.arange(RAGGED.queries[seq], device=DEVICE))
        pairs.append(
            (out[rows], measure.exact(q[rows], *pages.read(seq, keys, torch.float64), RAGGED.softmax_scale, last_key))
        )
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
    _, k, v = RAGGED.inputs(1.0)
    pages = problem.hold(RAGGED, k, v, key_dtype=keys, rotate_keys=rotate)
    assert (pages.format.k, pages.format.rotate) == (codec_of(keys), rotate)
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


# Peers


def test_peers_that_are_not_there_are_left_out(monkeypatch, capsys):
    monkeypatch.setattr(peers, "available", lambda: {"torch_sdpa"})
    q = torch.zeros(4, 2, 64, dtype=torch.bfloat16)
    assert set(peers.runs(Shape((4,), (4,), 2, 2, 64, True), q, q, q)) == {"cudnn-bf16"}
    assert not peers.runs(Shape((4,), (2,), 2, 2, 64, True), q[:2], q, q)
    assert not peers.runs(Shape((3, 1), (3, 1), 2, 2, 64, True), q, q, q)
    assert "aligned to the start" in (said := capsys.readouterr().out) and "no ragged batches" in said


# A kernel of the benchmarks' own

COMPILE = """
from benchmarks import ahead
ahead.pretend([132, 232448, True, "NVIDIA H200", True])
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
        print(compiled(made.kernel, made.args, made.constants).metadata.shared)
"""


@pytest.mark.slow
def test_the_streaming_ceiling_follows_the_decode_kernel():
    assert len(compiling.run("-c", COMPILE).split()) == 6
