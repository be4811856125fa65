"""Time of `calibrate` beside the plain forward that it watches, on a model of Llama-3.1-8B's shape with random weights.

A text of 1,048,576 tokens in windows of 8,192. 8 of the 32 layers run: observers are of a layer, so the shares are those of the whole
model. `forward` is the model alone, the faster of before and after the others. `share` is its time over that of a method. Random
weights have no means. (With one, the first 32,768 tokens run twice for percentile and mse, which costs 3%.) Before it is timed, each method
runs on 32,768 tokens: the scales of absmax must be those of a direct computation, and the others at most as large.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from transformers import DynamicCache

from fp8attn.formats.rotation import rotate
from fp8attn_tools import calibrate
from fp8attn_tools.calibration import METHODS

from . import models
from .problem import DEVICE

WINDOW = 8192
CASES = {f"llama-S{WINDOW}": 1 << 20}  # tokens
LAYERS = 8
CHECKED = 4  # windows


def seconds(call: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


@torch.no_grad()
def measure(case: str) -> Iterator[dict]:
    model, tokens = models.llama(), CASES[case]
    model.model.layers = model.model.layers[:LAYERS]
    model.config.num_hidden_layers = LAYERS
    draw = torch.Generator(DEVICE).manual_seed(0)
    text = torch.randint(0, model.config.vocab_size, (tokens // WINDOW, 1, WINDOW), device=DEVICE, generator=draw)
    check(model, text[:CHECKED])

    def forward() -> None:
        for ids in text:
            model(ids, use_cache=False, logits_to_keep=1)

    times = {"forward": seconds(forward)}
    for method in METHODS:
        times[method] = seconds(lambda method=method: calibrate(model, list(text), method=method))
    times["forward"] = min(times["forward"], seconds(forward))
    for impl, taken in times.items():
        speed = {"ms": round(1e3 * taken, 1), "tokens_per_s": round(tokens / taken), "share": round(times["forward"] / taken, 4)}
        yield {"case": case, "impl": impl, **speed, "tokens": tokens, "layers": LAYERS}


def check(model: torch.nn.Module, text: torch.Tensor) -> None:
    """Compare the scales of the first layer with the largest of its K and V."""
    found = {method: calibrate(model, list(text), method=method).layer(0) for method in METHODS}
    largest = torch.zeros(2, model.config.num_key_value_heads, device=DEVICE)
    for ids in text:
        kept = DynamicCache(config=model.config)
        model(ids, past_key_values=kept, use_cache=True, logits_to_keep=1)
        k, v = (x[0].float() for x in (kept.layers[0].keys, kept.layers[0].values))
        largest = torch.maximum(largest, torch.stack([rotate(k).abs().amax((1, 2)), v.abs().amax((1, 2))]))
    exact = found["absmax"]
    scales = torch.stack([exact.k_scale * 127, exact.v_scale * 448])
    torch.testing.assert_close(scales, largest.cpu(), rtol=1e-5, atol=0)
    assert not exact.k_mean.any() and not exact.v_mean.any()
    for method, layer in found.items():
        for name in ("q_scale", "k_scale", "v_scale"):
            ratio = getattr(layer, name) / getattr(exact, name)
            assert ((ratio > 0.1) & (ratio <= 1)).all(), f"{method}: {name} is {ratio.tolist()} of absmax's"
