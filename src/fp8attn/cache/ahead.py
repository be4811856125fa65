"""Which kernels a cache needs for its next tokens, so that `precompile.first` compiles them side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from ..params import AttentionOption, BackendName
from ..precompile import calls, first
from ..precompile.calls import Layer
from .page_table import PageTable, num_pages_of
from .step import Step

REFERENCE: BackendName = "reference"  # a backend without kernels
FEW = 16  # new tokens of a sequence; the kernels of such a step do not depend on how many pages there are


class Attention(NamedTuple):
    """What determines the kernels of a layer's attention, besides its pages.

    Attributes:
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

    def __init__(self, table: PageTable) -> None:
        self.table = table
        self.attention: set[Attention] = set()
        self.attended: set[int] = set()
        self._steps: set[tuple] = set()
        self._layers: set[Layer] = set()  # of the last step that was prepared

    def begin(self, name: BackendName, dtype: torch.dtype, step: Step) -> None:
        """Before the first append of a step: prepare this step of all layers, and a decode step after it."""
        columns = 0 if step.longest <= FEW else self._columns(step).bit_length()
        key = dtype, self.table.num_seqs, step.longest, columns, step.cu_seqlens is None
        if key in self._steps or name == REFERENCE or not step.longest or dtype not in calls.DTYPES.values():
            return  # in traced code, `dtype` may be any
        self._steps.add(key)
        self._layers = self._different_layers(name, dtype)
        prepared = self._attend(step, self.attention)
        for layer in self._layers:
            for tokens, ragged in ((step.longest, step.cu_seqlens is not None), (1, False)):
                prepared.append(partial(calls.append, layer, tokens, ragged))
        first.prepare(self.table.device, prepared)

    def attend(self, index: int, step: Step, attention: Attention) -> None:
        """Before the first attention of layer `index`: prepare attention of this kind for all layers, in this step and
        in a decode step.
        """
        self.attended.add(index)
        if attention not in self.attention and step.longest and self._layers:
            self.attention.add(attention)
            first.prepare(self.table.device, self._attend(step, [attention]))

    def _attend(self, step: Step, kinds: Iterable[Attention]) -> list[Callable[[], None]]:
        """Attention of these kinds by all layers, in this step and in a decode step."""
        before = max(self._columns(step) - num_pages_of(step.longest), 0)
        # A static cache then no longer knows how few columns have tokens.
        before_decode = max(self.table.page_table.shape[1] - 1, 0)
        ragged = 0 if step.cu_seqlens is None else step.num_tokens
        attend: list[Callable[[], None]] = []
        for num_q_heads, options, causal, leftpad in kinds:
            for each in self._layers:
                layer = replace(each, num_q_heads=num_q_heads, attention=options)
                call = partial(calls.attend, layer, self.table.num_seqs, leftpad=leftpad)
                attend.append(partial(call, step.longest, before, ragged=ragged, causal=causal))
                attend.append(partial(call, 1, before_decode))
        return attend

    def _different_layers(self, backend: BackendName, dtype: torch.dtype) -> set[Layer]:
        """The different formats of the layers. The number of query heads is not known here. Kernels of latents are few,
        and compiled at their first launch.
        """
        return {
            Layer(
                layer.num_kv_heads, layer.num_kv_heads, layer.format.spec.k_dim, dtype=dtype, backend=backend,
                key_dtype=layer.format.k.name, rotate_keys=layer.format.rotate,
                k_mean=layer.format.stored_k_mean is not None, v_mean=layer.format.v_mean is not None,
                static_scales=layer.scales is not None,
            )
            for layer in self.table.layers
            if not layer.format.spec.v_in_k
        }  # fmt: skip

    def _columns(self, step: Step) -> int:
        """Number of columns of the page table that this step's attention gets."""
        return step.columns or self.table.page_table.shape[1]
