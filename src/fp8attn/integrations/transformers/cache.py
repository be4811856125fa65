"""`FP8Cache`: a transformers cache whose attention layers hold FP8 pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
    StaticLayer,
)

from ...cache import PagedKVCache
from ...cache.page_table import MOST_SEQUENCES
from ...checks import check_size, is_whole
from ...formats.codec import DEFAULT_KEY_DTYPE, KeyDtype
from ...formats.spec import spec_of
from ...pages import KVPages
from ...params import BackendName
from ...scales import KVScales, ranges
from . import files
from .build import latent_keys, make_layers, served_layers, transformers_model
from .config import LayerSpec, decoder_config
from .decoder import layer_devices
from .kept import make_normal
from .latent import install, read_latents
from .layers import UNCOMPILED, CacheOptions, FP8HybridLayer, FP8Layer, groups_of
from .tensors import ATTN_IMPLEMENTATION
from .weights import Weights, key_matrices, layers_in_16_bits, read_weights, warn_losing, warn_unread


class FP8Cache(Cache):
    """A transformers cache with FP8 pages: half the bytes of BF16.

    The model's attention implementation is set to `fp8_kv`, which reads pages directly. If it is set to another one
    afterwards, the cache returns dequantized K and V, which is slower.

    Static means are read from the model's weights, where its biases are several deviations of K or V (`biases`). No
    data are needed. No mean removes a bias of K that RoPE rotates. Layers where such biases make keys too coarse in 8
    bits (`LayerBiases.loses`) stay in 16 bits, and a warning names them; `skip_layers` overrules it. Nor are E4M3 keys
    rotated in layers where the weights say that the rotation would make them worse (`Weights.unrotated`).

    Keys that follow from values (full layers of Gemma 4 with `attention_k_eq_v`) are not stored on a Hopper GPU or on
    a CPU, if `scales`, `key_dtype`, `rotate_keys`, `batch_invariant` and `backend` are the default ones.

    A layer with a sliding window gives back the pages that no later query sees, before the next forward. Windows of
    fewer than 384 tokens would not be smaller in pages than in 16 bits. Such layers are transformers' own, and so are
    all windows of the static form, chunked layers, and the states of linear layers. During a forward, windows have the
    pages of all its tokens, and masks of 16-bit layers grow with it: for a long prompt, call
    `generate(..., prefill_chunk_size=8192)`.

    The pages of a layer are on the device of its weights. So a model can be divided among several GPUs
    (`device_map="auto"`).

    A cache holds one conversation: every forward appends its tokens. `generate` takes a prompt as the whole
    conversation and cuts as many tokens from it as the cache has, whatever they are. For another prompt make a new
    cache, or call `reset`.

    A forward that is interrupted (Ctrl-C in a notebook), or that does not run every layer, leaves some layers without
    its tokens. The next use of the cache raises RuntimeError. `crop(0)` drops what only some layers hold. Where the
    state of a linear layer has changed, only `reset` helps. If all layers of attention have the tokens, or none,
    nothing shows an interrupt: it was in the output head, in the layers of Gemma 4 that share K and V of others, or in
    the first or last linear layers.

    Args:
        model: the transformers model that the cache is for, or a PEFT model of it.
        max_cache_len: number of tokens of the static form, which allocates all memory at once and needs no host work in
            a step. So decoding compiles once (`generate` does so on a GPU) and runs in CUDA graphs. None: the cache
            grows with its tokens. K's bias is averaged over these positions (None: over the config's
            max_position_embeddings).
        scales: calibrated scales and means (`KVScales.load`) with this key_dtype and rotate_keys. Their means replace
            those of biases, and what these leave decides which layers stay in 16 bits. None: each page has its own
            scales, and no calibration is needed.
        key_dtype: the format of keys, as `PagedKVCache` takes it. Values are E4M3.
        rotate_keys: rotate keys before quantization (`rotation.rotate`).
        skip_layers: numbers of the layers to keep in 16 bits; negative ones count from the end. `()`: all layers are in
            8 bits. None: those with too large biases stay in 16 bits, unless no layer would be in 8 bits, or
            `batch_invariant` is given. `fp8attn sensitivity` measures a model and chooses layers; `edge_layers` names
            the first and last.
        exact: keep 16 bits of queries and softmax weights in prompts, too, as `fp8attn.attention` takes it. Prompts are
            slower.
        batch_invariant: attention of a token has the same bits whatever the batch, as `fp8attn.attention` takes it. The
            model's other layers are not the cache's: their matrix products depend on the batch, unless they are
            replaced.
        backend: as `PagedKVCache` takes it.
    Raises:
        TypeError: `model` is not a transformers model, or `scales` are not `KVScales`.
        UsageError: the model cannot be served (`unsupported_reason`; the message says what to use), `max_cache_len` is
            not a number of tokens, or the scales are for another model, key_dtype or rotate_keys.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        max_cache_len: int | None = None,
        scales: KVScales | None = None,
        skip_layers: Iterable[int] | None = None,
        key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
        rotate_keys: bool = True,
        exact: bool = False,
        batch_invariant: bool = False,
        backend: BackendName = "auto",
    ) -> None:
        model = transformers_model(model)
        options = CacheOptions(max_cache_len, key_dtype, rotate_keys, exact, batch_invariant, backend)
        specs = served_layers(model, options, scales)
        weights = read_weights(model, specs, options, scales)
        in_16_bits = layers_in_16_bits(weights, specs, options)
        skipped = in_16_bits if skip_layers is None else skip_layers
        devices = layer_devices(model, len(specs))
        keys = latent_keys(model, specs, options, scales, devices)
        layers = make_layers(model, specs, options, scales, weights, skipped, devices, keys)
        self._take(model, specs, options, layers)
        latents = read_latents(model) if any(spec.rank is not None for spec in specs) else {}
        for layer in self.layers:
            if isinstance(layer, FP8Layer) and layer.index in latents:
                layer.v_mean, layer.factor = latents[layer.index]
        warn_unread(model, weights, [i for i in self.fp8_layers if self.layers[i].scales is None])
        if skip_layers is None:
            warn_losing(model, weights, in_16_bits, options)
        for group in self.groups:
            group.make_early()

    def _take(self, model: PreTrainedModel, specs: list[LayerSpec], options: CacheOptions, layers: list[Any]) -> None:
        """Take these layers, which have no pages yet, and set the model's attention implementation."""
        super().__init__(layers=layers)
        self.options, self.groups = options, groups_of(layers)
        # Layers that move their sequences themselves, by their numbers: those in 16 bits, and states.
        self._movable: dict[int, Any] = {
            index: layer
            for index, layer in enumerate(layers)
            if not isinstance(layer, FP8Layer) or isinstance(layer, FP8HybridLayer)
        }
        self._plain = [
            layer for layer in layers if isinstance(layer, CacheLayerMixin) and not isinstance(layer, FP8Layer)
        ]
        self._states = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
        self._in_place = [layer for layer in layers if isinstance(layer, LinearAttentionCacheLayerMixin | StaticLayer)]
        self.identity = files.identity_of(model, specs)
        install(model)
        if decoder_config(model.config)._attn_implementation != ATTN_IMPLEMENTATION:
            model.set_attn_implementation(ATTN_IMPLEMENTATION)

    def save(self, path: str | Path, seqs: Sequence[int] | None = None, *, tokens: torch.Tensor | None = None) -> None:
        """Write sequences to a safetensors file. `load` reads them in another process, so a prompt is prefilled once.

        Args:
            path: the file. The folders above it are made.
            seqs: numbers of the sequences in the batch, in the order that `load` gives them. None: all.
            tokens: `[B, length]` ids of all tokens that the cache holds, for `load` to compare. None: the file does not
                know its prompt.
        Raises:
            ValueError: the cache has no tokens yet, there is no such sequence, or `tokens` have another shape than the
                cache.
        """
        self._check()
        files.save(path, self.layers, self.identity, seqs, tokens)

    @classmethod
    def load(
        cls,
        path: str | Path,
        model: PreTrainedModel,
        *,
        tokens: torch.Tensor | None = None,
        max_cache_len: int | None = None,
        exact: bool = False,
        batch_invariant: bool = False,
        backend: BackendName = "auto",
    ) -> FP8Cache:
        """Make a cache from a file of `save`, with the same bytes, format, means and calibrated scales.

        Args:
            path: the file. Only tensors and strings are read; nothing in it is executed.
            model: the same model, in the same dtype. Its attention implementation is set to `fp8_kv`.
            tokens: `[B, S]` ids of the prompt. They must begin with the tokens that the file was saved with. None: they
                are not compared.
            max_cache_len, exact, batch_invariant, backend: as `FP8Cache` takes them.
        Raises:
            UsageError: the file does not exist, is damaged, or is from another model or prompt; the message says what
                differs.
        """
        model = transformers_model(model)
        file = files.read(path, max_cache_len)
        options = CacheOptions(max_cache_len, file.key_dtype, True, exact, batch_invariant, backend)
        specs = served_layers(model, options, None)
        devices = layer_devices(model, len(specs))
        cache = cls.__new__(cls)
        # Means and the choice of layers are in the file, so the model's weights are not read.
        skipped = [index for index in range(len(specs)) if index not in file.layers]
        keys = {
            index: matrix
            for index, matrix in key_matrices(model, specs).items()
            if index in file.layers and spec_of(file.layers[index]["spec"]) == specs[index].latent_pages
        }
        layers = make_layers(model, specs, options, None, Weights({}, set(), []), skipped, devices, keys)
        cache._take(model, specs, options, layers)
        files.restore(file, cache.layers, cache.identity, devices, tokens)
        return cache

    @property
    def paged(self) -> PagedKVCache:
        """The pages of all FP8 layers.

        Raises:
            ValueError: the FP8 layers have several shapes, windows or devices, and so several `PagedKVCache`s, those of
                `groups`.
        """
        if len(self.groups) > 1:
            raise ValueError(
                f"the FP8 layers of this model have {len(self.groups)} shapes, windows or devices, each with its own "
                f"pages. cache.pages(layer) has those of a layer, [group.paged for group in cache.groups] those of all"
            )
        return self.groups[0].paged

    def pages(self, layer: int) -> KVPages:
        """The pages of the model's layer `layer`, which must be in FP8."""
        if layer not in self.fp8_layers:
            raise ValueError(f"layer {layer} has no pages: the FP8 layers are {self.fp8_layers}")
        return self.layers[layer].shared.paged.pages(self.layers[layer].slot)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors of all layers on the device, FP8 and 16-bit."""
        plain = [x for layer in self._plain for x in (layer.keys, layer.values) if x is not None]
        states = [x for layer in self._states for x in files.states_of(layer).values()]
        return sum(group.paged.nbytes for group in self.groups) + sum(x.nbytes for x in (*plain, *states))

    @property
    def fp8_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that are in FP8."""
        return tuple(layer.index for layer in self.layers if isinstance(layer, FP8Layer))

    def __repr__(self) -> str:
        count = len(self.fp8_layers)
        pages = ", ".join("empty" if group.unused else repr(group.paged) for group in self.groups)
        return f"FP8Cache({count} layers in FP8, {len(self.layers) - count} in 16 bits, {pages})"

    # A forward

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append K and V of new tokens to a layer, and return those of all tokens (`FP8Layer.update`)."""
        if torch.compiler.is_compiling() and self.options.max_cache_len is None:
            return self._update_uncompiled(key_states, value_states, layer_idx, *args, **kwargs)
        if not (layer_idx or self._states):
            self._check()
        return self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)

    @torch.compiler.disable(reason=UNCOMPILED)
    def _update_uncompiled(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """An append that may allocate pages, called from compiled code."""
        return self.update(*args, **kwargs)

    def get_seq_length(self, layer_idx: int = 0) -> int | torch.Tensor:
        """Number of tokens. In the static form it is a scalar on the device, except while the cache is known to be
        empty.
        """
        if layer_idx == 0:  # before a forward, not in it
            self._check()
        return super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """The number of keys that a mask for `query_length` new tokens covers, and the index of the first one."""
        self._check()
        if not query_length:
            raise ValueError(
                f"a forward of no new tokens. This cache holds {int(self.get_seq_length())} tokens, and generate cuts "
                f"as many from the prompt, which it takes as the whole conversation. For another prompt make a new "
                f"cache, or call reset()"
            )
        return super().get_mask_sizes(query_length, layer_idx)

    # What the layers hold

    def _check(self) -> None:
        """Raise RuntimeError unless all layers hold the same tokens. (Compiled code runs all layers or none.)"""
        if torch.compiler.is_compiling():
            return
        if make_normal(self._in_place[:1]):
            make_normal(self._in_place)
        if self._agree():
            return
        lengths = self._lengths()
        counts = [
            f"layers {ranges(i for i, x in lengths.items() if x == n)} hold {n} tokens"
            for n in sorted({*lengths.values()})
        ]
        states = ", and states of linear layers have changed" if len(counts) == 1 and self._states else ""
        raise RuntimeError(
            f"the layers of this cache do not hold the same tokens: {', '.join(counts)}{states}. The last forward was "
            f"interrupted, did not run every layer, or runs in another thread, which needs a cache of its own. To go "
            f"on, call cache.crop(0), which drops what only some layers hold, or cache.reset() and prefill again"
        )

    def _agree(self) -> bool:
        """Whether all layers hold the same tokens, as far as it can be seen. It waits for the GPU only after a forward
        of a static cache outside of compiled code, if there are layers in 16 bits or several `groups`."""
        if not all(group.paged.steps.is_complete for group in self.groups):
            return False
        if len(self.groups) == 1 and not (self._plain or self._states):
            return True
        if all(group.paged.is_unseen for group in self.groups):
            return True
        lengths = {group.layers[0].num_tokens for group in self.groups}
        lengths |= {int(layer.get_seq_length()) for layer in self._plain}
        return len(lengths) == 1 and not (
            lengths == {0} and any(any(layer.has_previous_state.values()) for layer in self._states)
        )

    def _lengths(self) -> dict[int, int]:
        """Number of tokens of each layer of attention, by its number."""
        return {
            index: layer.num_tokens if isinstance(layer, FP8Layer) else int(layer.get_seq_length())
            for index, layer in enumerate(self.layers)
            if isinstance(layer, CacheLayerMixin)
        }

    def _check_crop(self, lengths: dict[int, int], target: int) -> None:
        """Raise RuntimeError if a layer, of those that hold `lengths`, cannot go back to `target` tokens."""
        longest = max(lengths.values())
        for index, layer in enumerate(self.layers):
            length = lengths.get(index, longest)
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                lost = min(lengths.values()) < longest or not layer.is_croppable or not layer.record_past
                held = [(layer.conv_kernel_size[i], x.shape[-1]) for i, x in layer.conv_states.items() if x is not None]
                lost = lost or any(n - (length - target) < min(target, size) for size, n in held)
            elif isinstance(layer, DynamicSlidingWindowLayer):
                lost = layer.keys.shape[2] - (length - target) < min(target, layer.sliding_window - 1)
            else:
                lost = (
                    isinstance(layer, StaticLayer)
                    and layer.is_sliding
                    and (length > layer.max_cache_len or not hasattr(layer, "crop"))
                )
            if lost and length > target:
                raise RuntimeError(
                    f"layer {index} cannot go back from {length} to {target} tokens: in 16 bits, it has a state or a "
                    f"window of the last. Call cache.reset() and prefill again. (Windows and convolutions of a growing "
                    f"cache can go back if cache.activate_past_recording() was called before the forward whose tokens "
                    f"are dropped.)"
                )
        for group in self.groups:
            for seq in range(group.paged.num_seqs):
                group.paged.table.check_held(seq, target)  # whether the window before the token is lost

    # Moving sequences

    def _move(self, method: str, argument: Any, indices: list[int]) -> None:
        """Replace the sequences with those of these `indices`: in FP8 layers, and by `method`, which takes `argument`,
        in every 16-bit layer. If a layer does not have it, change nothing.
        """
        self._check()
        make_normal(self._in_place)
        if self._states and not hasattr(LinearAttentionLayer, method):
            states = ranges(i for i, layer in enumerate(self.layers) if layer in self._states)
            raise ValueError(
                f"{method} needs layers of attention alone: transformers' linear layers ({states}) cannot do it. Give "
                f"the prompt to generate with the final batch"
            )
        if lacking := [i for i, layer in enumerate(self.layers) if not hasattr(layer, method)]:
            raise ValueError(
                f"{method} needs a cache that grows: transformers' static 16-bit layers ({ranges(lacking)}) have none. "
                f"Make the FP8Cache without max_cache_len"
            )
        for group in self.groups:  # it checks the argument before it changes anything
            group.select(indices)
        for layer in self._movable.values():
            getattr(layer, method)(argument)

    __copy__ = PagedKVCache.__copy__  # raises TypeError

    def reset(self) -> None:
        """Drop all tokens of all layers. The growing form also frees its pages."""
        make_normal(self._in_place)
        for group in self.groups:
            group.paged.reset()
        for layer in self._movable.values():
            layer.reset()
            if self.options.max_cache_len is None and layer in self._states:  # the next batch may be another
                for made in (layer.is_conv_states_initialized, layer.is_recurrent_states_initialized):
                    made.update(dict.fromkeys(made, False))
            # Older transformers keep zeros as tokens.
            if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer) and layer.is_initialized:
                layer.keys, layer.values, layer.is_initialized = None, None, False

    def crop(self, tokens_to_remove: int | torch.Tensor) -> None:
        """Drop the last `-tokens_to_remove` tokens of those that all layers hold, and the tokens that only some hold.

        Args:
            tokens_to_remove: minus a number of tokens; transformers' assisted decoding counts them in a tensor.
        Raises:
            ValueError: the number is positive.
            RuntimeError: a layer cannot go back so far. Nothing was changed.
        """
        if (
            isinstance(tokens_to_remove, torch.Tensor)
            and tokens_to_remove.dtype == torch.int64
            and not tokens_to_remove.dim()
        ):
            tokens_to_remove = int(tokens_to_remove)
        if not is_whole(tokens_to_remove) or tokens_to_remove > 0:
            raise ValueError(
                f"crop takes minus the number of tokens to forget, as in transformers; got {tokens_to_remove!r}"
            )
        lengths = self._lengths()
        target = max(0, min(lengths.values()) + int(tokens_to_remove))
        if not target:
            self.reset()
            return
        self._check_crop(lengths, target)
        make_normal(self._in_place)
        for group in self.groups:
            group.paged.truncate(target)
        removed = max(lengths.values()) - target  # from a state, which goes back only if all layers hold the same
        for index, layer in self._movable.items():
            change = target - lengths[index] if index in lengths else -removed
            if change or getattr(layer, "record_past", False):
                layer.crop(change)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace each sequence `i` with a copy of the previous sequence `beam_idx[i]`."""
        self._move("reorder_cache", beam_idx, beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times. Copies of a sequence are neighbors."""
        check_size(repeats, "repeats")
        num_seqs = self.groups[0].paged.num_seqs
        if repeats * num_seqs > MOST_SEQUENCES:
            raise ValueError(
                f"a cache has at most {MOST_SEQUENCES:,} sequences; got {num_seqs} to repeat {repeats:,} times"
            )
        self._move("batch_repeat_interleave", repeats, [i for i in range(num_seqs) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences that `indices` selects (numbers, or a mask)."""
        self._move("batch_select_indices", indices, indices.tolist())
