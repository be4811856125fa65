"""A hundred thousand tokens decoded behind a prompt, one at a time, while the cache's pages are copied, reordered, truncated and grown in
scale: how far predictions are from BF16's, segment by segment. Losses by position through decode come with it.

    python -m benchmarks.drift [--decode 100000] [--save]

Two sequences of held-out text side by side; a step through our cache is a CUDA graph. BF16 reads the same tokens in chunks.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from fp8attn import calibrate
from fp8attn.evaluation import models
from fp8attn.evaluation.caches import cache_factory
from fp8attn.evaluation.drift import drift

from . import results
from .problem import KEYS

IMPLS = {"fp8attn-static": "fp8-static", **{impl: f"fp8-{name}-keys" for impl, name in KEYS.items()}}


def rows(model, tokens, names: list[str], prompt: int, segment: int, chunk: int, calibration) -> list[dict]:
    """A row for each implementation and segment of `tokens [B, prompt + N + 1]`. Static scales come from `calibration [N, S]`."""
    found = []
    baseline, room = cache_factory("bf16", model.config), tokens.shape[1] - 1
    for name in names:
        scales = calibrate(model, calibration.split(1)) if name == "fp8attn-static" else None
        make = cache_factory(IMPLS[name], model.config, model=model, scales=scales, max_cache_len=room)
        began = time.monotonic()
        segments = drift(model, tokens, make, baseline, prompt=prompt, segment=segment, chunk=chunk)
        seconds = time.monotonic() - began
        print(f"{name}: {room - prompt} tokens in {seconds:.0f} s, {sum(s.growths for s in segments)} scales grown", flush=True)
        found += [{"case": f"decode-S{s.start}", "impl": name, "sequences": len(tokens), **asdict(s)} for s in segments]
    return found


def main() -> None:
    parser = results.arguments(__doc__, cases=False)
    parser.add_argument("--model", help="a folder or Hugging Face id; default: the committed model")
    parser.add_argument("--impl", default="fp8attn", help="some of " + ", ".join(IMPLS))
    parser.add_argument("--prompt", type=int, default=8192)
    parser.add_argument("--decode", type=int, default=100_000)
    parser.add_argument("--segment", type=int, default=500, help="tokens between two operations on the cache")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--chunk", type=int, default=8192)
    args = results.parse(parser)
    model, tokenizer = models.load(args.model)
    text = models.tokenize(tokenizer, models.read_text(None, args.model))
    tokens = models.windows(text, args.prompt + args.decode + 1, args.sequences)
    calibration = models.windows(text, min(8192, len(text) // 4), 4, from_end=True)
    found = rows(model, tokens, args.impl.split(","), args.prompt, args.segment, args.chunk, calibration)
    if args.save:
        results.save("drift", found)


if __name__ == "__main__":
    main()
