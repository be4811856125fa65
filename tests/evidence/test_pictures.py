"""Pictures are drawn from the committed rows, and from made-up rows of benchmarks that are not measured yet."""

import json

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from benchmarks import accumulation, latent, latent_needle
from evidence import pictures, rows

pytestmark = pytest.mark.slow
SUMS = ("fp8attn", "fa3-fp8", "vllm-fa3-fp8")


def latents() -> list[dict]:
    """Rows of `latent`: vLLM's kernel in 1 ms, and ours in less; others do not take lengths that differ."""
    measured = []
    for number, (case, shape) in enumerate(latent.CASES.items()):
        for impl, ms in {"fp8attn": 0.8 - 0.01 * number, "flashmla-bf16": 1.5, "vllm-flashmla-fp8": 1.0}.items():
            if impl == "fp8attn" or shape.uniform:
                errors = {"rel_err": 0.002, "rel_err_0": 0.01, "rel_err_0.3": 0.005}
                measured.append({"case": case, "impl": impl, "ms": ms, "tflops": 1.0, "gbps": 1.0} | errors)
    return measured


def sums() -> list[dict]:
    """Rows of `accumulation`: the error of a single-level kernel is its tokens over 2^20, in a batch of 66."""
    measured = [{"case": "S1024", "impl": "FlashAttention-3 (vllm)", "rel_err": 0.002}]
    for case in accumulation.SHAPES:
        impls = ("fp8attn", "flashmla-bf16", "vllm-flashmla-fp8") if case in accumulation.LATENTS else SUMS
        for impl in impls:
            single = impl in ("vllm-flashmla-fp8", "fa3-fp8")
            off = int(case.split("S")[1]) / 2**20 / (66 if "-B1-" in case else 1) if single else 0.002
            measured.append({"case": case, "impl": impl} | {f"rel_err_{mean:g}": off for mean in accumulation.MEANS})
    return measured


def needles() -> list[dict]:
    """Rows of `latent_needle`: through one kernel, texts are less likely."""
    costs = {"bf16": 0.0, "fp8attn": 0.25, "vllm-flashmla-fp8": 2.0}
    return [
        {
            "case": case, "impl": impl, "accuracy": 1.0, "depths": {"0.55": [0.5, 2]}, "ppl": 5.0,
            "d_ppl_pct": 50.0 if (impl, case) == LOST else costs[impl],
        }
        for case in latent_needle.CASES
        for impl in latent_needle.IMPLS
    ]  # fmt: skip


LOST = ("vllm-flashmla-fp8", list(latent_needle.CASES)[-1])
HEAD = {"device": "NVIDIA H200", "torch": "2.11.0", "triton": "3.9.0", "commit": "abc", "date": "2026-11-30"}
MADE = {"sums": latents, "accumulation": sums, "latent": latents, "latent_needle": needles}


@pytest.mark.parametrize("name", [name for name in pictures.PLOTS if pictures.measured(name)])
def test_a_picture_is_drawn(name, tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "path_of", lambda name: tmp_path / f"{name}.json")
    pictures.PLOTS[name]()
    assert (tmp_path / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("name", MADE)
def test_a_picture_shows_its_rows(name, tmp_path, monkeypatch):
    (tmp_path / "h200").mkdir()
    file = tmp_path / "h200" / f"{'latent' if name == 'sums' else name}.json"
    file.write_text(json.dumps(HEAD | {"rows": MADE[name]()}))
    monkeypatch.setattr(rows, "RESULTS", tmp_path)
    drawn = {}
    finish = pictures.finish

    def note(name, figure, *rest, **options):
        drawn["figure"] = figure
        finish(name, figure, *rest, **options)

    monkeypatch.setattr(pictures, "finish", note)
    pictures.PLOTS[name]()
    assert (tmp_path / "h200" / f"{name}.png").stat().st_size > 10_000
    panels = [axes for axes in drawn["figure"].axes if axes.get_visible() and axes.has_data()]
    above, last = panels[0], panels[-1]
    if name == "sums":
        points = {line.get_label(): line.get_xydata().tolist() for line in last.lines}
        theirs = points["vLLM's FlashMLA, FP8, steps of 1 to 256 sequences"]
        assert [131072, 0.002] in theirs and len(theirs) == sum(shape.uniform for shape in latent.CASES.values())
    elif name == "accumulation":
        lines = [(line.get_color(), line.get_linestyle(), line.get_xydata().tolist()) for line in last.lines]
        assert len(lines) == 3 * 3
        theirs = {style: points[-1] for color, style, points in lines if color == pictures.COLORS["vllm-flashmla-fp8"]}
        assert theirs == {"-": [131072, 0.125], "--": [131072, 0.125], ":": [131072, 0.125 / 66]}
        assert [line.get_label() for line in above.lines] == ["fp8attn", "FA3", "vLLM's FA3"]
    elif name == "latent":
        heights = [bar.get_height() for bar in above.containers[0]]
        assert heights[:2] == [pytest.approx(1 / 0.8), pytest.approx(1 / 0.79)]
        assert len(heights) == sum(shape.uniform for shape in latent.CASES.values())
        assert {bar.get_height() for bar in above.containers[1]} == {1.0}
    else:
        below = panels[3]
        heights = {bars.get_label(): {bar.get_height() for bar in bars} for bars in below.containers}
        assert heights == {"vLLM's FlashMLA, FP8": {2.0, pictures.HIGHEST}, "fp8attn": {0.25}}
        assert [text.get_text() for text in below.texts if text.get_text()] == ["50"]
        for axes in panels[:3]:
            cells = np.ma.filled(axes.images[0].get_array(), np.nan)
            assert np.isnan(cells[4]).all() and (cells[5] == 50).all()
    [stack] = (text.get_text() for text in drawn["figure"].texts if "commit" in text.get_text())
    assert stack == "H200, torch 2.11.0, Triton 3.9.0, commit abc of 2026-11-30"


def test_a_block_sums_what_others_leave_it():
    cases = ("H128-B66-S131072", "H128-B1-S131072", "H16-B1-S8192", "H128-B33-S4096-q2", "H16-B64-S8192-ragged")
    assert [pictures.summed(case) for case in cases] == [131072, 131072 * 2 / 132, 8192 / 132, 4096, None]
