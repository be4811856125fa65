"""The shapes of video models, and the noise of tiny ones on a CPU, with the reference in place of our kernels."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from benchmarks import measure, peers, prefill, problem, video
from fp8attn import reference

TINY = {
    "tiny": video.Case(problem.square(128, False, 300, q_heads=2)),
    "fused": video.Case(problem.square(128, False, 300, q_heads=2), 5),
}


@pytest.fixture
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for name in ("attention", "exact"):
        monkeypatch.setattr(prefill, name, reference.attention)
    monkeypatch.setattr(peers, "available", frozenset)
    monkeypatch.setattr(measure, "interleaved", lambda calls, rounds, **options: dict.fromkeys(calls, 1.0))
    monkeypatch.setattr(video, "CASES", TINY)


def test_cases_have_the_tokens_of_their_names():
    shapes = {name: case.shape for name, case in video.CASES.items()}
    assert {name: shape.keys for name, shape in shapes.items()} == {
        name: (int(name.rpartition("S")[2]),) for name in shapes
    }
    assert all(shape.queries == shape.keys and shape.dim == 128 and not shape.causal for shape in shapes.values())


def test_values_of_a_fused_case_are_a_view_past_32_bits():
    plain, fused = (case.inputs(1.0) for case in TINY.values())
    assert all(map(torch.equal, plain, fused)) and fused[2].stride() == (3 * 5 * 128, 128, 1)
    case = video.CASES["h3-1088p-S185640"]
    assert 3 * case.fused * 128 == 21504 and 99_865 * 21504 > 2**31 > 99_864 * 21504 and case.shape.keys[0] > 99_865


@pytest.mark.parametrize("case", TINY)
def test_noise_is_against_the_inputs_and_errors_against_the_bytes(on_a_cpu, case):
    rows = {row["impl"]: row for row in video.measure(case)}
    assert rows.keys() == {*prefill.OURS, "fp8attn-exact", "fp8attn-call", "fp8attn-call-e4m3-keys"}
    for impl, row in rows.items():
        assert (
            row["case"] == case and row["ms"] == 1.0 and 0 < row["noise_mean1"] < row["noise"] < 0.06
        )  # rounding leaves 1 to 4%
        if "call" in impl:
            assert row["rel_err"] == row["noise"] and row["rel_err_mean1"] == row["noise_mean1"]
        elif impl != "fp8attn-q8":  # the reference computes in FP32, and its output has the dtype of its queries
            assert row["rel_err"] < 0.003  # BF16 rounds by 0.2%
            same = impl.replace("fp8attn", "fp8attn-call").removesuffix("-exact")
            assert row["noise"] == pytest.approx(rows[same]["noise"], rel=1e-3)


def test_a_wrong_output_of_ours_is_no_result(on_a_cpu, monkeypatch):
    monkeypatch.setattr(prefill, "attention", lambda q, pages, params: (torch.zeros_like(q), None))
    with pytest.raises(AssertionError, match=r"tiny: fp8attn is wrong, 100\.0% off"):
        list(video.measure("tiny"))
