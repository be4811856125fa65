"""Seconds from a cache to a prompt's first token in a new process, with an empty Triton cache.

A model of Qwen2.5-0.5B's or Llama-3.1-8B's shape with random weights and few layers gets a prompt, and decodes one more token.
Each run is a process. `fp8attn` compiles its kernels side by side. `fp8attn, again` is a second process, which finds them on disk.
`one after another` compiles each kernel at its launch. Time begins when the model is on the GPU and has run without a cache. All
cases take some 90 seconds on 16 cores.

    python -m benchmarks.run first_token llama-e4m3
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
QWEN = dict(hidden_size=896, num_attention_heads=14, num_key_value_heads=2, head_dim=64)
LLAMA = dict(hidden_size=4096, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
CASES: dict[str, dict[str, Any]] = {
    "qwen-means-exact": {"shape": QWEN, "tokens": 1000, "means": True, "options": {"exact": True}},
    "llama": {"shape": LLAMA, "tokens": 8192},
    "llama-e4m3-static": {"shape": LLAMA, "tokens": 8192, "options": {"key_dtype": "e4m3", "max_cache_len": 16384}},
    "llama-softcap-sinks": {"shape": LLAMA, "tokens": 8192, "attention": True},
}
COMPARED = ("llama",)  # cases that are also measured one after another, and again
LAYERS = 4


def measure(case: str) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        runs = [("fp8attn", one)]
        if case in COMPARED:
            runs += [("fp8attn, again", one), ("one after another", other)]
        for impl, folder in runs:
            environment = os.environ | {
                "TRITON_CACHE_DIR": folder,
                "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *sys.path]),
            }
            ended = subprocess.run(
                [sys.executable, "-m", __name__, case, impl], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
            )
            if ended.returncode:
                sys.exit(f"{case}, {impl}: {ended.stderr[-2000:]}")
            yield {"case": case, "impl": impl, **json.loads(ended.stdout.splitlines()[-1])}


# In a process of its own


def main(case: str, impl: str) -> None:
    """Print the seconds of one run as JSON."""
    import torch
    import triton
    from transformers import LlamaConfig, LlamaForCausalLM

    from fp8attn.precompile import first

    given = CASES[case]
    compiled: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: compiled.append(not cache_hit)
    config = LlamaConfig(
        **given["shape"], intermediate_size=1024, num_hidden_layers=LAYERS, vocab_size=1024, max_position_embeddings=1 << 15
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    ids = torch.randint(1024, (1, given["tokens"]), device="cuda")
    if impl == "one after another":
        first.prepare = lambda device, calls: None
    with torch.inference_mode():
        model(ids[:, :64], use_cache=False)  # torch's own kernels
        torch.cuda.synchronize()
        begun = time.perf_counter()
        step = _paged if given.get("attention") else _model
        after = step(model, ids, given)
        torch.cuda.synchronize()
        token = time.perf_counter() - begun
        after()
        torch.cuda.synchronize()
    print(json.dumps({
        "first_token_s": round(token, 2), "second_token_s": round(time.perf_counter() - begun - token, 2), "compiled": sum(compiled),
        "loaded": len(compiled) - sum(compiled), "cores": len(os.sched_getaffinity(0)), "triton": triton.__version__,
    }))  # fmt: skip


def _model(model: Any, ids: Any, given: dict[str, Any]) -> Any:
    """A prompt through `FP8Cache`, and a function that decodes. `means`: each of four layers has another combination of static means."""
    import torch

    from fp8attn.integrations.transformers import FP8Cache

    cache = FP8Cache(model, **given.get("options", {}))
    if given.get("means"):
        shape = given["shape"]["num_key_value_heads"], given["shape"]["head_dim"]
        for i, layer in enumerate(cache.layers):
            layer.k_mean, layer.v_mean = (torch.ones(shape, dtype=torch.float32, device="cuda") if i & bit else None for bit in (1, 2))
    token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
    token.tolist()
    return lambda: model(token, past_key_values=cache).logits[:, -1].argmax(-1).tolist()


def _paged(model: Any, ids: Any, given: dict[str, Any]) -> Any:
    """A prompt and a decode step through `PagedKVCache` with a softcap and sinks, which no Llama has."""
    import torch

    from fp8attn import PagedKVCache

    heads, kv_heads, dim = (given["shape"][name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    cache, sinks = PagedKVCache(kv_heads, dim, num_layers=LAYERS, device="cuda"), torch.zeros(heads, device="cuda")

    def step(tokens: int) -> None:
        for layer in range(LAYERS):
            x = torch.randn(tokens, kv_heads, dim, device="cuda")
            cache.append(layer, x, x)
            cache.attention(layer, torch.randn(tokens, heads, dim, device="cuda"), softcap=30.0, sinks=sinks)

    step(ids.shape[1])
    return lambda: step(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
