"""The systems that `needle` compares, and everything that determines their answers.

A change here makes everybody's answers stale (`fingerprint.NEEDLE`): the implementations and their scales, and in `Work` which
prompts run side by side, in what chunks, and where an answer ends. What is measured is RULER's, but that an answer ends with its first
line, for everybody: the model writes a value and a line end.

Others' kernels take K and V in rows with one scale for a whole tensor, as engines do: one (the default where a checkpoint has none), or
`:calibrated`, of Q, K and V, on the text that `fp8attn-static` sees. `:means` subtracts each prompt's means of K and V. cuDNN's FP8 takes
no prompts of unlike lengths side by side and plans anew for each length; it is not among them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from fp8attn import KVScales
from fp8attn.formats.codec import E4M3, quantize
from fp8attn_tools import calibrate
from fp8attn_tools.evaluation import models, needle
from fp8attn_tools.evaluation.caches import BF16Cache, MakeCache, prefill
from fp8attn_tools.evaluation.outcomes import Outcome, Sample, load_samples
from fp8attn_tools.evaluation.stress import STRENGTHS, plant

from . import peers, texts
from .peers import fa3
from .problem import KEYS, Shape

OURS = (*KEYS, "fp8attn-static")
KERNELS = {"bf16": fa3.attention, "fa3-fp8": fa3.attention, "vllm-fa3-fp8": fa3.vllm_attention}
NEEDS = {"bf16": "fa3", "fa3-fp8": "fa3", "vllm-fa3-fp8": "vllm-fa3"}
OPTIONS = ("", ":calibrated", ":means", ":calibrated+means")
IMPLS = ("bf16", *OURS, *(f"{kernel}{options}" for kernel in KERNELS if kernel != "bf16" for options in OPTIONS))
CHUNK = 1 << 20  # tokens of a prefill's forward: the whole prompt
BATCH_TOKENS = 1 << 20  # 8 prompts of 131,072: 6.5 GB of K and V in BF16, and twice that for one layer's activations
ATTENTION = "kernel_over_rows"  # what transformers calls the kernels that are not ours
Scales = tuple[float, float, float]  # of Q, K and V


class Padding:
    """Which tokens are real, by a mask `[B, T]` of all in the cache, the last `length` of them new.

    Attributes:
        keys, queries: how many of each row are, in the cache and among the new ones.
        there, here: their places in the cache and among the new ones, rows one after another.
    """

    def __init__(self, mask: torch.Tensor, length: int) -> None:
        self.mask = mask
        self.keys = tuple(mask.sum(1).tolist())
        self.queries = tuple(min(length, n) for n in self.keys)
        self.there, self.here = (x.flatten().nonzero()[:, 0] for x in (mask, mask[:, -length:]))


class Rows:
    """A kernel over rows of tokens, as an attention function of transformers. Padding is left out, so that lengths may be unlike.

    Args:
        kernel: of `peers`: `kernel(shape, q, k, v)` gives a call.
    """

    def __init__(self, kernel: Callable) -> None:
        self.kernel = kernel
        self.mask: torch.Tensor | None = None  # of the forward that runs
        self.padding: Padding | None = None

    def note(self, *_, attention_mask: torch.Tensor | None = None, **__) -> torch.Tensor | None:
        """The mask function of transformers, called once a forward, before its layers: the mask `[B, T]` as it is."""
        self.mask = attention_mask
        return attention_mask

    def __call__(self, module, query, key, value, attention_mask, scaling, **_) -> tuple[torch.Tensor, None]:
        """`query [B, num_q_heads, S, D]`; `key`, `value [B, num_kv_heads, T, D]`; `attention_mask [B, T]`, False for padding, or None."""
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        (batch, length, heads, dim), (total, kv_heads) = query.shape, key.shape[1:3]
        padded = attention_mask is not None
        if padded and (self.padding is None or self.padding.mask is not attention_mask):  # layers share it
            self.padding = Padding(attention_mask, length)
        real = self.padding
        keys, queries = (real.keys, real.queries) if padded else ((total,) * batch, (length,) * batch)
        shape = Shape(keys, queries, heads, kv_heads, dim, True, scaling * dim**0.5)
        if padded:
            given = _take(query, real.here), _take(key, real.there), _take(value, real.there)
        else:
            given = [x.flatten(0, 1) for x in (query, key, value)]
        found = self.attend(module.layer_idx, shape, *given)
        if padded:
            rows, found = found, found.new_zeros(batch * length, heads, dim)
            found[real.here] = rows
        return found.unflatten(0, (batch, length)), None

    def attend(self, layer: int, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention over rows `[tokens, heads, D]`."""
        return self.kernel(shape, q, k, v)()

    def cache(self, config: Any) -> Cache:
        """An empty cache for this kernel."""
        return BF16Cache(config)


