"""The static form of a cache against the growing form: the same random operations, and then the same bytes and lengths.

`python -m tests.cache.fuzz` does 10,000 operations on a CPU in some minutes. `tests/cache/test_fuzz.py` does a part of them, and
`tests/gpu/test_cache_gpu.py` runs for a minute on a GPU, where a CUDA graph appends in place of compiled code.
"""

from __future__ import annotations

import argparse
import itertools
import random
import time

import pytest
import torch

from fp8attn import KVPages, PagedKVCache
from fp8attn.formats.codec import CODECS
from fp8attn.formats.page_layout import PAGE_SIZE, unpack_k, unpack_v

HEADS, DIM, LAYERS = 1, 64, 2
LENGTHS = (0, 0, 1, 1, 1, 2, 5, 17, 100, 127, 128, 130)
OPERATIONS = {"append": 40, "step": 14, "overfull": 6, "truncate": 12, "select": 8, "copy": 8, "interrupted": 3, "lengths": 4, "reset": 2}


class Pair:
    """A static and a growing cache that hold the same.

    Attributes:
        held: the lengths, as the operations imply them.
        step: appends one token to each sequence of the static cache, where the host does not see it.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.random, self.device = random.Random(seed), device
        self.generator = torch.Generator(device).manual_seed(seed)
        num_seqs, self.most = self.random.choice([1, 2, 3]), self.random.choice([1, 128, 200, 300])
        options = {"num_layers": LAYERS, "num_seqs": num_seqs, "key_dtype": self.random.choice(list(CODECS)), "device": device}
        self.static, self.growing = (PagedKVCache(HEADS, DIM, max_seqlen=length, **options) for length in (self.most, None))
        self.held = [0] * num_seqs
        self.step = self._graph() if device == "cuda" and self.random.random() < 0.5 else self._compiled()

    def _compiled(self):
        def step(cache, k, v):
            for layer in range(LAYERS):
                cache.append(layer, k, v)

        torch._dynamo.reset()
        run = torch.compile(step, backend="eager", fullgraph=True, dynamic=False)
        return lambda k, v: run(self.static, k, v)

    def _graph(self):
        k, v = (torch.zeros(len(self.held), HEADS, DIM, device=self.device, dtype=torch.bfloat16) for _ in "kv")

        def append():
            for layer in range(LAYERS):
                self.static.append(layer, k, v)

        append()  # compiles
        self.static.reset()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            append()

        def step(new_k, new_v):
            k.copy_(new_k)
            v.copy_(new_v)
            graph.replay()

        return step

    @property
    def both(self) -> tuple[PagedKVCache, PagedKVCache]:
        return self.static, self.growing

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = 2.0 ** self.random.randint(-4, 4)  # scales grow
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        k, v = torch.randn(2, count, HEADS, DIM, generator=self.generator, device=self.device).mul_(size).to(dtype)
        return k, v

    def operate(self, name: str) -> None:
        getattr(self, f"do_{name}")()
        self.check()

    def do_append(self) -> None:
        room = [self.most - held for held in self.held]
        equal = self.random.random() < 0.3
        new = [min(*room, self.random.choice(LENGTHS))] * len(room) if equal else [min(n, self.random.choice(LENGTHS)) for n in room]
        k, v = self.tokens(sum(new))
        for cache, layer in itertools.product(self.both, range(LAYERS)):
            cache.append(layer, k, v, lengths=None if equal else new)
        self.held = [held + n for held, n in zip(self.held, new, strict=True)]

    def do_step(self) -> None:
        if max(self.held) == self.most:
            return
        k, v = self.tokens(len(self.held))
        self.step(k, v)
        for layer in range(LAYERS):
            self.growing.append(layer, k, v)
        self.held = [held + 1 for held in self.held]

    def do_overfull(self) -> None:
        """One token too many of one sequence, and any number of the others."""
        if self.device == "cuda" and not self.static._static.counted:
            return  # the GPU would stop the process
        new = [self.random.choice([0, self.most - held]) for held in self.held]
        seq = self.random.randrange(len(new))
        new[seq] = self.most - self.held[seq] + 1
        with pytest.raises(RuntimeError, match="the cache is full"):
            self.static.append(0, *self.tokens(sum(new)), lengths=new)

    def do_truncate(self) -> None:
        lengths = [self.random.randint(0, held + 1) for held in self.held]
        for cache in self.both:
            cache.truncate(lengths)
        self.held = list(map(min, self.held, lengths))

    def do_select(self) -> None:
        chosen = [self.random.randrange(len(self.held)) for _ in self.held]
        for cache in self.both:
            cache.select(chosen)
        self.held = [self.held[seq] for seq in chosen]

    def do_copy(self) -> None:
        if len(self.held) > 1:
            source, target = self.random.sample(range(len(self.held)), 2)
            length = self.random.choice([None, self.random.randint(0, self.held[source])])
            for cache in self.both:
                cache.copy(source, target, length)
            self.held[target] = self.held[source] if length is None else length

    def do_interrupted(self) -> None:
        """A step that some layers did not append."""
        if max(self.held) < self.most:
            k, v = self.tokens(len(self.held))
            for cache in self.both:
                cache.append(0, k, v)
                cache.truncate(cache.lengths)

    def do_lengths(self) -> None:
        for cache in self.both:
            assert list(cache.lengths) == self.held

    def do_reset(self) -> None:
        for cache in self.both:
            cache.reset()
        self.held = [0] * len(self.held)

    def check(self) -> None:
        """Compare the lengths of all layers, and all bytes and scales of one."""
        for cache, layer in itertools.product(self.both, range(LAYERS)):
            assert cache.pages(layer).cache_seqlens.tolist() == self.held, (cache, layer)
        layer = self.random.randrange(LAYERS)
        for seq, length in enumerate(self.held):
            for name, ours, theirs in zip(("K", "V", "scales"), *(contents(x.pages(layer), seq, length) for x in self.both), strict=True):
                assert torch.equal(ours, theirs), f"{name} of sequence {seq} of {length} tokens differs"


def contents(pages: KVPages, seq: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of a sequence's K and V, and the scales of its pages."""
    ids = pages.page_table[seq, : -(-length // PAGE_SIZE)].long()
    k, v = (unpack(x.view(torch.uint8)[ids])[:length] for x, unpack in ((pages.k, unpack_k), (pages.v, unpack_v)))
    return k, v, torch.stack([pages.k_scale[ids], pages.v_scale[ids]])


def fuzz(operations: int, seed: int = 0, device: str = "cpu", seconds: float = float("inf"), each: int = 500) -> int:
    """Do random operations on pairs of caches, `each` on one pair, and return how many were done."""
    names, weights = zip(*OPERATIONS.items(), strict=True)
    end, done = time.monotonic() + seconds, 0
    while done < operations and time.monotonic() < end:
        pair = Pair(at := seed + done, device)
        for number in range(min(each, operations - done)):
            name = pair.random.choices(names, weights)[0]
            before = list(pair.held)
            try:
                pair.operate(name)
            except Exception as error:
                raise AssertionError(f"operation {number} of seed {at}, {name} of lengths {before}: {error}") from error
            done += 1
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(f"{fuzz(args.operations, args.seed, args.device):,} operations: every byte and length of the two forms is equal")
