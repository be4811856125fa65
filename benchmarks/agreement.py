"""Do prefill and decode agree? The same tokens go through the same cache, once all in a prompt, and once with the last ones decoded one at
a time: how far apart are the predictions? Reinforcement learning, whose trainer and sampler take different paths, needs them close.

    python -m benchmarks.agreement [case substring ...] [--windows N] [--decode 512] [--save]

Of every window the last `decoded` tokens are compared. BF16 is measured beside our caches, because its own two paths round differently as
well: through FlashAttention-3 where it is installed, else through torch's attention.
"""

from __future__ import annotations

import time
from typing import Any

import torch

from fp8attn.evaluation import models
from fp8attn.evaluation.caches import BF16Cache, MakeCache, forward, prefill

from . import needle_systems, peers, results
from .real_model import CASES as REAL
from .real_model import OURS, installed, our_cache

IMPLS = ("bf16", "fp8attn-int8-keys", "fp8attn-e4m3-keys")
CASES = {name: REAL[name] for name in ("smollm2-S2048", "stdlib-S4096")}
WINDOWS = 8  # side by side, as the sequences of a batch


def attend(impl: str, model: Any) -> tuple[MakeCache, str]:
    """Make the model attend as `impl` does; what makes its cache, and the name of the attention."""
    model.set_attn_implementation("fp8_kv")
    if impl in OURS:
        return our_cache(impl, model.config, "auto"), "fp8attn"
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
    """How far two sets of logits `[B, n, vocabulary]` are apart, with the true next tokens `[B, n]`.

    `dlogp_mean`, `dlogp_max`: the absolute difference of the true token's log-probability, in nats. `kl`: the mean divergence of prefill's
    prediction from decode's, in nats. `top1`: the share of tokens where both think the same one likeliest.
    """
    differences, kl, same = [], [], []
    for ours, theirs, target in zip(prefilled, decoded, targets, strict=True):  # a window at a time bounds the memory
        ours, theirs = (x.float().log_softmax(-1) for x in (ours, theirs))
        differences.append((ours - theirs).gather(-1, target[:, None])[:, 0].abs())
        kl.append((ours.exp() * (ours - theirs)).sum(-1))
        same.append((ours.argmax(-1) == theirs.argmax(-1)).float())
    differences, kl, same = (torch.cat(x) for x in (differences, kl, same))
    return {
        "dlogp_mean": differences.mean().item(),
        "dlogp_max": differences.max().item(),
        "kl": kl.mean().item(),
        "top1": same.mean().item(),
    }


def measure(
    case: str, model: Any, windows: torch.Tensor, *, impls: tuple[str, ...] = IMPLS, decode: int = 512, chunk: int = 8192
) -> list[dict]:
    """A row for each implementation, over `windows [B, S + 1]`."""
    windows = windows.to(model.device)
    rows = []
    for impl in impls:
        make, attention = attend(impl, model)
        found = compare(*both_paths(model, windows[:, :-1], make, decode, chunk), windows[:, -decode:])
        rows.append({"case": case, "impl": impl, "attention": attention, "windows": len(windows), "decoded": decode, **found})
        print(f"{case} {impl} ({attention}): " + ", ".join(f"{key} {value:.4g}" for key, value in found.items()), flush=True)
    return rows


@torch.no_grad()
def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--windows", type=int, default=WINDOWS, help="windows of each case, side by side")
    parser.add_argument("--decode", type=int, default=512, help="tokens of each window that are decoded one at a time")
    args = results.parse(parser)
    found = []
    for name in installed(results.chosen(CASES, args.cases)):
        case, began = CASES[name], time.monotonic()
        model, tokenizer = models.load(case.model)
        text = models.tokenize(tokenizer, models.read_text(case.text))
        found += measure(name, model, models.windows(text, case.context + 1, args.windows), decode=args.decode)
        print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    if args.save:
        results.save("agreement", found)


if __name__ == "__main__":
    main()
