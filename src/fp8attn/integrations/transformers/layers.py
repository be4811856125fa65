"""The FP8 layers of a transformers cache: transformers' interface to one `PagedKVCache`."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer

from ...cache import PagedKVCache
from ...cache.ahead import Attention
from ...dense.sdpa import autocast
from ...errors import UsageError
from ...formats.codec import KeyDtype, codec_of
from ...formats.spec import PageSpec
from ...params import BackendName, check_backend, options_of
from ...scales import LayerScales
from ..k_eq_v import to_latent
from .biases import LayerBiases
from .config import LayerSpec, has_sinks, has_softcap
from .tensors import ATTN_IMPLEMENTATION, PagedTensor, Reading, dequantize, tokens_of

UNCOMPILED = (
    "FP8Cache makes its pages outside of compiled code. A static cache has pages for one sequence from the start. For "
    "a larger batch whose first forward is compiled with fullgraph=True, call cache.early_initialization(batch_size, "
    "num_kv_heads, head_dim, dtype, device) before. A cache without max_cache_len cannot be in such code"
)


@dataclass(frozen=True)
class CacheOptions:
    """The options that all layers of an `FP8Cache` have, which describes them.

    Raises:
        UsageError: an option has no such value.
    """

    max_cache_len: int | None
    key_dtype: KeyDtype
    rotate_keys: bool
    exact: bool
    batch_invariant: bool
    backend: BackendName

    def __post_init__(self) -> None:
        length = self.max_cache_len
        if length is not None and (not isinstance(length, int) or length < 1):
            raise UsageError(f"max_cache_len must be a positive whole number of tokens (None grows); got {length!r}")
        codec_of(self.key_dtype)  # raises UsageError
        check_backend(self.backend)


class FP8Layers:
    """The FP8 layers of a cache that have one shape, window and device, and the `PagedKVCache` that they share.

    Args:
        config: the decoder's config. Its attention implementation decides what `update` returns.
        device: the device that the model's layers are on; "meta" if it is not known.
    Attributes:
        window: the sliding window of the layers; None: they see all tokens.
        layers: the layers, in the order of their numbers in `paged`.
        paged: their pages. Until the first K and V, they are those of one sequence, with the shape and the device that
            the config and the model say (`make_early`).
        unused: whether there was no K and V yet. The first may have another shape (with tensor parallelism, a layer has
            a share of its heads), and then gets other pages.
    """

    paged: PagedKVCache

    def __init__(
        self,
        config: PreTrainedConfig,
        options: CacheOptions,
        spec: PageSpec,
        window: int | None,
        device: torch.device,
    ) -> None:
        self.config, self.options, self.spec, self.window, self.device = config, options, spec, window, device
        self.reading = Reading(options.backend, options.exact, options.batch_invariant, window)
        self.layers: list[FP8Layer] = []
        self.unused = True
        self.implementation, self.length = "", 0  # of attention, and of K as it is returned, in this forward

    def make_early(self) -> None:
        """Make the pages of one sequence, so that also the first forward of a static cache can be compiled."""
        first = self.layers[0]
        means = [mean for layer in self.layers for mean in (layer.k_mean, layer.v_mean) if mean is not None]
        # Means are of the layer as it is, with a share of the heads where tensor parallelism divides them.
        heads = len(means[0]) if means else first.spec.num_kv_heads
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        k, v = (torch.empty(1, heads, 0, width, device=device) for width in self.spec.widths)
        self.make(first.index, k, v)
        self.unused = True

    @torch.compiler.disable(reason=UNCOMPILED)
    def make(self, index: int, key_states: torch.Tensor, value_states: torch.Tensor) -> PagedKVCache:
        """Make the pages of all layers for K and V of layer `index`, `[B, num_kv_heads, S, head_dim]`; S may be 0.

        Raises:
            ValueError: no kernel takes the shape.
        """
        options, spec = self.options, self.spec
        if not spec.v_in_k:  # an append refuses other latents
            spec = PageSpec(key_states.shape[-1], value_states.shape[-1], spec.k)
        if spec.refusal is not None:
            raise ValueError(
                f"layer {index} has a K of head_dim {spec.k_dim} and a V of {spec.v_dim}: {spec.refusal}. "
                f"Keep such layers in 16 bits (FP8Cache(model, skip_layers=[{index}, ...])), or use transformers' own "
                f"cache"
            )
        batch, num_kv_heads, _, head_dim = key_states.shape
        scales = [layer.scales for layer in self.layers if layer.scales is not None]
        means = [mean for layer in self.layers for mean in (layer.k_mean, layer.v_mean)]
        if any(mean is not None for mean in means):  # zeros for the others: all layers then have the same kernels
            means = [torch.zeros(num_kv_heads, head_dim) if mean is None else mean for mean in means]
        self.paged = PagedKVCache(
            num_kv_heads,
            spec,
            num_layers=len(self.layers),
            num_seqs=batch,
            max_seqlen=options.max_cache_len,
            window=self.window,
            rotate_keys=[layer.rotate_keys for layer in self.layers],
            k_mean=None if spec.v_in_k else means[::2],
            v_mean=means[1::2],
            factor=[layer.factor for layer in self.layers],
            scales=scales or None,
            device=key_states.device,
            backend=options.backend,
        )
        self.unused = False
        if self.config._attn_implementation == ATTN_IMPLEMENTATION:
            self.paged.ahead.attention |= self._attention(batch)
        return self.paged

    def _attention(self, batch: int) -> set[Attention]:
        """How the model's layers attend, for `Ahead`. Sequences of a batch may have padding, which the cache does not
        see.
        """
        options = options_of(
            window=self.window, softcap=has_softcap(self.config), sinks=has_sinks(self.config),
            exact=self.options.exact, batch_invariant=self.options.batch_invariant,
        )  # fmt: skip
        return {
            Attention(num_q_heads, options, leftpad=leftpad)
            for num_q_heads in {layer.spec.num_q_heads for layer in self.layers}
            for leftpad in ((False, True) if batch > 1 else (False,))
        }

    @torch.compiler.disable(reason=UNCOMPILED)
    def other_shape(self, index: int, key_states: torch.Tensor, value_states: torch.Tensor) -> PagedKVCache:
        """Handle a K of another shape or device than the pages. An unused cache and an empty growing one take another
        batch. All else raises ValueError."""
        if self.unused:
            recording = self.paged.table.recording
            for layer in self.paged.layers:  # before its memory is allocated again
                layer.replace(None)
            self.make(index, key_states, value_states).table.recording = recording
            return self.paged
        paged = self.paged
        batch, num_kv_heads, _, head_dim = key_states.shape
        same = (num_kv_heads, head_dim, key_states.device) == (
            paged.num_kv_heads,
            paged.spec.widths[0],
            paged.device,
        )
        if not same or self.options.max_cache_len is not None or paged.num_pages:
            raise ValueError(
                f"this cache holds {paged.num_seqs} sequences of {paged.num_kv_heads} KV heads of "
                f"{paged.spec.widths[0]}, on {paged.device}; layer {index} got K {tuple(key_states.shape)} on "
                f"{key_states.device}. Use a new FP8Cache for another batch, device or model. Layers of another shape "
                f"than the model's config says stay in 16 bits with FP8Cache(model, skip_layers=[{index}, ...])"
            )
        paged.select([0] * batch)
        return paged

    def select(self, indices: list[int]) -> None:
        """Replace the sequences with those of these `indices`. Copies share pages until one of them writes."""
        if not self.unused:
            self.paged.select(indices)

    def __deepcopy__(self, memo: dict) -> FP8Layers:
        """A deep copy that refers to the same config, to continue one prompt in several ways."""
        memo[id(self.config)] = self.config
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new


class FP8Layer(CacheLayerMixin):
    """One full-attention layer of an `FP8Cache`: the methods that transformers calls, and the layer's own options.

    Args:
        index: the layer's number in the model, for errors.
        shared: the layers of this shape. The new layer gets the next number in it.
        scales, rotate_keys: as `PagedKVCache` takes them.
        biases: of the layer, whose means are subtracted.
    Attributes:
        factor: of the blocks of latents, as `PagedKVCache` takes it. None: one.
        key_matrix: by which keys follow from values (`k_eq_v.key_matrix`). None: they do not.
    """

    is_sliding = False
    is_croppable = True
    keys = values = None

    def __init__(
        self,
        index: int,
        spec: LayerSpec,
        shared: FP8Layers,
        scales: LayerScales | None,
        biases: LayerBiases,
        rotate_keys: bool,
    ) -> None:
        self.index, self.spec, self.shared, self.slot = index, spec, shared, len(shared.layers)
        self.is_compileable = shared.options.max_cache_len is not None
        self.scales, self.rotate_keys = scales, rotate_keys
        self.k_mean, self.v_mean = biases.k_mean, biases.v_mean
        self.factor: torch.Tensor | None = None
        self.key_matrix: torch.Tensor | None = None
        shared.layers.append(self)

    @property
    def is_initialized(self) -> bool:
        return not self.shared.unused

    @property
    def batch_size(self) -> int:
        if self.shared.unused:
            raise AttributeError("the cache has a batch size only after the first update")
        return self.shared.paged.num_seqs

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the pages of all FP8 layers for K and V of this shape."""
        self.shared.make(self.index, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize and append new tokens, and return K and V of all tokens.

        Args:
            key_states, value_states: `[B, num_kv_heads, S, head_dim]`, the new tokens. Latents and their keys with RoPE
                have one head.
        Returns:
            K and V `[B, num_kv_heads, length, head_dim]`. In the static form, `length` is `max_cache_len`, and values
            past the tokens are zero. A layer with a window returns those of its queries' windows, as transformers'
            growing layers do. They are `PagedTensor`s if the attention implementation is `fp8_kv`, otherwise plain
            dequantized tensors. The first tokens of latents are returned as they are: the model expands them, and
            attends over exact K and V.
        Raises:
            RuntimeError: an input requires a gradient.
            ValueError: the batch, number of heads or head_dim has changed.
        """
        shared = self.shared
        key_states, value_states = autocast(key_states, value_states)
        paged = shared.paged
        (batch, heads, tokens, head_dim), v_dim = key_states.shape, value_states.shape[3]
        if (batch, heads, head_dim) != (paged.num_seqs, paged.num_kv_heads, paged.spec.widths[0]) or (
            self.slot == 0 and key_states.device != paged.device
        ):
            paged = shared.other_shape(self.index, key_states, value_states)
        matrix = self.key_matrix
        expands = paged.spec.v_in_k and matrix is None and tokens > 1 and self._begins(paged)
        if matrix is not None:
            key_states, value_states = to_latent(key_states, value_states, matrix)
        pages = paged.append(self.slot, tokens_of(key_states), tokens_of(value_states))
        if self.slot == 0:  # once in a forward, because reading a config's attributes is slow
            shared.unused = False
            shared.implementation = shared.config._attn_implementation
            shared.length = paged.max_seqlen or paged.lengths[0]
        length = shared.length if shared.window is None else min(shared.length, shared.window - 1 + tokens)
        if expands:
            return key_states, value_states
        if shared.implementation == ATTN_IMPLEMENTATION:
            k_shape, v_shape = (batch, heads, length, head_dim), (batch, heads, length, v_dim)
            common = key_states.dtype, shared.reading, matrix
            return PagedTensor(pages, "k", k_shape, *common), PagedTensor(pages, "v", v_shape, *common)
        if not torch.compiler.is_compiling():
            # Python shows a warning of one text from one line once.
            warnings.warn(
                f"FP8Cache under attn_implementation={shared.implementation!r} dequantizes all of its K and V in every "
                f"layer at every step, which is slower than a 16-bit cache. Call "
                f"model.set_attn_implementation({ATTN_IMPLEMENTATION!r})",
                stacklevel=2,
            )
        last = shared.window is not None
        return dequantize(pages, "k", length, key_states.dtype, last, matrix), dequantize(
            pages, "v", length, key_states.dtype, last, matrix
        )

    def _begins(self, paged: PagedKVCache) -> bool:
        """Whether the host knows that this layer holds no tokens yet."""
        return not (torch.compiler.is_compiling() or paged.is_unseen) and paged.length_of(self.slot) == 0

    # Sizes, for transformers

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """The number of keys that a mask for `query_length` new tokens covers, and the index of the first one."""
        shared = self.shared
        if shared.options.max_cache_len is not None:
            return shared.options.max_cache_len, 0
        length = shared.paged.lengths[0]
        first = 0 if shared.window is None else max(0, length - shared.window + 1)
        return length + query_length - first, first

    def get_seq_length(self) -> int | torch.Tensor:
        """Number of tokens. In the static form it is a scalar on the device, except while the cache is known to be
        empty.
        """
        paged = self.shared.paged
        if self.shared.unused and not torch.compiler.is_compiling():
            return 0
        if paged.max_seqlen is None:
            return paged.lengths[0]
        # A copy, because the caller uses it after the next append.
        return torch.ops.fp8attn.lengths(paged.pages(self.slot).cache_seqlens)[0]

    @property
    def num_tokens(self) -> int:
        """Number of tokens that this layer has appended. In the static form it may wait for the GPU."""
        return self.shared.paged.length_of(self.slot)

    def get_max_length(self) -> int:
        """The largest number of tokens; -1 without a limit."""
        return self.shared.options.max_cache_len or -1

    def reset(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError, like every method that would move the sequences of only this layer."""
        raise NotImplementedError(
            "the FP8 layers of a cache share one page table: call reset, crop, reorder_cache, ... on the FP8Cache"
        )

    crop = reorder_cache = batch_repeat_interleave = batch_select_indices = reset

    def offload(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise NotImplementedError: pages stay on their device."""
        raise NotImplementedError(
            "FP8Cache does not offload: its pages stay on the device. Use transformers' DynamicCache(offloading=True)"
        )

    prefetch = offload


def groups_of(layers: list[Any]) -> list[FP8Layers]:
    """What the FP8 layers among these share."""
    return list(dict.fromkeys(layer.shared for layer in layers if isinstance(layer, FP8Layer)))


class FP8SlidingLayer(FP8Layer):
    """A layer with a sliding window, whose pages are given back when no later query sees them (`PageTable.reserve`).

    The tokens of the last forward can be cropped, and 64 more (`page_table.SLACK`). After `activate_past_recording`,
    which assisted decoding calls, all tokens since the last crop can, as in transformers' own layers.
    """

    is_sliding = True

    @property
    def sliding_window(self) -> int:
        """Number of tokens that a query sees, its own included."""
        assert self.shared.window is not None
        return self.shared.window

    @property
    def record_past(self) -> bool:
        """Whether tokens are kept until the next crop."""
        return self.shared.paged.table.recording

    @record_past.setter
    def record_past(self, recording: bool) -> None:
        self.shared.paged.table.recording = recording

    def activate_past_recording(self) -> None:
        """Keep every token until the next crop."""
        self.record_past = True


class FP8HybridLayer(FP8Layer, LinearAttentionLayer):
    """A layer with full attention and, beside it, the state of a linear layer, as Falcon-H1 has. K and V are in FP8,
    the state in 16 bits.

    The arguments are those of `FP8Layer`. The methods that move sequences, which the cache calls, move those of the
    state.
    """

    is_croppable = LinearAttentionLayer.is_croppable
    reset, crop = LinearAttentionLayer.reset, LinearAttentionLayer.crop
    reorder_cache = LinearAttentionLayer.reorder_cache

    def __init__(self, index: int, spec: LayerSpec, *args: Any) -> None:
        LinearAttentionLayer.__init__(self, spec.options.get("number_of_states", 1))
        FP8Layer.__init__(self, index, spec, *args)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make the pages for K and V, which are given by position, or the state, whose tensors have names (as in
        transformers).
        """
        (LinearAttentionLayer if kwargs else FP8Layer).lazy_initialization(self, *args, **kwargs)
