"""The errors of kernels by length, mean and batch, with stand-ins that are off by a known share."""

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from benchmarks import accumulation, latent, peers
from benchmarks.problem import Run


@pytest.fixture(autouse=True)
def without_peers(monkeypatch):
    monkeypatch.setattr(peers, "available", frozenset)


def test_prompts_have_an_error_for_each_mean(monkeypatch):
    mean = lambda q, k, v: v.float().mean(2, True).expand_as(q)  # noqa: E731
    made = {"exact": mean, "off": lambda q, k, v: 0.75 * mean(q, k, v)}
    monkeypatch.setattr(accumulation, "kernels", lambda: made)
    exact, off = accumulation.measure("S1024")
    assert exact.keys() == {"case", "impl", "rel_err", "rel_err_0", "rel_err_0.3", "rel_err_1"}
    for name in ("rel_err", "rel_err_0", "rel_err_0.3", "rel_err_1"):
        assert exact[name] < 1e-4 and off[name] == pytest.approx(0.25, abs=1e-4)


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
    monkeypatch.setitem(accumulation.STEPS, "small", latent.case(3, 70, 70))
    (row,) = accumulation.measure("small")
    assert row.pop("case") == "small" and row.pop("impl") == "fp8attn"
    assert row == {
        "rel_err_0": pytest.approx(0, abs=1e-5), "rel_err_0.3": pytest.approx(0.03, abs=1e-5),
        "rel_err_1": pytest.approx(0.1, abs=1e-5),
    }  # fmt: skip


def test_batches_are_those_of_the_picture():
    assert {(len(shape.keys), shape.keys[0]) for shape in accumulation.STEPS.values()} == {
        (batch, 1024 * n) for batch in (1, 8, 66) for n in (2, 8, 32, 128)
    }
