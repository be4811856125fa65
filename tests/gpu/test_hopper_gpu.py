"""The Hopper kernels against float64, by the checks of benchmarks/: every option, odd lengths, poison, graphs, equal bits."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")]


@pytest.mark.parametrize("kernel", ["decode", "prefill"])
def test_every_group_of_checks_passes(kernel):
    """Each group is a process of its own with a time limit, so that a hang or a crash fails by name."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", f"benchmarks.{kernel}_check"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, "\n".join(line for line in run.stdout.splitlines() if "ok " not in line)[-4000:]
