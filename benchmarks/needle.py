"""RULER's retrieval through BF16, through our caches, and through the FP8 kernels of others, on the same samples of one model.

    python -m benchmarks.needle samples --task niah_multikey_2 --lengths 4096,131072      # needs fp8attn[ruler], and no GPU
    python -m benchmarks.needle run --task niah_multikey_2 --lengths 4096,131072 [--stress 3] [--impl bf16,fp8attn]

`samples` writes `.needle/`, which git ignores; `run` reads it and writes `results/h100/needle.json`, and every answer beside it.

Others' kernels take K and V in rows with one scale for a whole tensor, as engines do: one (the default where a checkpoint has none), or
`:calibrated`. `:means` removes the means of K and V first. They stand behind transformers' attention interface: K and V come from a BF16
cache and are rounded to FP8 with their scale before every call, so the kernel sees what an FP8 cache of that scale would hold.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from fp8attn import KVScales, calibrate
from fp8attn.evaluation import models, needle, ruler
from fp8attn.evaluation.caches import BF16Cache, cache_factory, prefill
from fp8attn.evaluation.needle import Outcome
from fp8attn.evaluation.paired import compare, wilson
from fp8attn.evaluation.stress import STRENGTHS, plant
from fp8attn.numerics import E4M3, quantize

from . import peers
from .problem import Shape
from .results import ROOT, write

SAMPLES = ROOT / ".needle"
OURS = {"bf16": "bf16", "fp8attn": "fp8", "fp8attn-static": "fp8-static", "fp8attn-no-means": "fp8-no-means"}
KERNELS = {"fa3-fp8": peers.fa3, "vllm-fa3-fp8": peers.vllm_fa3}
SOURCES = (
    *("benchmarks/needle.py", "benchmarks/peers.py", "src/fp8attn/kernels", "src/fp8attn/ops.py", "src/fp8attn/layout.py"),
    *(f"src/fp8attn/evaluation/{name}.py" for name in ("caches", "needle", "ruler", "stress", "paired")),
    "models/stdlib-llama/model.safetensors",
)
FOREIGN = "foreign_fp8"  # what transformers calls them


@dataclass(frozen=True)
class ScaledShape(Shape):
    """A shape whose softmax scale holds the scales of Q and K."""

    scales: float = 1.0

    @property
    def softmax_scale(self) -> float:
        return super().softmax_scale * self.scales


class Foreign:
    """Somebody else's FP8 kernel as an attention function of transformers.

    Args:
        kernel: of `peers`: `kernel(shape, q, k, v)` gives a call.
        largest: the magnitudes of each layer's K and V to make scales of, and of Q its own, call by call. None: scales of one.
        means: remove the means of K and V first, and restore V's.
    """

    def __init__(self, kernel: Callable, largest: list[tuple[float, float]] | None, means: bool) -> None:
        self.kernel, self.largest, self.means = kernel, largest, means

    def __call__(self, module, query, key, value, attention_mask, scaling=None, **_) -> tuple[torch.Tensor, None]:
        if len(query) != 1 or attention_mask is not None:
            raise ValueError("other systems' kernels are asked one prompt at a time, without padding")
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        v_mean = 0
        if self.means:
            k, v_mean = k - k.mean(0, keepdim=True), v.float().mean(0, keepdim=True)
            v = v - v_mean
        scales = (1.0, 1.0, 1.0)
        if self.largest is not None:
            scales = tuple(x / E4M3.max for x in (float(q.abs().max()), *self.largest[module.layer_idx]))
        q8, k8, v8 = (quantize(x.float(), s).contiguous() for x, s in zip((q, k, v), scales, strict=True))
        dim = q.shape[-1]
        factor = scales[0] * scales[1] * (scaling or dim**-0.5) * dim**0.5
        shape = ScaledShape((len(k),), (len(q),), q.shape[1], k.shape[1], dim, True, factor)
        out = self.kernel(shape, q8, k8, v8)().float() * scales[2]
        if self.means:
            out = out + v_mean.repeat_interleave(q.shape[1] // k.shape[1], 1)
        return out.to(query.dtype)[None], None


def largest_values(model: Any, windows: torch.Tensor) -> list[tuple[float, float]]:
    """The largest magnitudes of K and V in each layer, over windows `[N, S]`."""
    found = []
    for window in windows:
        cache = BF16Cache(model.config)
        prefill(model, window[None].to(model.device), cache)
        found.append([[float(x.abs().max()) for x in (layer.keys, layer.values)] for layer in cache.layers])
    return [tuple(pair) for pair in torch.tensor(found).amax(0).tolist()]


def impls(names: list[str], model: Any, scales: KVScales, largest: list[tuple[float, float]]) -> Iterator[tuple[str, str, Callable]]:
    """(name, attention implementation, what makes its cache), registering the foreign ones as they come."""
    for name in names:
        if name in OURS:
            static = scales if name == "fp8attn-static" else None
            yield name, "fp8_kv", cache_factory(OURS[name], model.config, scales=static)
            continue
        base, _, options = name.partition(":")
        if base not in KERNELS or not set(options.split("+")) <= {"", "calibrated", "means"}:
            known = ", ".join((*OURS, *KERNELS))
            raise ValueError(f"no implementation is called {name!r}; choose from {known}, with :calibrated, :means or :calibrated+means")
        AttentionInterface.register(FOREIGN, Foreign(KERNELS[base], largest if "calibrated" in options else None, "means" in options))
        AttentionMaskInterface.register(FOREIGN, lambda *_, **__: None)
        yield name, FOREIGN, cache_factory("bf16", model.config)


DEFAULT = (
    *OURS,
    *(f"{kernel}{options}" for kernel in KERNELS for options in ("", ":calibrated", ":means", ":calibrated+means")),
)


def run(model: Any, tokenizer: Any, files: list[Path], names: list[str], text: torch.Tensor, chunk: int) -> list[Outcome]:
    """Every sample through every implementation, one prompt at a time; prints as it goes. Scales come from `text [N, S]`."""
    scales, largest, outcomes = calibrate(model, text.split(1)), largest_values(model, text), []
    for file in files:
        samples = list(needle.load_samples(file))
        for name, attention, make in impls(names, model, scales, largest):
            model.set_attn_implementation(attention)
            began = time.monotonic()
            heard = needle.ask(model, tokenizer, samples, {name: make}, chunk=chunk, batch_tokens=1)
            outcomes += heard
            share = sum(o.right for o in heard) / len(heard)
            print(f"{file.name} {name}: {share:.1%} of {len(heard)}, {time.monotonic() - began:.0f} s", flush=True)
    return outcomes


def rows(outcomes: list[Outcome], stress: int) -> list[dict]:
    """A row for each task, length and implementation: the accuracy, and what a pairing with BF16 says."""
    made = []
    for task, length, name in dict.fromkeys((o.task, o.length, o.cache) for o in outcomes):
        here = [o for o in outcomes if (o.task, o.length) == (task, length)]
        right = [o.right for o in here if o.cache == name]
        case = f"{task}-S{length}" + (f"-stress{stress}" if stress else "")
        row = {
            "case": case,
            "impl": name,
            "accuracy": sum(right) / len(right),
            "interval": wilson(sum(right), len(right)),
            "samples": len(right),
        }
        if name != "bf16" and any(o.cache == "bf16" for o in here):
            pair = compare(here, "bf16", name)
            discordant = [a.index for a, _ in pair.discordant]
            row |= {"difference": pair.difference, "difference_interval": pair.interval, "p": pair.p, "lost": pair.only_first}
            row |= {"won": pair.only_second, "discordant": discordant}
        made.append(row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["samples", "run"])
    parser.add_argument("--model", help="a folder or Hugging Face id; default: the committed model")
    parser.add_argument("--task", default="niah_multikey_2", help="some of " + ", ".join(ruler.NAMES))
    parser.add_argument("--lengths", default="4096,8192,16384,32768,65536,131072")
    parser.add_argument("--samples", type=int, default=500)
    parser.add_argument("--impl", default=",".join(DEFAULT))
    parser.add_argument("--stress", type=int, default=0, choices=range(len(STRENGTHS)))
    parser.add_argument("--chunk", type=int, default=1 << 20, help="tokens of a prefill's forward; default: the whole prompt")
    args = parser.parse_args()
    cases = [(task, int(length)) for task in args.task.split(",") for length in args.lengths.split(",")]
    files = [SAMPLES / f"{task}-{length}.jsonl.xz" for task, length in cases]
    if args.what == "samples":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(args.model or models.default_model())
        for (task, length), file in zip(cases, files, strict=True):
            needle.save_samples(file, ruler.ruler_samples(tokenizer, task, lengths=(length,), samples=args.samples))
            print(f"{file}: {file.stat().st_size / 1e6:.1f} MB", flush=True)
        return
    names = args.impl.split(",")
    missing = {"fa3-fp8": "fa3", "vllm-fa3-fp8": "vllm-fa3"}
    names = [name for name in names if name in OURS or missing[name.partition(":")[0]] in peers.available()]
    model, tokenizer = models.load(args.model)
    plant(model, STRENGTHS[args.stress])
    text = models.tokenize(tokenizer, models.read_text(None, args.model))
    outcomes = run(model, tokenizer, files, names, models.windows(text, 8192, 4, from_end=True), args.chunk)
    mark = f"-stress{args.stress}" if args.stress else ""
    needle.save_outcomes(ROOT / f"results/h100/needle{mark}.jsonl.xz", outcomes)
    write(f"results/h100/needle{mark}.json", rows(outcomes, args.stress), SOURCES)


if __name__ == "__main__":
    main()
