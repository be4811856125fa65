"""The errors of kernels by length, mean and batch, with stand-ins that are off by a known share."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from benchmarks import accumulation, latent, peers
from benchmarks.problem import Run, Shape, steps
from fp8attn import reference


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(peers, "available", frozenset)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    for kernels, name in ((accumulation.prefill, "prefill"), (accumulation.decode, "decode")):
        monkeypatch.setattr(kernels, f"{name}_attention", reference.attention)


def add(monkeypatch, kind, case, shape):
    monkeypatch.setitem(getattr(accumulation, kind), case, shape)
    monkeypatch.setitem(accumulation.SHAPES, case, shape)


def test_what_doctor_measures_stays(monkeypatch):
    mean = lambda q, k, v: v.float().mean(2, True).expand_as(q)  # noqa: E731
    monkeypatch.setattr(accumulation, "kernels", lambda: {"exact": mean, "off": lambda *x: 0.75 * mean(*x)})
    assert list(accumulation.measure("S1024")) == [
        {"case": "S1024", "impl": "exact", "rel_err": pytest.approx(0, abs=1e-4)},
        {"case": "S1024", "impl": "off", "rel_err": pytest.approx(0.25, abs=1e-4)},
    ]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("PROMPTS", Shape((150,), (40,), 2, 2, 128, False)), ("STEPS", steps(150, 150, kv_heads=1))],
    ids=["prompt", "step"],
)
def test_ours_over_keys_and_values(monkeypatch, kind, shape):
    add(monkeypatch, kind, "small", shape)
    (row,) = accumulation.measure("small")
    assert row.pop("case") == "small" and row.pop("impl") == "fp8attn"
    assert row.keys() == {"rel_err_0", "rel_err_0.3", "rel_err_1"} and max(row.values()) < 0.003


def test_steps_over_latents_have_an_error_for_each_mean(monkeypatch):
    def runs(shape, mean):
        q, rows = latent.inputs(shape, mean)

        def out():
            parts = []
            for seq, x in enumerate(rows[:, 0].float().split(shape.keys)):
                weights = torch.softmax(q[shape.rows(seq)].float() @ x.T * shape.softmax_scale, -1)
                parts.append(weights @ x[:, : latent.RANK])
            return torch.cat(parts) * (1 + mean / 10)

        held = lambda seq: (shape.split(rows)(seq)[0], shape.split(rows[..., : latent.RANK])(seq)[0])  # noqa: E731
        return {"fp8attn": Run(out, q, held)}

    monkeypatch.setattr(latent, "runs", runs)
    add(monkeypatch, "LATENTS", "small", latent.case(3, 70, 70))
    (row,) = accumulation.measure("small")
    assert row == {
        "case": "small", "impl": "fp8attn", "rel_err_0": pytest.approx(0, abs=1e-5),
        "rel_err_0.3": pytest.approx(0.03, abs=1e-5), "rel_err_1": pytest.approx(0.1, abs=1e-5),
    }  # fmt: skip


def test_batches_are_those_of_the_picture():
    def batches(cases):
        return {(len(shape.keys), shape.keys[0]) for shape in cases.values()}

    assert batches(accumulation.LATENTS) == {(b, 1024 * n) for b in (1, 8, 66) for n in (2, 8, 32, 128)}
    assert batches(accumulation.STEPS) == batches(accumulation.LATENTS) - {(66, 131072)}
