"""After `warmup`, another process compiles nothing."""

import json

import pytest
import torch

pytest.importorskip("triton")

from fp8attn import precompile
from tests.support import compiling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_calls_load_what_warmup_compiled(tmp_path, monkeypatch):
    """`warmup` gets fewer lengths than by default, to keep the test short. The calls have another order than its compilations."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    steps, prompts, batches = (1, 2, 5), (100, 1000), (1, 4)
    grid = f"w.STEPS, w.PROMPTS, w.BATCHES = {steps}, {prompts}, {batches}"
    monkeypatch.setattr(precompile, "SERVE", f"import fp8attn.precompile as w; {grid}; w.serve()")
    kernels = precompile.warmup(num_q_heads=8, num_kv_heads=2, head_dim=128)
    arguments = (",".join(map(str, numbers)) for numbers in ((8, 2, 128), steps, prompts, batches))
    called = json.loads(compiling.run("-m", "tests.kernels.run_cold_calls", *arguments, TRITON_CACHE_DIR=str(tmp_path)))
    assert called["compiled"] == []
    assert 10 <= called["loaded"] <= len(kernels)
