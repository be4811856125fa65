"""RULER's needles and perplexity over latents (MLA), alone and in batches, in BF16, cast to E4M3, and through ours.

    python -m benchmarks.latent_needle                    makes the prompts; needs fp8attn[ruler], and no GPU
    python -m benchmarks.run latent_needle [CASE ...]     asks for the answers

The model is the small model's twin with DeepSeek V3's attention (`training/`). A prompt, which all rows of a batch
share, is prefilled once in 16 bits, as engines do. Then each row goes on with tokens of its own, one a step, through
the cache: a question about another sentence of the prompt with its answer, or a text that the model has not seen. An
answer is right if the likeliest token is the right one at each of its places. A batch of `B1` asks a part of the
questions, one after the other.

Implementations: `bf16` (FlashMLA), `vllm-flashmla-fp8` (vLLM's kernel, over latents, RoPE's channels and queries in
E4M3 with scales of 1), `fp8attn` (`FP8Cache`). On a CPU the first two are their definitions in torch: the second's sum
of weights times values is rounded as the tensor core rounds it (docs/numerics.md), in as many parts of the keys as the
kernel has on an H200. `mean1` is the same model, whose latents have a mean of one deviation in every channel; its
answers in exact arithmetic are the same (`plant_mean`).

A row has what a row of `needle` has (the difference is to `bf16` of the same case), `nats` of an answer's token,
perplexity of the texts `ppl`, and by how many percent it is over that of `bf16`, `d_ppl_pct`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer

from evidence.results import ROOT
from fp8attn.formats.codec import E4M3, FP8
from fp8attn.integrations.transformers import FP8Cache
from fp8attn.integrations.transformers.latent import absorb, expand, latent_modules
from fp8attn_tools.evaluation import models, ruler
from fp8attn_tools.evaluation.caches import forward, prefill
from fp8attn_tools.evaluation.outcomes import Outcome

from . import peers
from .measure import left_out
from .needle import SAMPLES, TASK, load_samples, row_of, save_samples
from .peers import flashmla
from .problem import DEVICE, K
from .single_level import emulated

MODEL = ROOT / "models" / "stdlib-latent"
PROMPTS = SAMPLES / "latent.zip"  # one of each length
IMPLS = ("bf16", "fp8attn", "vllm-flashmla-fp8")
ALONE = 6  # questions, and texts, of a batch of one
TEXT = 48  # tokens of a text after a prompt
BLOCKS = 132  # of a GPU, among which the kernels of others divide a batch
NAME = "kernel_over_latents"  # what transformers calls the kernels that are not ours


class Case(NamedTuple):
    """`batch` rows after a prompt of `length` tokens, to the model with a mean of its latents."""

    length: int
    batch: int
    mean: float = 0.0


ROWS = (  # mean, thousands of tokens, batches: the twin's four heads fill a block of others' kernels, so that in a
    # batch of 66 two blocks share a sequence, and in one of 132 each has its own
    (0, 8, (1, 66)), (0, 32, (1, 66)), (0, 128, (1, 66, 132)), (1, 8, (132,)), (1, 32, (132,)),
    (0.3, 128, (1, 132)), (1, 128, (1, 66, 132)), (3, 128, (1, 132)),
)  # fmt: skip
CASES = {f"{f'mean{m:g}-' if m else ''}B{b}-S{n * K}": Case(n * K, b, m) for m, n, batches in ROWS for b in batches}


# Attention of others


def exact(q: torch.Tensor, rows: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of one query of a sequence over all its latents, in FP32.

    Args:
        q: `[heads, rank + rope]`; rows: `[tokens, rank + rope]`; any dtype.
    Returns:
        `[heads, rank]`.
    """
    weights = torch.softmax(q.float() @ rows.float().T * scale, 1)
    return weights @ rows[:, : flashmla.RANK].float()


