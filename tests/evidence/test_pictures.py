"""Pictures are drawn from made-up rows."""

import json

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("transformers")

from benchmarks.needle_systems import stressed
from evidence import answers, pictures
from fp8attn_tools.evaluation.outcomes import Outcome, save_outcomes


def test_retrieval_is_drawn(tmp_path, monkeypatch):
    outcomes = [
        Outcome(impl, f"niah_multikey_2{stressed(strength)}", length, n, n / 4, ("1",), "1", float(n > strength))
        for impl in ("bf16", "fp8attn", "fa3-fp8:calibrated")
        for length, strengths in ((4096, (0,)), (8192, (0, 2)))
        for strength in strengths
        for n in range(4)
    ]
    monkeypatch.setattr(pictures, "FOLDER", tmp_path)
    save_outcomes(tmp_path / "needle.jsonl.xz", outcomes)
    (tmp_path / "needle.json").write_text(json.dumps({"rows": answers.rows(outcomes)}))
    pictures.plot_needle()
    assert all((tmp_path / f"{name}.png").stat().st_size > 10_000 for name in ("retrieval", "retrieval_maps"))
