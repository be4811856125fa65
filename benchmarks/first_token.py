"""Seconds from a cache to a prompt's first token, and of `warmup`, in a new process with an empty Triton cache.

A model of Llama-3.1-8B's shape with random weights and 4 layers gets a prompt, and decodes one more token. Each run is
a process. `fp8attn` compiles its kernels side by side. `fp8attn, again` is a second process, which finds them on disk.
Time begins when the model is on the GPU and has run without a cache. `warmup` compiles all kernels of the shape.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LLAMA = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
CASES: dict[str, dict[str, Any]] = {
    "llama": {"shape": LLAMA, "tokens": 8192},
    "warmup": {},
}
AGAIN = ("llama",)  # cases that also run a second time
LAYERS = 4
SECONDS = 120  # for one process
PROCESSES = True  # it measures in processes of its own


def measure(case: str) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
        environment = os.environ | {"TRITON_CACHE_DIR": folder, "PYTHONPATH": path}
        for impl in ("fp8attn", "fp8attn, again") if case in AGAIN else ("fp8attn",):
            command = [sys.executable, "-m", __name__, case]
            ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=SECONDS)
            if ended.returncode:
                raise RuntimeError(f"{case}, {impl}: {ended.stderr[-2000:]}")
            yield {"case": case, "impl": impl, **json.loads(ended.stdout.splitlines()[-1])}


# In a process of its own


def main(case: str) -> None:
    """Print the seconds of one run as JSON."""
    import triton

    compiled: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)
    found = warmup() if case == "warmup" else first_token(**CASES[case])
    about = {"cores": len(os.sched_getaffinity(0)), "triton": triton.__version__}
    counts = {} if case == "warmup" else {"compiled": sum(compiled), "loaded": len(compiled) - sum(compiled)}
    print(json.dumps(found | counts | about))


def warmup() -> dict[str, float]:
    import fp8attn

    begun = time.perf_counter()
    fp8attn.warmup(num_q_heads=32, num_kv_heads=8, head_dim=128)
    return {"seconds": round(time.perf_counter() - begun, 1)}


def first_token(shape: dict[str, int], tokens: int) -> dict[str, float]:
    """Seconds to the first and the second token through `FP8Cache`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fp8attn.integrations.transformers import FP8Cache

    from .problem import DEVICE

    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    config = LlamaConfig(
        **shape, intermediate_size=1024, num_hidden_layers=LAYERS, vocab_size=1024, max_position_embeddings=1 << 15
    )
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(DEVICE):
            model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)
    model.set_attn_implementation("sdpa")
    ids = torch.randint(1024, (1, tokens), device=DEVICE)
    with torch.inference_mode():
        model(ids[:, :64], use_cache=False)  # torch's own kernels
        synchronize()
        begun = time.perf_counter()
        cache = FP8Cache(model)
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        token.tolist()
        first = time.perf_counter() - begun
        model(token, past_key_values=cache).logits[:, -1].argmax(-1).tolist()
        return {"first_token_s": round(first, 2), "second_token_s": round(time.perf_counter() - begun - first, 2)}


if __name__ == "__main__":
    main(*sys.argv[1:])
