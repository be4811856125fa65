"""RULER's needles in long prompts: right answers through BF16, our caches, and the FP8 kernels of others.

    python -m benchmarks.needle                    makes the prompts, in `.needle/`; needs fp8attn[ruler], and no GPU
    python -m benchmarks.run needle [CASE ...]     asks for the answers

The task is `niah_multikey_2`: the prompt consists of sentences like the one that is asked for. The model is the
committed one, as trained, or rewritten so that K and V are harder to quantize and exact answers stay (`stress`). An
answer ends with its first line.

Other systems' kernels take K and V in rows, with one scale for a whole tensor, as engines do: one, which engines take
where a checkpoint has none, or `:calibrated`, of each layer's Q, K and V on held-out text. `+means` subtracts each
prompt's means of K and V, and adds V's. `bf16` is FlashAttention-3 in BF16. A row has the share of right answers, its
95% interval (Wilson), the same by depth of the needle in tenths of the prompt, and, beside `bf16` on the same samples,
the difference with its interval (Newcombe) and p-value (McNemar).
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_BZIP2, ZipFile

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from evidence.results import ROOT
from fp8attn.formats.codec import E4M3
from fp8attn.integrations.transformers import FP8Cache
from fp8attn_tools.evaluation import models, needle, ruler
from fp8attn_tools.evaluation.caches import BF16Cache, MakeCache, prefill
from fp8attn_tools.evaluation.outcomes import Outcome, Sample, cells
from fp8attn_tools.evaluation.paired import compare, wilson

from . import peers
from .measure import left_out
from .peers import fa3, vllm_fa3
from .problem import KEYS, K, Shape
from .stress import STRENGTHS, plant

TASK, LONGEST = "niah_multikey_2", 128 * K
SAMPLES = ROOT / ".needle"
CALIBRATION = (8 * K, 4)  # tokens of a window, windows
BATCH_TOKENS = 1 << 20  # of prompts: eight of the longest
NAME = "kernel_over_rows"  # what transformers calls the kernels that are not ours
KERNELS = {"bf16": fa3.attention, "fa3-fp8": fa3.attention, "vllm-fa3-fp8": vllm_fa3.dense}
IMPLS = ("bf16", *KEYS, "fa3-fp8", "fa3-fp8:calibrated", "fa3-fp8:calibrated+means", "vllm-fa3-fp8:calibrated")


class Case(NamedTuple):
    """Questions about prompts of `length` tokens, to the model of `STRENGTHS[strength]`."""

    length: int
    strength: int
    samples: int
    impls: tuple[str, ...]


CASES = {
    **{f"{TASK}-S{n * K}": Case(n * K, 0, 96, ("bf16", "fp8attn", "fa3-fp8")) for n in (4, 8, 16, 32, 64)},
    f"{TASK}-S{LONGEST}": Case(LONGEST, 0, 64, IMPLS),
    **{f"{TASK}-stress{n}-S{LONGEST}": Case(LONGEST, n, 24, IMPLS) for n in range(1, len(STRENGTHS))},
}


def prompts(length: int) -> Path:
    return SAMPLES / f"{TASK}-{length}.zip"


# Attention by the kernels of others


class Rows:
    """A kernel over rows of tokens, as an attention function of transformers, which leaves out padding on the left.

    Args:
        kernel: `kernel(shape, q, k, v, scales=...)` gives a call (`peers.fa3.attention`).
    """

    def __init__(self, kernel: Callable) -> None:
        self.kernel = kernel
        self.mask: torch.Tensor | None = None  # `[B, T]` of the forward that runs, False for padding
        self.lengths: tuple[int, ...] = ()  # of the sequences in `mask`

    def note(self, *_: Any, attention_mask: torch.Tensor | None = None, **__: Any) -> torch.Tensor | None:
        """transformers' mask function, called once a forward: the mask `[B, T]` as it is."""
        self.mask = attention_mask
        self.lengths = () if attention_mask is None else tuple(attention_mask.sum(1).tolist())
        return attention_mask

    def __call__(self, module, query, key, value, attention_mask, scaling, **_) -> tuple[torch.Tensor, None]:
        """`query [B, num_q_heads, S, D]`; `key`, `value [B, num_kv_heads, T, D]`. Returns `[B, S, num_q_heads, D]`."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        (batch, length, heads, dim), (total, kv_heads) = q.shape, k.shape[1:3]
        assert scaling == dim**-0.5
        keys = self.lengths or (total,) * batch
        shape = Shape(keys, tuple(min(length, n) for n in keys), heads, kv_heads, dim, True)
        if not self.lengths:
            return self.attend(module.layer_idx, shape, *(x.flatten(0, 1) for x in (q, k, v))).unflatten(
                0, (batch, length)
            ), None
        here = self.mask[:, -length:].bool()
        out = q.new_zeros(batch, length, heads, dim)
        out[here] = self.attend(module.layer_idx, shape, q[here], *(taken(x, self.mask.bool()) for x in (k, v)))
        return out, None

    def attend(self, layer: int, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Attention over rows `[tokens, heads, D]`."""
        return self.kernel(shape, q, k, v)()

    def cache(self, config: Any) -> Cache:
        return BF16Cache(config)


