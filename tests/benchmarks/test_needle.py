"""RULER's needles through our caches and stand-ins for the kernels of others."""

import dataclasses
from array import array

import pytest
import torch

pytest.importorskip("lm_eval")

from benchmarks import needle, peers
from fp8attn_tools.evaluation.outcomes import Outcome, Sample


def kernel(shape, q, k, v, scales=()):
    """Attention over rows, sequence after sequence, in FP32."""
    q_scale, k_scale, v_scale = (scale[0] for scale in scales) if scales else (1.0, 1.0, 1.0)

    def call():
        out, at = [], 0
        for seq, (keys, queries) in enumerate(zip(shape.keys, shape.queries, strict=True)):
            at = sum(shape.keys[:seq])
            heads = [x.float().transpose(0, 1) for x in (q[shape.rows(seq)], k[at : at + keys], v[at : at + keys])]
            mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
            options = {"attn_mask": mask, "scale": float(q_scale * k_scale) * shape.softmax_scale, "enable_gqa": True}
            found = torch.nn.functional.scaled_dot_product_attention(*(x[None] for x in heads), **options)[0]
            out.append((found * v_scale).transpose(0, 1))
        return torch.cat(out).to(torch.bfloat16 if q.dtype == needle.E4M3.dtype else q.dtype)

    return call


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """The rows of two cases of two samples of 512 tokens each, by case and implementation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(needle, "SAMPLES", tmp_path_factory.mktemp("needle"))
        cases = {
            "plain": needle.Case(512, 0, 2, needle.IMPLS),
            "stress": needle.Case(512, 3, 2, ("bf16", "fp8attn", "fa3-fp8")),
        }
        patch.setattr(needle, "CASES", cases)
        patch.setattr(needle, "KERNELS", dict.fromkeys(needle.KERNELS, kernel))
        patch.setattr(needle, "CALIBRATION", (256, 2))
        patch.setattr(peers, "available", lambda: frozenset({"fa3", "vllm_fa3"}))
        needle.systems.cache_clear()
        needle.main()
        assert len({len(sample.tokens) for sample in needle.load_samples(needle.prompts(512))}) == 2, (
            "no prompt is padded"
        )
        found = {(case, row["impl"]): row for case in cases for row in needle.measure(case)}
        patch.setattr(needle, "CASES", {"none": needle.Case(1024, 0, 2, needle.IMPLS)})
        assert list(needle.measure("none")) == []
    needle.systems.cache_clear()
    return found


def test_samples_to_a_file_and_back(tmp_path):
    samples = [Sample("task", 9, n, array("i", [1, 2, 3 * n]), ("2", "é"), 0.5, 4) for n in range(5)]
    needle.save_samples(tmp_path / "a" / "s.zip", samples)
    assert list(needle.load_samples(tmp_path / "a" / "s.zip")) == samples
    assert list(needle.load_samples(tmp_path / "a" / "s.zip", slice(1, None, 2))) == samples[1::2]


@pytest.mark.slow
def test_every_system_answers(rows):
    assert {impl for case, impl in rows if case == "plain"} == {*needle.IMPLS}
    for (case, impl), row in rows.items():
        assert row["samples"] == 2 and sum(count for _, count in row["depths"].values()) == 2
        assert (case, impl) == (row["case"], row["impl"]) and ("difference" in row) == (impl != "bf16")


@pytest.mark.slow
def test_answers_that_are_exact_stay_right(rows):
    """BF16 and our cache find the needles of short prompts, also beside planted outliers, and 8 bits without them."""
    right = {key: row["accuracy"] for key, row in rows.items()}
    assert all(
        accuracy == 1.0 for (case, impl), accuracy in right.items() if case == "plain" or impl in ("bf16", "fp8attn")
    ), right


def test_a_row_counts_pairs_and_depths():
    def outcomes(cache, scores):
        return [Outcome(cache, "t", 512, i, i / 20, ("7",), "", score) for i, score in enumerate(scores)]

    row = needle.row_of(
        "c",
        "x",
        outcomes("bf16", [1.0] * 15 + [0.0] * 5) + outcomes("x", [0.0] * 5 + [1.0] * 10 + [0.0, 1.0, 0.0, 0.0, 0.0]),
    )
    assert (row["accuracy"], row["lost"], row["won"], row["difference"]) == (11 / 20, 5, 1, pytest.approx(-0.2))
    assert row["depths"]["0.05"] == [0.0, 2] and row["depths"]["0.25"] == [0.5, 2] and row["depths"]["0.35"] == [1.0, 2]


def test_cases_are_what_the_tables_show():
    assert {case.length for case in needle.CASES.values()} == {4096, 8192, 16384, 32768, 65536, 131072}
    assert [dataclasses.astuple(needle.STRENGTHS[case.strength]) for case in list(needle.CASES.values())[-3:]] == [
        (1, 4),
        (3, 16),
        (10, 64),
    ]
