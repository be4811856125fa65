"""After `warmup`, another process compiles nothing."""

import json

import pytest
import torch

pytest.importorskip("triton")

from tests.support import compiling

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_calls_load_what_warmup_compiled(tmp_path):
    """`warmup` gets fewer lengths than by default, to keep the test short. The calls have another order than its
    compilations.
    """
    steps, prompts, batches = (1, 2, 5), (100, 1000), (1, 4)
    grid = f"calls.STEPS, calls.PROMPTS, calls.BATCHES = {steps}, {prompts}, {batches}"
    warmup = "fp8attn.warmup(num_q_heads=8, num_kv_heads=2, head_dim=128)"
    program = f"import fp8attn; from fp8attn.precompile import calls; {grid}; print(len({warmup}))"
    kernels = int(compiling.run("-c", program, TRITON_CACHE_DIR=str(tmp_path)))
    arguments = (",".join(map(str, numbers)) for numbers in ((8, 2, 128), steps, prompts, batches))
    called = json.loads(compiling.run("-m", "tests.gpu.run_cold_calls", *arguments, TRITON_CACHE_DIR=str(tmp_path)))
    assert called["compiled"] == []
    assert 10 <= called["loaded"] <= kernels
