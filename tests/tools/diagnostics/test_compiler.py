"""The doctor names Triton and ptxas, and what is known of the two together."""

import json

import pytest
import torch
import triton
from triton import knobs

from fp8attn_tools.diagnostics import compiler, diagnose
from fp8attn_tools.diagnostics.compiler import judge, kept_copies


def test_the_doctor_names_both():
    check = next(check for check in diagnose(measure=False) if check.name == "compiler of Hopper's kernels")
    release = ".".join(triton.__version__.split(".")[:2])
    assert check.detail.startswith(f"Triton {release}, ptxas 1")


@pytest.mark.parametrize(
    ("gpu", "status", "detail"),
    [(False, "info", "Triton 3.8, ptxas 12.9"), (True, "warn", "Triton 3.8, ptxas 12.9: slower")],
)
def test_compilers_are_judged_where_they_compile(monkeypatch, gpu, status, detail):
    monkeypatch.setattr(compiler, "compiler", lambda: ("warn", "Triton 3.8, ptxas 12.9: slower"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    check = next(check for check in diagnose(measure=False) if check.name == "compiler of Hopper's kernels")
    assert (check.status, check.detail) == (status, detail)


@pytest.mark.parametrize(
    ("release", "ptxas", "kept", "status", "said"),
    [
        ((3, 9), (13, 4), {}, "ok", []),
        ((3, 6), (12, 8), {}, "ok", ["can overwrite operands of running products", "searched for this, and have none"]),
        (
            (3, 9),
            (12, 9),
            {},
            "warn",
            ["can overwrite operands", "prefill is slower", "unset TRITON_PTXAS_BLACKWELL_PATH"],
        ),
        ((3, 8), (12, 9), {}, "ok", ["can overwrite operands of running products", "searched for this, and have none"]),
        (
            (3, 8),
            (13, 4),
            {"a copy has another reader": 2},
            "warn",
            ["have copies of their operands: a copy has another reader"],
        ),
        ((3, 10), (13, 5), {}, "warn", ["measured were Triton 3.6 with ptxas 12.8 and Triton 3.8 with ptxas 12.9 and"]),
        (
            (3, 9),
            (13, 4),
            {"a copy has another reader": 2},
            "warn",
            ["2 compiled prefill kernels", "a copy has another reader"],
        ),
    ],
)
def test_what_is_known_of_a_pair(release, ptxas, kept, status, said):
    found, detail = judge(release, ptxas, kept)
    assert found == status and all(text in detail for text in said), detail
    assert detail.startswith("Triton 3.") and (said or ":" not in detail)


def test_kernels_that_kept_their_copies_are_counted(tmp_path, monkeypatch):
    for i, note in enumerate(("direct", "a reason", "a reason", None)):
        (tmp_path / str(i)).mkdir()
        (tmp_path / str(i) / "prefill_kernel.json").write_text(
            json.dumps({} if note is None else {"fp8attn_operands": note})
        )
    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    assert kept_copies() == {"a reason": 2}
