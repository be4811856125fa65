"""The forms of a cache against the growing form of all tokens: the same random operations, and then the same bytes and
lengths.

The others are the static form, or, with a window, a growing pool and one of fixed size. Half of the operations run
under `torch.inference_mode`.

`python -m tests.cache.fuzz` does 10,000 operations on a CPU in some minutes. `tests/cache/test_fuzz.py` does a part of
them, and `tests/gpu/test_cache_gpu.py` runs for a minute on a GPU, where a CUDA graph appends in place of compiled
code.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fp8attn import KVPages, PagedKVCache
from fp8attn.cache.page_table import SLACK, OutOfPagesError, first_column, num_pages_of
from fp8attn.formats.codec import CODECS
from fp8attn.formats.page_layout import PAGE_SIZE, unpack_k, unpack_v

HEADS, DIM, LAYERS = 1, 64, 2
LENGTHS = (0, 0, 1, 1, 1, 2, 5, 17, 100, 127, 128, 130)
WINDOWS = (1, 5, 100, 128, 129, 200, 384)
OPERATIONS = {
    "append": 40, "step": 14, "overfull": 6, "truncate": 12, "select": 8, "copy": 8, "interrupted": 3, "lengths": 4,
    "reset": 2, "reserve": 4,
    "draft": 10, "record": 3, "deepcopy": 2, "files": 3,
}  # fmt: skip


class Caches:
    """Caches that hold the same.

    Attributes:
        full: the growing form, with all tokens.
        others: by name, the other forms.
        static: the static form, if there is one.
        held: the lengths, as the operations imply them.
        window: of the other forms; None: they have all tokens.
        most: tokens that a sequence may have.
        furthest: of each sequence, the most tokens that it had when pages left of the window could be given back.
        recording: whether pages are given back only when tokens are dropped.
        step: appends tokens to the static form, where the host does not see it.
    """

    def __init__(self, seed: int, device: str) -> None:
        self.random, self.device = random.Random(seed), device
        self.generator = torch.Generator(device).manual_seed(seed)
        self.window = self.random.choice([None, *WINDOWS]) if self.random.random() < 0.8 else None
        num_seqs, self.most = (
            self.random.choice([1, 2, 3]),
            self.random.choice([1, 128, 200, 300] if self.window is None else [200, 1500]),
        )
        options = {
            "num_layers": LAYERS,
            "num_seqs": num_seqs,
            "key_dtype": self.random.choice(list(CODECS)),
            "device": device,
        }
        self.full, self.others = PagedKVCache(HEADS, DIM, **options), {}
        self.num_pages = 5 * (num_pages_of(self.most) + 1)  # of 4 sequences, and copies
        if self.window is None:
            self.others["static"] = PagedKVCache(HEADS, DIM, max_seqlen=self.most, **options)
        else:
            self.others["growing"] = PagedKVCache(HEADS, DIM, window=self.window, **options)
            self.others["fixed"] = PagedKVCache(HEADS, DIM, window=self.window, num_pages=self.num_pages, **options)
        self.held = [0] * num_seqs
        self.furthest, self.recording = [0] * num_seqs, False
        self.graph = device == "cuda" and "static" in self.others and self.random.random() < 0.5
        self.step = self._graph() if self.graph else self._compiled()

    @property
    def static(self) -> PagedKVCache | None:
        return self.others.get("static")

    @property
    def all(self) -> tuple[PagedKVCache, ...]:
        return self.full, *self.others.values()

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

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = 2.0 ** self.random.randint(-4, 4)  # scales grow
        dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        k, v = torch.randn(2, count, HEADS, DIM, generator=self.generator, device=self.device).mul_(size).to(dtype)
        return k, v

    def operate(self, name: str) -> None:
        with torch.inference_mode(not self.graph and self.random.random() < 0.5):
            getattr(self, f"do_{name}")()
        self.check()

    # Operations

    def do_append(self, lengths: tuple[int, ...] = LENGTHS) -> None:
        room = [self.most - held for held in self.held]
        equal = self.random.random() < 0.3
        new = (
            [min(*room, self.random.choice(lengths))] * len(room)
            if equal
            else [min(n, self.random.choice(lengths)) for n in room]
        )
        k, v = self.tokens(sum(new))
        for cache, layer in itertools.product(self.all, range(LAYERS)):
            cache.append(layer, k, v, lengths=None if equal else new)
        self.grow(new)
        if sum(new) and self.window is not None and self.device == "cpu":
            q = self.tokens(sum(new))[0]
            want = self.full.attention(0, q, window=self.window)
            for name, cache in self.others.items():
                assert torch.equal(cache.attention(0, q), want), f"attention of {name}"

    def do_step(self) -> None:
        """Compiled, or a graph."""
        if self.static is None or max(self.held) == self.most:
            return
        k, v = self.tokens(len(self.held))
        for cache in self.all:
            if cache is self.static:
                self.step(k, v)
            else:
                for layer in range(LAYERS):
                    cache.append(layer, k, v)
        self.grow([1] * len(self.held))

    def do_overfull(self) -> None:
        """One token too many of one sequence, and any number of the others; or more pages than a pool of fixed size
        has.
        """
        if "fixed" in self.others and self.random.random() < 0.3:
            cache, new = self.others["fixed"], [0] * (len(self.held) - 1) + [128 * self.num_pages + self.most]
            tables = copy.deepcopy(cache.table.tables)
            with pytest.raises(OutOfPagesError):
                cache.append(0, *self.tokens(sum(new)), lengths=new)
            assert cache.table.tables == tables
        if self.static is None or (self.device == "cuda" and not self.static.table.counted):
            return  # the GPU would stop the process
        new = [self.random.choice([0, self.most - held]) for held in self.held]
        seq = self.random.randrange(len(new))
        new[seq] = self.most - self.held[seq] + 1
        with pytest.raises(RuntimeError, match="the cache is full"):
            self.static.append(0, *self.tokens(sum(new)), lengths=new)

    def do_draft(self) -> None:
        """Tokens are appended, and some or all of them dropped."""
        before = list(self.held)
        self.do_append((0, 1, 2, 17, 127, 128, 300))
        self.shorten([self.random.randint(old, new) for old, new in zip(before, self.held, strict=True)])

    def do_truncate(self) -> None:
        lengths = [
            self.random.choice([self.random.randint(0, held + 1), max(0, held - self.random.randint(0, 200))])
            for held in self.held
        ]
        lengths = [self.random.choice([0, length]) for length in lengths] if self.random.random() < 0.1 else lengths
        self.shorten(lengths)

    def do_select(self) -> None:
        count = len(self.held) if self.static is not None else self.random.randint(1, 4)
        chosen = [self.random.randrange(len(self.held)) for _ in range(count)]
        for cache in self.all:
            cache.select(chosen)
        self.held, self.furthest = ([x[seq] for seq in chosen] for x in (self.held, self.furthest))

    def do_copy(self) -> None:
        if len(self.held) > 1:
            source, target = self.random.sample(range(len(self.held)), 2)
            least = 0 if self.window is None or self.random.random() < 0.2 else max(0, self.held[source] - 20)
            length = self.random.choice([None, self.random.randint(least, self.held[source])])
            kept = self.held[source] if length is None else length
            back = [kept if seq == source else held for seq, held in enumerate(self.held)]
            if self.can_go_back(back, lambda cache: cache.copy(source, target, length)):
                for cache in self.all:
                    cache.copy(source, target, length)
                self.held[target], self.furthest[target] = kept, self.furthest[source] if kept else 0

    def do_interrupted(self) -> None:
        """A step that some layers did not append."""
        new = self.random.choice([1, 17, 300])
        if max(self.held) + new <= self.most:
            k, v = self.tokens(new * len(self.held))
            for cache in self.all:
                cache.append(0, k, v)
                cache.truncate(cache.lengths)
            self.given_back()

    def do_lengths(self) -> None:
        for cache in self.all:
            assert list(cache.lengths) == self.held

    def do_reset(self) -> None:
        for cache in self.all:
            cache.reset()
        self.held = [0] * len(self.held)
        self.shortened()

    def do_reserve(self) -> None:
        """Pages for more tokens, or a layer with more; then the lengths are read back."""
        more = [min(self.most, held + self.random.choice(LENGTHS)) for held in self.held]
        stops = self.random.random() < 0.5 and max(self.held) < self.most
        k, v = self.tokens(len(self.held))
        for cache in self.all:
            cache.reserve(more)
            if stops:
                cache.append(0, k, v)
            cache.sync()
        if not self.recording:
            self.given_back()

    def do_record(self) -> None:
        """Caches with a window keep every token until the next truncation, or no longer do."""
        if self.window is not None:
            self.recording = self.random.random() < 0.7
            for cache in self.others.values():
                cache.table.recording = self.recording

    def do_deepcopy(self) -> None:
        if not self.graph:
            self.full, self.others = (
                copy.deepcopy(self.full),
                {name: copy.deepcopy(cache) for name, cache in self.others.items()},
            )
            self.step = self._compiled()

    def do_files(self) -> None:
        """Into caches of the same or the other form. Before, a draft is dropped, and after it more tokens."""
        if self.graph:
            return
        self.do_draft()
        with tempfile.TemporaryDirectory() as folder:
            for name, cache in self.others.items():
                cache.save(Path(folder) / name)
            names = {name: self.random.choice(list(self.others)) for name in self.others}
            self.others = {
                name: PagedKVCache.load(
                    Path(folder) / source, max_seqlen=self.most if name == "static" else None,
                    num_pages=self.num_pages if name == "fixed" else None, device=self.device,
                )
                for name, source in names.items()
            }  # fmt: skip
        self.recording, self.step = False, self._compiled()
        self.given_back()
        self.check()
        self.shorten([max(0, held - self.random.randint(0, 30)) for held in self.held])

    # What the operations imply

    def grow(self, new: list[int]) -> None:
        if not self.recording:
            self.given_back()
        self.held = [held + n for held, n in zip(self.held, new, strict=True)]

    def given_back(self) -> None:
        """Pages left of the window may have been given back."""
        self.furthest = list(map(max, self.furthest, self.held))

    def shorten(self, lengths: list[int]) -> None:
        lengths = list(map(min, self.held, lengths))
        if self.can_go_back(lengths, lambda cache: cache.truncate(lengths)):
            for cache in self.all:
                cache.truncate(lengths)
            self.held = lengths
            self.shortened()

    def shortened(self) -> None:
        self.furthest = [furthest if held else 0 for furthest, held in zip(self.furthest, self.held, strict=True)]
        self.given_back()

    def can_go_back(self, lengths: list[int], move: Callable[[PagedKVCache], None]) -> bool:
        """Whether all caches can. One that cannot has given back what a sequence would see, and raises before it
        changes anything.
        """
        refused = False
        for name, cache in self.others.items():
            try:
                for seq, length in enumerate(lengths):
                    cache.table.check_held(seq, length)
            except RuntimeError:
                refused = True
                assert not all(map(self.must_hold, range(len(lengths)), lengths)), (name, lengths)
                before = copy.deepcopy(cache.table.tables)
                with pytest.raises(RuntimeError, match="cannot go back"):
                    move(cache)
                assert list(cache.lengths) == self.held and cache.table.tables == before
        return not refused

    def must_hold(self, seq: int, length: int) -> bool:
        """Whether a cache must still have the window before token `length` of a sequence."""
        return not length or first_column(length, self.window) >= first_column(self.furthest[seq] - SLACK, self.window)

    def check(self) -> None:
        """Compare the lengths of all layers, and all bytes and scales of one."""
        if not self.recording:
            self.given_back()  # `pages` reserves, after tokens were dropped
        for cache in self.others.values():
            table = cache.table
            count = [0] * len(table.references)
            for page in itertools.chain.from_iterable(table.tables):
                if page >= 0:
                    count[page] += 1
            assert count == table.references and sorted(table.free) == [page for page, n in enumerate(count) if not n]
        for cache, layer in itertools.product(self.all, range(LAYERS)):
            assert cache.pages(layer).cache_seqlens.tolist() == self.held, (cache, layer)
        layer = self.random.randrange(LAYERS)
        for seq, length in enumerate(self.held):
            first = 0 if self.window is None else max(0, length - self.window + 1)  # that the next query sees
            want, values = contents(self.full.pages(layer), seq, first, length), torch.stack(self.full.read(layer, seq))
            for name, cache in self.others.items():
                for part, ours, theirs in zip(
                    ("K", "V", "scales"), contents(cache.pages(layer), seq, first, length), want, strict=True
                ):
                    assert torch.equal(ours, theirs), f"{part} of sequence {seq} of {length} tokens differs in {name}"
                read = torch.stack(cache.read(layer, seq))
                assert read.shape[1] in (length - first, min(length, self.window or length)), (
                    f"{name} reads {read.shape[1]} of {length} tokens"
                )
                assert torch.equal(read, values[:, length - read.shape[1] :]), f"{name} reads others of {length} tokens"


def contents(pages: KVPages, seq: int, first: int, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The bytes of K and V of a sequence from token `first` on, and the scales of their pages."""
    column = first // PAGE_SIZE
    ids = pages.page_table[seq, column : num_pages_of(length)].long()
    tokens = slice(first - column * PAGE_SIZE, length - column * PAGE_SIZE)
    k, v = (unpack(x.view(torch.uint8)[ids])[tokens] for x, unpack in ((pages.k, unpack_k), (pages.v, unpack_v)))
    return k, v, torch.stack([pages.k_scale[ids], pages.v_scale[ids]])


def fuzz(operations: int, seed: int = 0, device: str = "cpu", seconds: float = float("inf"), each: int = 500) -> int:
    """Do random operations on caches, `each` on the same ones, and return how many were done."""
    names, weights = zip(*OPERATIONS.items(), strict=True)
    end, done = time.monotonic() + seconds, 0
    while done < operations and time.monotonic() < end:
        caches = Caches(at := seed + done, device)
        for number in range(min(each, operations - done)):
            name = caches.random.choices(names, weights)[0]
            before = list(caches.held)
            try:
                caches.operate(name)
            except Exception as error:
                raise AssertionError(
                    f"operation {number} of seed {at}, {name} of lengths {before}, window {caches.window}: {error}"
                ) from error
            done += 1
    return done


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    print(
        f"{fuzz(args.operations, args.seed, args.device):,} operations: every byte and length is that of a growing "
        f"cache of all tokens"
    )
