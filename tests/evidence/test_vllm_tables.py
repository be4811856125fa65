"""The tables of vLLM's engines are made of the rows that `benchmarks.vllm` keeps."""

import json

from benchmarks.vllm import __main__ as command
from evidence import rows as reading
from evidence.tables.vllm import label, vllm_times


def test_rows_of_engines_become_tables(monkeypatch, tmp_path):
    versions = {"vllm": "0.26.0", "torch": "2.11.0", "triton": "3.6.0"}
    check = {"case": "check", "device": "NVIDIA H200", "commit": "abc", "versions": versions}
    times = {"bf16": 9.0, "fp8": 8.0, "ours": 6.0}
    found = [{"model": "llama", "cache": cache, **check} for cache in times]
    found += [
        {"model": model, "cache": cache, "case": case, "ms": ms, "attention_ms": 1.0}
        for model, case in (("llama", "prefill-S2048"), ("llama", "decode-B16-S2048"), ("gemma3", "decode-B1-S131072"))
        for cache, ms in times.items()
    ]
    found.append({"model": "gemma3", "cache": "fp8", "case": "engine", "error": "no time left"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, found)))
    command.save(tmp_path, tmp_path)
    held = json.loads((tmp_path / "h200/vllm.json").read_text())
    assert (held["commit"], held["triton"], held["peers"]) == ("abc", "3.6.0", {"vllm": "vllm 0.26.0"})
    assert len(held["rows"]) == 12 and not any("error" in row for row in held["rows"])
    monkeypatch.setattr(reading, "RESULTS", tmp_path)
    llama, gemma = vllm_times().split("\n\n")
    assert "| first token, prompt of 2k | 9.00 | 8.00 | 6.00 | 1.50 | 1.33 |" in llama and "16 x 2k" in llama and "check" not in llama
    assert gemma.startswith("| Gemma 3 12B, half of its layers |") and gemma.count("\n") == 2


def test_cases_are_named_in_words():
    assert label("prefill-S131072") == "first token, prompt of 128k" and label("decode-B1-S131072") == "decode step, 1 x 128k"
