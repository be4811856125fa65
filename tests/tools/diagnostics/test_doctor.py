"""The diagnosis reports what this machine can run, and why it cannot run the rest."""

import pytest
import torch

import fp8attn
from fp8attn import backends
from fp8attn_tools.diagnostics import accumulation, diagnose
from fp8attn_tools.diagnostics.accumulation import Accumulation
from fp8attn_tools.diagnostics.doctor import _fp8_support


def test_this_machine():
    checks = {check.name: check for check in diagnose()}
    assert checks["torch"].detail == torch.__version__
    assert next(iter(checks.values())).detail == fp8attn.__version__  # a bug report begins with it
    assert checks["backend reference on cpu"].status == "ok"
    assert {check.status for check in checks.values()} <= {"ok", "no", "info"}
    if not torch.cuda.is_available():
        assert checks["gpu"].status == "no"


def test_reasons_are_those_of_the_backends(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    check = next(check for check in diagnose() if check.name == "backend triton on cpu")
    assert check.status == "no"
    assert check.detail == backends.unsupported_reason("triton", "cpu", torch.bfloat16)


def test_missing_package(monkeypatch):
    monkeypatch.setattr("fp8attn_tools.diagnostics.doctor.PACKAGES", {"no-such-package": "nothing"})
    check = next(check for check in diagnose() if check.name == "no-such-package")
    assert (check.status, check.detail) == ("no", "not installed; needed for nothing")


@pytest.fixture
def h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: type("P", (), {"total_memory": 80 * 2**30})()
    )


def test_gpus_are_named(h100):
    checks = {check.name: check for check in diagnose(measure=False)}
    assert checks["cuda:0"].detail == "H100, 80 GiB, capability 9.0: FP8 tensor cores"
    assert "backend triton on cuda:0" in checks and "backend fa3 on cuda:0" in checks
    assert checks["backend hopper on cuda:0"].detail == "runs a head_dim of up to 256; 512 runs on triton"
    assert not any("accumulation" in name for name in checks)


def test_kernels_are_measured_where_they_run(h100, monkeypatch):
    found = {
        "ours": Accumulation({(1, 1024): 0.001, (1, 131072): 0.002}),
        "theirs": Accumulation({(1, 1024): 0.02, (1, 131072): 0.5}),
    }
    monkeypatch.setattr(accumulation, "kernels", lambda device: dict.fromkeys(found))
    results = iter(found.values())
    monkeypatch.setattr(accumulation, "measure", lambda attend, device: next(results) if device == "cuda:0" else None)
    checks = [check for check in diagnose() if check.name.startswith("accumulation")]
    assert [(check.name, check.status) for check in checks] == [
        ("accumulation of ours", "ok"),
        ("accumulation of theirs", "warn"),
    ]
    assert checks[0].detail == "two-level: 0.20% off at 131,072 tokens"
    assert checks[1].detail.startswith("single-level: hurts from 1,024 tokens")


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(accumulation, "kernels", lambda device: pytest.fail("measured"))
    checks = {check.name: check for check in diagnose()}
    assert checks["backend fa3 on cpu"].detail == "FlashAttention-3 is for NVIDIA GPUs, not cpu"


def test_fp8_support():
    assert _fp8_support((8, 9)) == "FP8 conversion in hardware"
    assert _fp8_support((12, 0)) == "FP8 tensor cores"
    assert "16-bit arithmetic" in _fp8_support((8, 0))
