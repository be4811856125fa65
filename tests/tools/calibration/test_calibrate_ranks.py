"""Calibration on two processes gives what one process gives: with heads divided over them, and with text divided over them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fp8attn import KVScales
from fp8attn_tools import calibrate

transformers = pytest.importorskip("transformers")
from fp8attn_tools import check_scales  # noqa: E402

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).with_name("run_calibrate.py")
NAMES = ("k_scale", "v_scale", "q_scale", "k_mean", "v_mean")


@pytest.fixture(scope="module")
def biased(tiny_model, tmp_path_factory):
    """With a V of offsets up to 8 deviations in the last layer, other ones in each head."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.bias.copy_(torch.linspace(-10, 10, 128))
    folder = tmp_path_factory.mktemp("biased")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def of_two(biased, tmp_path_factory):
    """The folder to which two processes have written their scales, heads and text divided."""
    from .run_calibrate import KINDS

    folder = tmp_path_factory.mktemp("ranks")
    for kind in KINDS:
        (folder / kind).mkdir()
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, str(rank), "2", folder, biased],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
    return folder


@pytest.mark.parametrize("kind", ["tensor", "data"])
def test_two_processes_are_one(biased, of_two, kind):
    from .run_calibrate import CASES, ids

    folder = of_two / kind
    model = transformers.AutoModelForCausalLM.from_pretrained(biased, dtype=torch.float32)
    for method, means in CASES.items():
        want = calibrate(model, ids().split(1), method=method, means=means)
        found = [KVScales.load(folder / f"{rank}-{method}.safetensors") for rank in range(2)]
        assert want.layer(1).v_mean.any() == means
        for index in want.layers:
            for name in NAMES:
                first, second = (getattr(scales.layer(index), name) for scales in found)
                assert torch.equal(first, second), (index, name)
                expected = getattr(want.layer(index), name)
                assert first.shape == expected.shape
                # Text divided: integers and maxima are exact, and sums of means are in another order. Heads divided: the model's own sums
                # are, so a value may be in the next bin of the histogram. Each process counts every seventh of its own queries.
                rtol = 0.5 if (name, kind) == ("q_scale", "data") and method != "absmax" else 1e-5 if kind == "data" else 2.0**-7
                torch.testing.assert_close(first, expected, rtol=rtol, atol=1e-5)
        for scales in found:
            assert (scales.tokens, scales.num_kv_heads, scales.method) == (900, 2, want.method)
            assert scales.k_offsets == pytest.approx(want.k_offsets, rel=1e-3)
            for index, pair in want.sqnr_db.items():
                assert scales.sqnr_db[index] == pytest.approx(pair, abs=0.1)  # dB; the rounding of the sums moves values over ties
    held_out = torch.randint(0, 257, (1, 150), generator=torch.Generator().manual_seed(2))
    rows = check_scales(model, [held_out], found[0]).rows()
    for rank in range(2):
        for row, theirs in zip(rows, json.loads((folder / f"{rank}-report.json").read_text()), strict=True):
            assert (row["layer"], row["tensor"]) == (theirs["layer"], theirs["tensor"])
            for what in ("saturated", "underflow"):
                assert theirs[what] == pytest.approx(row[what], abs=3 / (150 * 64))  # sums in another order: a value may cross an edge
    assert not list(folder.glob("state*"))  # each process removed its own checkpoint