def taken(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows of `x [B, T, ...]` where `mask [B, T]` is True. FP8 is read as bytes, which every device can index."""
    return x[mask] if x.itemsize > 1 else x.view(torch.uint8)[mask].view(x.dtype)


class Largest(Rows):
    """Attention in 16 bits that notes the largest magnitudes of each layer's Q, K and V."""

    def __init__(self, kernel: Callable) -> None:
        super().__init__(kernel)
        self.found: dict[int, torch.Tensor] = {}

    def attend(self, layer: int, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        now = torch.stack([x.abs().amax().float() for x in (q, k, v)])
        self.found[layer] = torch.maximum(self.found.get(layer, now), now)
        return super().attend(layer, shape, q, k, v)


class FP8Rows(Rows):
    """A kernel as in `Rows`, in FP8, and the FP8 cache that it reads.

    Args:
        scales: `[3]` float32 for each layer: of Q, K and V.
        means: subtract the means of K and V of each sequence's prompt (the first forward), and add V's to the output.
    """

    def __init__(self, kernel: Callable, scales: Sequence[torch.Tensor], means: bool) -> None:
        super().__init__(kernel)
        self.scales, self.means = scales, means
        self.layers: list[FP8Layer] = []

    def attend(self, layer: int, shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        scales = [scale.expand(shape.kv_heads) for scale in self.scales[layer]]
        out = self.kernel(shape, E4M3.quantize(q, self.scales[layer][0]), k, v, scales=scales)()
        if self.means:
            mean = self.layers[layer].v_mean.repeat_interleave(shape.q_heads // shape.kv_heads, 1)
            out = out + mean.repeat_interleave(torch.tensor(shape.queries, device=out.device), 0)
        return out.to(q.dtype)

    def cache(self, config: Any) -> Cache:
        self.layers = [FP8Layer(self, scales) for scales in self.scales]
        return Cache(layers=self.layers)


class FP8Layer(DynamicLayer):
    """A layer's K and V in FP8, `keys` and `values [B, num_kv_heads, T, D]`, with one scale each, for `rows`."""

    def __init__(self, rows: FP8Rows, scales: torch.Tensor) -> None:
        super().__init__()
        self.rows, self.scales = rows, scales

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = not self.is_initialized
        if first:
            self.lazy_initialization(key_states, value_states)
            self.k_mean, self.v_mean = (self.mean(x) for x in (key_states, value_states))
        new = [
            E4M3.quantize(x.float() - mean[:, :, None], scale)
            for x, mean, scale in zip(
                (key_states, value_states), (self.k_mean, self.v_mean), self.scales[1:], strict=True
            )
        ]
        if not first:
            new = [
                torch.cat([old.view(torch.uint8), x.view(torch.uint8)], 2).view(x.dtype)
                for old, x in zip((self.keys, self.values), new, strict=True)
            ]
        self.keys, self.values = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in new)  # as rows of tokens
        return self.keys, self.values

    def mean(self, x: torch.Tensor) -> torch.Tensor:
        """Of a prompt's K or V `[B, num_kv_heads, S, D]` without padding, `[B, num_kv_heads, D]` float32; zero without
        `means`.
        """
        if not self.rows.means:
            return torch.zeros_like(x[:, :, 0], dtype=torch.float32)
        real = x.new_ones(len(x), x.shape[2]) if self.rows.mask is None else self.rows.mask[:, -x.shape[2] :]
        return torch.einsum("bhsd,bs->bhd", x.float(), (real / real.sum(1, keepdim=True)).float())


# Questions and answers


class Systems:
    """The implementations, around the model of a strength of stress."""

    def __init__(self, strength: int) -> None:
        self.model, self.tokenizer = models.load()
        plant(self.model, STRENGTHS[strength])

    @property
    def ones(self) -> list[torch.Tensor]:
        return [torch.ones(3, device=self.model.device)] * self.model.config.num_hidden_layers

    @cached_property
    def calibrated(self) -> list[torch.Tensor]:
        """One scale for each layer's Q, K and V, `[3]` float32: the largest magnitude on held-out text becomes E4M3's
        largest.
        """
        seen = Largest(KERNELS["bf16"])
        self.use(seen)
        for window in models.windows(models.tokenize(self.tokenizer, models.read_text()), *CALIBRATION, from_end=True):
            prefill(self.model, window[None].to(self.model.device), seen.cache(self.model.config), chunk=len(window))
        return [seen.found[layer] / E4M3.max for layer in sorted(seen.found)]

    def use(self, rows: Rows) -> None:
        AttentionInterface.register(NAME, rows)
        AttentionMaskInterface.register(NAME, rows.note)
        self.model.set_attn_implementation(NAME)

    def enter(self, impl: str) -> MakeCache:
        """Set the attention of an implementation. Returns what makes its cache."""
        if impl in KEYS:
            return lambda: FP8Cache(self.model, key_dtype=KEYS[impl])
        kernel, _, options = impl.partition(":")
        if kernel == "bf16":
            rows = Rows(KERNELS[kernel])
        else:
            rows = FP8Rows(
                KERNELS[kernel], self.calibrated if "calibrated" in options else self.ones, "means" in options
            )
        self.use(rows)
        return lambda: rows.cache(self.model.config)


@lru_cache(1)
def systems(strength: int) -> Systems:
    return Systems(strength)


def row_of(case: str, impl: str, outcomes: list[Outcome]) -> dict:
    """The row of an implementation, whose outcomes and those of `bf16` are among `outcomes`."""
    own = [outcome for outcome in outcomes if outcome.cache == impl]
    right = sum(outcome.right for outcome in own)
    row = {
        "case": case,
        "impl": impl,
        "accuracy": right / len(own),
        "interval": wilson(right, len(own)),
        "samples": len(own),
    }
    row["depths"] = {
        f"{cell.depth:g}": [round(cell.score, 4), cell.samples]
        for cell in sorted(cells(own), key=lambda cell: cell.depth)
    }
    if impl != "bf16" and any(outcome.cache == "bf16" for outcome in outcomes):
        pair = compare(outcomes, "bf16", impl)
        row |= {"difference": pair.difference, "difference_interval": pair.interval, "p": pair.p}
        row |= {"lost": pair.only_first, "won": pair.only_second}
    return row


def save_samples(path: str | Path, samples: Iterable[Sample]) -> None:
    """Write samples to a zip file, and make the folders above. So samples can be made on one machine and used on
    another.

    Each member is one sample: a line of JSON, then the prompt's ids as 32-bit integers of this machine. bzip2
    compresses a token of RULER's texts to 2.7 bits, and a prompt of 131,072 tokens to 45 KB.
    """
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with ZipFile(path, "w", ZIP_BZIP2) as file:
        for number, sample in enumerate(samples):
            about = json.dumps({**vars(sample), "tokens": None}, ensure_ascii=False)
            file.writestr(f"{number:05d}", about.encode() + b"\n" + sample.tokens.tobytes())


def load_samples(path: str | Path, part: slice = slice(None)) -> Iterator[Sample]:
    """Read what `save_samples` wrote, or a part of it, one sample at a time."""
    with ZipFile(path) as file:
        for name in file.namelist()[part]:
            about, _, tokens = file.read(name).partition(b"\n")
            row = json.loads(about)
            yield Sample(**{**row, "tokens": array("i", tokens), "answers": tuple(row["answers"])})


@torch.no_grad()
def measure(case: str) -> Iterator[dict]:
    asked = CASES[case]
    if not prompts(asked.length).is_file():
        left_out(case, f"{prompts(asked.length)} is not there: python -m benchmarks.needle makes it")
        return
    there, outcomes = systems(asked.strength), []
    for impl in asked.impls:
        if impl not in KEYS and peers.of("fa3-bf16" if impl == "bf16" else impl) not in peers.available():
            continue
        samples = load_samples(prompts(asked.length), slice(asked.samples))
        made = {impl: there.enter(impl)}
        outcomes += needle.ask(
            there.model, there.tokenizer, samples, made, chunk=LONGEST, batch_tokens=BATCH_TOKENS, stop="\n"
        )
        yield row_of(case, impl, outcomes)


def main() -> None:
    tokenizer = models.load()[1]
    for length in sorted({case.length for case in CASES.values()}):
        count = max(case.samples for case in CASES.values() if case.length == length)
        save_samples(prompts(length), ruler.ruler_samples(tokenizer, TASK, lengths=(length,), samples=count))
        print(f"{prompts(length)}: {prompts(length).stat().st_size / 1e6:.1f} MB", flush=True)


if __name__ == "__main__":
    main()
