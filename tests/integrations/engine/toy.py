"""A small engine with continuous batching, on plain tensors. What it has of fp8attn is what a plugin of an engine would
have.

The "model" has attention layers of random weights and no vocabulary: a token is a vector, and the next token is what
the last layer gives.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.formats.spec import PageSpec
from fp8attn.integrations.engine import EngineLayer, Options, ServedModel, Step, static_state, step_of
from fp8attn.integrations.engine.marks import mark_of

HEADS, KV_HEADS, D = 4, 2, 64
WIDTH = HEADS * D


@dataclass
class Model:
    """Per layer, the weights of Q, K, V and the output."""

    layers: list[tuple[torch.Tensor, ...]]

    @classmethod
    def random(cls, num_layers: int) -> Model:
        shapes = (WIDTH, HEADS * D), (WIDTH, KV_HEADS * D), (WIDTH, KV_HEADS * D), (HEADS * D, WIDTH)
        return cls([tuple(torch.randn(shape) / shape[0] ** 0.5 for shape in shapes) for _ in range(num_layers)])

    def forward(self, x: torch.Tensor, attend) -> torch.Tensor:
        """`x [T, WIDTH]`, with `attend(layer, q, k, v)`."""
        for index, (w_q, w_k, w_v, w_o) in enumerate(self.layers):
            q, k, v = (x @ w_q).view(-1, HEADS, D), (x @ w_k).view(-1, KV_HEADS, D), (x @ w_v).view(-1, KV_HEADS, D)
            x = torch.nn.functional.rms_norm(x + attend(index, q, k, v).reshape(-1, WIDTH) @ w_o, (WIDTH,))
        return x


@dataclass
class Request:
    """A prompt, the tokens after it, and the blocks that have them."""

    tokens: torch.Tensor  # [prompt and answer, WIDTH]
    wanted: int  # tokens of the answer
    prompt: int = 0
    stored: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt = len(self.tokens)

    @property
    def new(self) -> int:
        """Tokens that are not stored."""
        return len(self.tokens) - self.stored

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.prompt + self.wanted


class Engine:
    """Serves requests: each step has the next token of every answer, and of prompts as many tokens as the step may
    have.

    Args:
        model: which it serves.
        options: of fp8attn.
        num_blocks: of 128 tokens, for all requests.
        budget: tokens of a step.
    """

    def __init__(self, model: Model, options: Options, num_blocks: int, budget: int) -> None:
        self.model, self.budget, self.free, self.running, self.waiting = model, budget, list(range(num_blocks)), [], []
        served = ServedModel("toy", None, 4096, len(model.layers), KV_HEADS)
        whole = slice(0, KV_HEADS)
        self.layers = [
            EngineLayer(
                HEADS, KV_HEADS, D, options=options, static=static_state(options, served, index, whole, D),
                device="cpu",
                mark=mark_of(options, served), name=f"layer {index}",
            )
            for index in range(len(model.layers))
        ]  # fmt: skip
        for layer in self.layers:
            layer.bind(torch.zeros(num_blocks, KV_HEADS * PageSpec.of(D).layout.nbytes, dtype=torch.uint8))

    def add(self, tokens: torch.Tensor, wanted: int) -> Request:
        self.waiting.append(Request(tokens, wanted))
        return self.waiting[-1]

    def step(self) -> bool:
        """Run a step. False: there is nothing to do."""
        batch = self._schedule()
        if not batch:
            return False
        step = self._step(batch)
        x = torch.cat([request.tokens[request.stored :][:count] for request, count in batch])

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            out = torch.full_like(q, torch.nan)
            self.layers[index].run(q, k, v, out, step)
            return out

        x = self.model.forward(x, attend)
        last = -1
        for request, count in batch:
            request.stored, last = request.stored + count, last + count
            if not request.new:
                request.tokens = torch.cat([request.tokens, x[last][None]])
            if request.done:
                self.running.remove(request)
                self.free += request.blocks
        return True

    def _schedule(self) -> list[tuple[Request, int]]:
        """Requests with their new tokens of this step, decodes first."""
        batch, left = [], self.budget
        for request in sorted(self.running, key=lambda request: request.new):
            if count := self._room(request, min(request.new, left)):
                batch.append((request, count))
                left -= count
        while self.waiting and left and (count := self._room(self.waiting[0], min(self.waiting[0].new, left))):
            batch.append((self.waiting[0], count))
            self.running.append(self.waiting.pop(0))
            left -= count
        return sorted(batch, key=lambda entry: entry[1] > 1)

    def _room(self, request: Request, count: int) -> int:
        """Give a request the blocks of `count` more tokens. 0: there are too few."""
        more = -(-(request.stored + count) // PAGE_SIZE) - len(request.blocks)
        if more > len(self.free):
            return 0
        request.blocks += [self.free.pop() for _ in range(more)]
        return count

    def _step(self, batch: list[tuple[Request, int]]) -> Step:
        counts = [count for _, count in batch]
        lengths = [request.stored + count for request, count in batch]
        table = torch.zeros(len(batch), max(len(request.blocks) for request, _ in batch), dtype=torch.int32)
        for row, (request, _) in zip(table, batch, strict=True):
            row[:] = request.blocks[0]
            row[: len(request.blocks)] = torch.tensor(request.blocks)
        decodes = sum(count == 1 for count in counts)
        bounds = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        return step_of(
            torch.tensor(lengths, dtype=torch.int32), table, bounds, num_decodes=decodes, decode_tokens=decodes,
            max_decode=1,
            num_tokens=sum(counts), max_seqlen=max(counts), longest=max(lengths),
        )  # fmt: skip
