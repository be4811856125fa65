"""Measures the difference between the predictions of prefill and of decode on the same tokens.

The tokens go through the same cache, once all in a prompt, and once with the last ones decoded one at a time. Reinforcement learning, whose
trainer and sampler take different paths, needs them close.

Of every window the last 512 tokens are compared. BF16 is measured beside our caches, because its own two paths round differently as well:
through FlashAttention-3 where it is installed, else through torch's attention.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from fp8attn_tools.evaluation.caches import BF16Cache, MakeCache, forward, prefill

from . import needle_systems, peers, texts
from .real_model import our_cache

IMPLS = ("bf16", "fp8attn-int8-keys", "fp8attn-e4m3-keys")
WINDOWS = 8  # side by side, as the sequences of a batch
CASES = {name: replace(texts.TEXTS[name], count=WINDOWS) for name in ("smollm2-S2048", "stdlib-S4096")}
DECODED = 512  # tokens of each window


def attend(impl: str, model: Any) -> tuple[MakeCache, str]:
    """Set the attention of `impl`. Returns a function that makes its cache, and the name of the attention."""
    model.set_attn_implementation("fp8_kv")
    if impl != "bf16":
        return our_cache(impl, model, "auto"), "fp8attn"
    if model.device.type == "cuda" and "fa3" in peers.available():
        rows = needle_systems.Rows(needle_systems.KERNELS["bf16"])
        needle_systems.use(model, rows)
        return lambda: rows.cache(model.config), "fa3"
    return lambda: BF16Cache(model.config), "sdpa"


def both_paths(model: Any, windows: torch.Tensor, make: MakeCache, decode: int, chunk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The logits of the last `decode` tokens of `windows [B, S]` by prefill and by decode, `[B, decode, vocabulary]` each."""
    cache, start = make(), windows.shape[1] - decode
    ahead = start // chunk * chunk  # so that the last forward has all that is compared
    if ahead:
        prefill(model, windows[:, :ahead], cache, chunk=chunk)
    prefilled = forward(model, windows[:, ahead:], cache, logits=decode)
    cache = make()
    prefill(model, windows[:, :start], cache, chunk=chunk)
    decoded = torch.cat([forward(model, token, cache) for token in windows[:, start:].split(1, 1)], 1)
    return prefilled, decoded


def compare(prefilled: torch.Tensor, decoded: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The differences between two sets of logits `[B, n, vocabulary]`, with the true next tokens `[B, n]`.

    `dlogp_mean`, `dlogp_max`: the absolute difference of the true token's log-probability, in nats. `kl`: the mean divergence of prefill's
    prediction from decode's, in nats. `top1`: the share of tokens where both think the same one likeliest.
    """
    found = []
    for ours, theirs, target in zip(prefilled, decoded, targets, strict=True):  # a window at a time bounds the memory
        ours, theirs = (x.float().log_softmax(-1) for x in (ours, theirs))
        difference = (ours - theirs).gather(-1, target[:, None])[:, 0].abs()
        same = (ours.argmax(-1) == theirs.argmax(-1)).float()
        found.append(torch.stack([difference, (ours.exp() * (ours - theirs)).sum(-1), same]))
    difference, kl, same = torch.cat(found, 1)
    mean, kl, top1 = (x.mean().item() for x in (difference, kl, same))
    return {"dlogp_mean": mean, "dlogp_max": difference.max().item(), "kl": kl, "top1": top1}


def rows(
    case: str, model: Any, windows: torch.Tensor, *, impls: tuple[str, ...] = IMPLS, decode: int = DECODED, chunk: int = 8192
) -> Iterator[dict]:
    """A row for each implementation, over `windows [B, S + 1]`."""
    windows = windows.to(model.device)
    for impl in impls:
        make, attention = attend(impl, model)
        found = compare(*both_paths(model, windows[:, :-1], make, decode, chunk), windows[:, -decode:])
        yield {"case": case, "impl": impl, "attention": attention, "windows": len(windows), "decoded": decode, **found}


@torch.no_grad()
def measure(case: str) -> Iterator[dict]:
    text = CASES[case]
    if (loaded := texts.load(text.model)) is not None:
        model, tokenizer = loaded
        yield from rows(case, model, text.windows(tokenizer))