def defined(attend: Callable) -> Callable:
    """A kernel over pages, called as `flashmla.attend_bf16`, by its definition for one query of one sequence."""

    def kernel(q, cache, lengths, table, scale, plan=None):
        out = torch.empty(*q.shape[:3], flashmla.RANK)
        for seq, length in enumerate(lengths.tolist()):
            rows = cache[table[seq].long()].flatten(0, 2)
            for query in range(q.shape[1]):
                visible = rows[: length - q.shape[1] + 1 + query]
                out[seq, query] = attend(q[seq, query], visible, scale, max(1, BLOCKS // len(q)))
        return out.bfloat16(), None

    return kernel


class Kernel(NamedTuple):
    """A kernel of others, and the dtype of its queries and latents."""

    attend: Callable
    dtype: torch.dtype


KERNELS = {
    "bf16": Kernel(flashmla.attend_bf16, torch.bfloat16),
    "vllm-flashmla-fp8": Kernel(flashmla.attend_fp8, FP8),
}
if DEVICE == "cpu":
    KERNELS = {
        "bf16": Kernel(defined(lambda q, rows, scale, parts: exact(q, rows, scale)), torch.bfloat16),
        "vllm-flashmla-fp8": Kernel(defined(emulated), FP8),
    }


class LatentLayer(DynamicLayer):
    """A layer's latents with their keys `[pages, 64, 1, 576]` in the dtype of a kernel. Its `update` returns those of
    the new tokens as they are.

    Args:
        dtype: of the pages.
        room: tokens that a sequence gets after the first forward.
    """

    def __init__(self, dtype: torch.dtype, room: int) -> None:
        super().__init__()
        self.dtype, self.spare, self.length = dtype, -(-room // flashmla.PAGE) + 1, 0

    def update(self, latent: torch.Tensor, rope: torch.Tensor, *_: Any, **__: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append `latent [B, 1, S, 512]`, `rope [B, 1, S, 64]`."""
        rows = torch.cat([latent, rope], -1)[:, 0]
        rows = E4M3.quantize(rows, torch.ones((), device=rows.device)) if self.dtype == FP8 else rows.to(self.dtype)
        if not self.length:
            pages = -(-rows.shape[1] // flashmla.PAGE) + self.spare
            self.pool = torch.zeros(pages, flashmla.PAGE, 1, rows.shape[2], dtype=self.dtype, device=rows.device)
            self.table = torch.arange(pages, dtype=torch.int32, device=rows.device)[None]
        at = self.length + torch.arange(rows.shape[1], device=rows.device)
        pages = self.table[:, at // flashmla.PAGE].long()
        bytes_of(self.pool)[pages, at % flashmla.PAGE, 0] = bytes_of(rows)
        self.length += rows.shape[1]
        return latent, rope

    def get_seq_length(self) -> int:
        return self.length

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat the one sequence. The copies share the pages that are full."""
        full = self.length // flashmla.PAGE
        self.pool = torch.cat([self.pool[:full], self.pool[full:].repeat(repeats, 1, 1, 1)])
        ends = torch.arange(full, len(self.pool), dtype=torch.int32, device=self.pool.device).view(repeats, -1)
        self.table = torch.cat([self.table[:, :full].expand(repeats, -1), ends], 1).contiguous()

    def crop(self, tokens_to_remove: int) -> None:
        self.length += tokens_to_remove


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    """`x`, FP8 as bytes, which every device can index."""
    return x if x.itemsize > 1 else x.view(torch.uint8)


class Attention:
    """A kernel of others as the attention of a model that caches latents."""

    def __init__(self, model: Any, kernel: Kernel) -> None:
        self.model, self.kernel = model, kernel
        self.layers: list[LatentLayer] = []
        for module in latent_modules(model):
            module.expand_kv = MethodType(self.expanded, module)
        AttentionInterface.register(NAME, self)
        AttentionMaskInterface.register(NAME, lambda *_, **__: None)
        model.set_attn_implementation(NAME)

    def cache(self, room: int) -> Cache:
        """An empty cache for one sequence, and then `room` tokens of each of its copies."""
        self.layers = [LatentLayer(self.kernel.dtype, room) for _ in latent_modules(self.model)]
        return Cache(layers=self.layers)

    def expanded(
        self, module: Any, latent: torch.Tensor, rope: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """K and V of a prompt; the latents of a step as they are."""
        prompt = self.layers[module.layer_idx].length == latent.shape[2]
        return type(module).expand_kv(module, latent, rope) if prompt else (latent, rope)

    def __call__(self, module, query, key, value, attention_mask, scaling, **_) -> tuple[torch.Tensor, None]:
        """`query [B, heads, S, nope + rope]`. Returns `[B, S, heads, v]`."""
        layer = self.layers[module.layer_idx]
        if layer.length == query.shape[2]:
            out = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
            return out.transpose(1, 2), None
        q = absorb(module, query).transpose(1, 2)
        q = E4M3.quantize(q, torch.ones((), device=q.device)) if layer.dtype == FP8 else q.to(layer.dtype)
        lengths = torch.full((len(q),), layer.length, dtype=torch.int32, device=q.device)
        out, _ = self.kernel.attend(q.contiguous(), layer.pool, lengths, layer.table, scaling)
        return expand(module, out.to(query.dtype)), None


# The model, and what it is asked


class Shifted(nn.Module):
    """A norm whose output is shifted."""

    def __init__(self, norm: nn.Module, shift: torch.Tensor) -> None:
        super().__init__()
        self.norm, self.shift = norm, nn.Parameter(shift, requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        return self.norm.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) + self.shift


@torch.no_grad()
def plant_mean(model: Any, mean: float) -> None:
    """Give the latents of a model a mean of so many deviations, with a random sign in each channel.

    The weights of attention sum to one, so the shift of a latent is one of the output, which o_proj's new bias takes
    off. It adds the same to all scores of a query.
    """
    generator = torch.Generator().manual_seed(0)
    for module in latent_modules(model):
        norm, values = module.kv_a_layernorm, module.kv_b_proj.weight.unflatten(0, (module.num_heads, -1))
        signs = torch.randint(2, norm.weight.shape, generator=generator).to(norm.weight) * 2 - 1
        shift = mean * norm.weight * signs
        added = values[:, module.qk_nope_head_dim :].double() @ shift.double()
        bias = -(module.o_proj.weight.double() @ added.flatten())
        module.kv_a_layernorm = Shifted(norm, shift)
        module.o_proj.bias = nn.Parameter(bias.to(norm.weight.dtype), requires_grad=False)


class Asked(NamedTuple):
    """What each row goes on with after a prompt, and where it is scored.

    Attributes:
        prompt: `[length]` ids.
        rows: `[batch, tokens]` ids, zeros behind the end of a row.
        scored: `[batch, tokens - 1]`, True where the next token is scored.
        depths: of the rows' needles, 0 to 1.
    """

    prompt: torch.Tensor
    rows: torch.Tensor
    scored: torch.Tensor
    depths: Sequence[float]


def asked(prompt: torch.Tensor, parts: Sequence[tuple[list[int], list[int]]], depths: Sequence[float]) -> Asked:
    """Rows of one length.

    Args:
        parts: of each row, the tokens before those that are scored, and these.
    """
    rows = torch.zeros(len(parts), max(len(before) + len(answer) for before, answer in parts), dtype=torch.int64)
    scored = torch.zeros(len(rows), rows.shape[1] - 1, dtype=torch.bool)
    for row, mask, (before, answer) in zip(rows, scored, parts, strict=True):
        row[: len(before) + len(answer)] = torch.tensor([*before, *answer])
        mask[len(before) - 1 : len(before) + len(answer) - 1] = True
    return Asked(prompt, rows, scored, depths)


def questions(tokenizer: Any, tokens: Sequence[int], count: int) -> Asked:
    """Questions about `count` sentences of a prompt of RULER, at equal distances, instead of the one it ends with."""
    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    context, _, question = text.rpartition("\n")
    key = re.search(r"for (\S+) mentioned", question)[1]
    said = list(re.finditer(r"One of the special magic numbers for (\S+) is: (\d+)\.", context))
    chosen = [said[(2 * i + 1) * len(said) // (2 * count)] for i in range(count)]
    encode = lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    parts = [(encode(question.replace(key, each[1])), encode(f" {each[2]}")) for each in chosen]
    prompt = torch.tensor(encode(context + "\n"))
    return asked(prompt, parts, [each.start() / len(context) for each in chosen])


def texts(tokens: torch.Tensor, length: int, count: int) -> Asked:
    """`count` texts after the first `length` tokens of `[N]` tokens, from the rest of them."""
    starts = torch.linspace(length, len(tokens) - TEXT, count).long().tolist()
    parts = [([0], tokens[start : start + TEXT - 1].tolist()) for start in starts]  # after an end of text
    return asked(tokens[:length], parts, [0.0] * count)


def score(model: Any, cache: Cache, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Feed `rows [B, T]`, one token a step, through the cache. Returns the nats of each next token, and whether it was
    the likeliest, `[B, T - 1]` each.
    """
    nats, hits = [], []
    for now, after in zip(rows[:, :-1].unbind(1), rows[:, 1:].unbind(1), strict=True):
        logits = forward(model, now[:, None], cache, logits=1)[:, -1].float()
        nats.append(nn.functional.cross_entropy(logits, after, reduction="none"))
        hits.append(logits.argmax(-1) == after)
    return torch.stack(nats, 1).cpu(), torch.stack(hits, 1).cpu()


def answer(model: Any, make: Callable[[int], Cache], ask: Asked, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`score` of all rows, in one batch or alone."""
    rows, device = ask.rows, model.device
    cache = make(rows.shape[1])
    prefill(model, ask.prompt[None].to(device), cache, chunk=len(ask.prompt))
    if batch > 1:
        cache.batch_repeat_interleave(batch)
        return score(model, cache, rows.to(device))
    scores = []
    for row in rows:
        scores.append(score(model, cache, row[None].to(device)))
        cache.crop(1 - rows.shape[1])
    nats, hits = zip(*scores, strict=True)
    return torch.cat(nats), torch.cat(hits)


class System:
    """The twin, with a mean of its latents."""

    def __init__(self, mean: float) -> None:
        self.model, self.tokenizer = models.load(MODEL)
        self.text = models.tokenize(self.tokenizer, models.read_text())
        if mean:
            plant_mean(self.model, mean)

    def enter(self, impl: str) -> Callable[[int], Cache]:
        """Set the attention of an implementation. Returns what makes its cache, with room for so many tokens after a
        prompt.
        """
        return Attention(self.model, KERNELS[impl]).cache if impl in KERNELS else lambda room: FP8Cache(self.model)


@lru_cache(1)
def system(mean: float) -> System:
    return System(mean)


@torch.no_grad()
def measure(case: str) -> Iterator[dict]:
    length, batch, mean = CASES[case]
    if missing := [path for path in (PROMPTS, MODEL / "model.safetensors") if not path.is_file()]:
        left_out(case, f"{missing[0]} is not there: this file makes the prompts, training/train.py the model")
        return
    there, count = system(mean), batch if batch > 1 else ALONE
    sample = next(sample for sample in load_samples(PROMPTS) if sample.length == length)
    needles, plain = questions(there.tokenizer, sample.tokens, count), texts(there.text, length, count)
    outcomes, ppl = [], {}
    for impl in IMPLS:
        if DEVICE != "cpu" and impl in KERNELS and "flashmla" not in peers.available():
            continue
        make = there.enter(impl)
        try:
            (nats, hits), (text_nats, _) = (answer(there.model, make, ask, batch) for ask in (needles, plain))
        except Exception as problem:  # libraries raise types of their own
            if impl not in KERNELS:
                raise
            left_out(f"{case} {impl}", problem)
            continue
        right = (hits | ~needles.scored).all(1)
        outcomes += [
            Outcome(impl, TASK, length, index, depth, (), "", float(answered))
            for index, (depth, answered) in enumerate(zip(needles.depths, right, strict=True))
        ]
        ppl[impl] = float(text_nats[plain.scored].double().mean().exp())
        row = row_of(case, impl, outcomes) | {"nats": float(nats[needles.scored].mean()), "ppl": ppl[impl]}
        if "bf16" in ppl:
            row["d_ppl_pct"] = 100 * (ppl[impl] / ppl["bf16"] - 1)
        yield row


def releases() -> dict[str, str]:
    """The peer whose kernels are `bf16` and `vllm-flashmla-fp8` here."""
    return {"flashmla": peers.PEERS["flashmla"].release()} if DEVICE != "cpu" else {}


def main() -> None:
    lengths = sorted({case.length for case in CASES.values()})
    tokenizer = models.load_tokenizer()
    save_samples(PROMPTS, ruler.ruler_samples(tokenizer, TASK, lengths=lengths, samples=1))
    print(f"{PROMPTS}: {PROMPTS.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
