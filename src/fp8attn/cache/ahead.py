"""Which kernels a cache needs for its next tokens, so that `precompile.first` compiles them side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple, Protocol

import torch

from ..params import AttentionOption, BackendName
from ..precompile import calls, first
from ..precompile.calls import Layer
from .page_table import PageTable, num_pages_of
from .step import Step

REFERENCE: BackendName = "reference"  # a backend without kernels
_NAMES = {dtype: name for name, dtype in calls.DTYPES.items()}
FEW = 16  # new tokens of a sequence; the kernels of such a step do not depend on how many pages there are


class Cache(Protocol):
    """What is read of a `PagedKVCache`."""

    device: torch.device
    table: PageTable

    @property
    def num_seqs(self) -> int: ...

    def kernel_layers(self, backend: BackendName, dtype: str) -> set[Layer]:
        """The different formats of the layers; `num_q_heads` is not known there."""
        ...


class Attention(NamedTuple):
    """What determines the kernels of a layer's attention, besides its pages.

    Attributes:
        num_q_heads: heads of the queries.
        options: what it has (`params.options_of`).
        causal, leftpad: whether it has them (`AttentionParams`).
    """

    num_q_heads: int
    options: frozenset[AttentionOption] = frozenset()
    causal: bool = True
    leftpad: bool = False


class Ahead:
    """What one cache has prepared.

    Attributes:
        attention: how layers attend. A cache whose caller knows it from the start prepares appends and attention
            together. Others learn it from the first attention of each layer.
        attended: layers whose first attention was seen.
    """

    def __init__(self) -> None:
        self.attention: set[Attention] = set()
        self.attended: set[int] = set()
        self._steps: set[tuple] = set()
        self._name: BackendName = REFERENCE  # the resolved backend

    def begin(self, cache: Cache, name: BackendName, dtype: torch.dtype, step: Step) -> None:
        """Before the first append of a step: prepare this step of all layers, and a decode step after it."""
        held = 0 if step.longest <= FEW else _columns(cache, step).bit_length()
        key = dtype, cache.num_seqs, step.longest, held, step.cu_seqlens is None, step.begins
        if key in self._steps or name == REFERENCE or not step.longest or dtype not in _NAMES:  # traced, it may be any
            return
        self._steps.add(key)
        self._name = name
        found: list[Callable[[], None]] = []
        for layer in cache.kernel_layers(name, _NAMES[dtype]):
            for attention in self.attention:
                found += _attend(layer, cache, step, attention)
            found += _append(layer, step)
        first.prepare(cache.device, found)

    def attend(self, cache: Cache, index: int, q: torch.Tensor, step: Step, attention: Attention) -> None:
        """Before the first attention of layer `index`: prepare attention of this kind for all layers, in this step and
        in a decode step.
        """
        self.attended.add(index)
        if attention in self.attention or not step.longest or self._name == REFERENCE:
            return
        self.attention.add(attention)
        layers = cache.kernel_layers(self._name, _NAMES[q.dtype])
        first.prepare(cache.device, [call for layer in layers for call in _attend(layer, cache, step, attention)])


def _columns(cache: Cache, step: Step) -> int:
    """Number of columns of the page table that this step's attention gets."""
    return step.columns or cache.table.page_table.shape[1]


def _append(layer: Layer, step: Step) -> Iterator[Callable[[], None]]:
    """The append of this step, and of a decode step."""
    if step.begins:
        yield partial(calls.quantize, layer, step.longest)
    else:
        yield partial(calls.append, layer, step.longest, step.cu_seqlens is not None)
    yield partial(calls.append, layer, 1, False)


def _attend(layer: Layer, cache: Cache, step: Step, attention: Attention) -> Iterator[Callable[[], None]]:
    """Attention in this step, and in a decode step."""
    num_q_heads, options, causal, leftpad = attention
    layer = replace(layer, num_q_heads=num_q_heads, attention=options)
    held = max(_columns(cache, step) - num_pages_of(step.longest), 0)
    ragged = 0 if step.cu_seqlens is None else step.num_tokens
    yield partial(
        calls.attend, layer, cache.num_seqs, step.longest, held, leftpad=leftpad, ragged=ragged, causal=causal
    )
    held = max(
        cache.table.page_table.shape[1] - 1, 0
    )  # a static cache then no longer knows how few columns have tokens
    yield partial(calls.attend, layer, cache.num_seqs, 1, held, leftpad=leftpad)