class RowsFP8(Rows):
    """A kernel as in `Rows`, in FP8, and the FP8 cache that it reads.

    Args:
        kernel: as of `Rows`.
        scales: of each layer's Q, K and V. None: one.
        means: remove the means of K and V over each sequence's prompt (the first forward), and restore V's.
    """

    def __init__(self, kernel: Callable, scales: list[Scales] | None, means: bool) -> None:
        super().__init__(kernel)
        self.scales, self.means = scales, means
        self.layers: list[FP8Rows] = []

    def attend(self, layer: int, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        held = self.layers[layer]
        q_scale, k_scale, v_scale = held.scales
        shape = replace(shape, scales=shape.scales * q_scale * k_scale)
        out = self.kernel(shape, quantize(q, q_scale).contiguous(), k, v)().float() * v_scale
        if self.means:
            mean = held.v_mean[:, 0].repeat_interleave(shape.q_heads // shape.kv_heads, 1)
            out += mean.repeat_interleave(torch.tensor(shape.queries, device=out.device), 0)
        return out.to(q.dtype)

    def cache(self, config: Any) -> Cache:
        self.layers = [FP8Rows(scales, self) for scales in self.scales or [(1.0, 1.0, 1.0)] * config.num_hidden_layers]
        return Cache(layers=self.layers)


class FP8Rows(DynamicLayer):
    """A layer's K and V in FP8, token after token, with one scale each: `keys` and `values [B, num_kv_heads, T, D]`.

    Args:
        scales: of Q, K and V.
        rows: whose cache this is a layer of; it knows whether means are removed, and which tokens are padding.
    """

    def __init__(self, scales: Scales, rows: RowsFP8) -> None:
        super().__init__()
        self.scales, self.rows = scales, rows

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        new = [x.transpose(1, 2) for x in (key_states, value_states)]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.k_mean, self.v_mean = map(self.mean, new)
        low = [quantize(x - mean, s) for x, mean, s in zip(new, (self.k_mean, self.v_mean), self.scales[1:], strict=True)]
        if self.keys.numel():
            held = [x.transpose(1, 2) for x in (self.keys, self.values)]
            low = [torch.cat([_bytes(old), _bytes(x)], 1).view(x.dtype) for old, x in zip(held, low, strict=True)]
        self.keys, self.values = (x.contiguous().transpose(1, 2) for x in low)
        return self.keys, self.values

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """What is removed of K or V, `[B, 1, num_kv_heads, D]`: zero, or the mean of a prompt `[B, S, num_kv_heads, D]` but for padding."""
        if not self.rows.means:
            return torch.zeros_like(x[:, :1], dtype=torch.float32)
        real = torch.ones(x.shape[:2], device=x.device) if self.rows.mask is None else self.rows.mask.float()
        return torch.einsum("bshd,bs->bhd", x.float(), real / real.sum(1, keepdim=True))[:, None]


def _bytes(x: torch.Tensor) -> torch.Tensor:
    """FP8 tensors viewed as integers, which a CPU can gather and concatenate; other dtypes unchanged."""
    return x.view(torch.uint8) if x.itemsize == 1 else x


def _take(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Rows `[rows, heads, D]` of `x [B, T, heads, D]`."""
    return _bytes(x).flatten(0, 1)[rows].view(x.dtype)


class _Largest(Rows):
    """Attention in 16 bits that notes the largest magnitudes of each layer's Q, K and V."""

    def __init__(self, kernel: Callable) -> None:
        super().__init__(kernel)
        self.found: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        now = torch.stack([x.float().abs().max() for x in (q, k, v)])
        self.found[layer] = torch.maximum(self.found.get(layer, now), now)
        return super().attend(layer, shape, q, k, v)


def tensor_scales(model: Any, windows: torch.Tensor) -> list[Scales]:
    """One scale for each layer's Q, K and V: the largest magnitude over windows `[N, S]` becomes FP8's largest."""
    seen = _Largest(KERNELS["bf16"])
    use(model, seen)
    for window in windows:
        prefill(model, window[None].to(model.device), seen.cache(model.config), chunk=len(window))
    return [tuple((seen.found[layer] / E4M3.max).tolist()) for layer in sorted(seen.found)]


def use(model: Any, rows: Rows) -> None:
    """Set `rows` as a model's attention. The model then needs the caches of `rows`."""
    AttentionInterface.register(ATTENTION, rows)
    AttentionMaskInterface.register(ATTENTION, rows.note)
    model.set_attn_implementation(ATTENTION)


class Systems:
    """The implementations, around one model. Scales come from `text [N, S]`."""

    def __init__(self, model: Any, text: torch.Tensor) -> None:
        self.model, self.text = model, text

    @cached_property
    def static(self) -> KVScales:
        return calibrate(self.model, self.text.split(1))

    @cached_property
    def scales(self) -> list[Scales]:
        return tensor_scales(self.model, self.text)

    def enter(self, name: str) -> MakeCache:
        """Set the attention of `name`. Returns a function that makes its cache."""
        config = self.model.config
        if name in OURS:
            self.model.set_attn_implementation("fp8_kv")  # by which scales are found too, whoever was asked before
            return texts.make_cache(name, self.model, self.static if name == "fp8attn-static" else None)
        kernel, _, options = name.partition(":")
        rows = Rows(KERNELS[kernel])
        if kernel != "bf16":
            rows = RowsFP8(KERNELS[kernel], self.scales if "calibrated" in options else None, "means" in options)
        use(self.model, rows)
        return lambda: rows.cache(config)


@dataclass(frozen=True)
class Work:
    """The work of a run: `samples` samples (None: all) of each file in `.needle/`, the implementations, and the strengths of stress.
    Answers go to `needle-*.jsonl` in `folder`."""

    folder: Path
    model: str | None
    files: tuple[Path, ...]
    names: tuple[str, ...]
    strengths: tuple[int, ...]
    samples: int | None
    deadline: float = float("inf")  # of `time.time`; then what is begun is ended, and no more
    done: frozenset[tuple] = frozenset()  # `key`s of what is not asked again

    def run(self, number: int = 0, processes: int = 1) -> None:
        """The part of one process, on the GPU that it sees: sample `number` and every `processes`-th sample after it."""
        peers.available()  # which loads them
        with open(self.folder / f"needle-{number}.jsonl", "w", encoding="utf-8") as file:
            for strength in self.strengths:
                model, tokenizer = models.load(self.model)
                plant(model, STRENGTHS[strength])
                text = models.tokenize(tokenizer, models.read_text(None, self.model))
                systems = Systems(model, models.windows(text, *texts.CALIBRATION, from_end=True))
                for path in self.files:
                    samples = [
                        replace(sample, task=sample.task + stressed(strength))
                        for sample in load_samples(path, slice(number, self.samples, processes))
                    ]
                    for name in self.names:
                        todo = [sample for sample in samples if (name, sample.task, sample.length, sample.index) not in self.done]
                        if todo and time.time() < self.deadline:
                            self.ask(systems, tokenizer, name, todo, file)

    def ask(self, systems: Systems, tokenizer: Any, name: str, samples: list[Sample], file: Any) -> list[Outcome]:
        """The outcomes of one implementation on the samples of one file. Each is written to `file` as soon as it is known."""
        make, began = systems.enter(name), time.time()

        def in_time() -> Iterable[Sample]:
            for sample in samples:
                if time.time() > self.deadline:
                    return
                yield sample

        def note(outcome: Outcome) -> None:
            file.write(json.dumps(asdict(outcome)) + "\n")
            file.flush()

        limits = {"chunk": CHUNK, "batch_tokens": BATCH_TOKENS}
        heard = needle.ask(systems.model, tokenizer, in_time(), {name: make}, stop="\n", progress=note, **limits)
        share = sum(o.right for o in heard) / max(1, len(heard))
        print(f"{samples[0].task} {samples[0].length} {name}: {share:.1%} of {len(heard)}, {time.time() - began:.1f} s", flush=True)
        return heard


def stressed(strength: int) -> str:
    """The suffix of a task's name for a strength of stress."""
    return f"-stress{strength}" if strength else ""
