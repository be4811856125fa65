"""`FP8Cache`: a transformers cache whose full-attention layers hold FP8 pages."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DYNAMIC_LAYER_TYPE_MAPPING, STATIC_LAYER_TYPE_MAPPING, Cache, CacheLayerMixin

from ... import ops
from ...cache import PagedKVCache
from ...dense.sdpa import autocast
from ...errors import UsageError
from ...layout import DEFAULT_KEY_DTYPE, HEAD_DIMS, PAGE_SIZE, KVPages, key_type
from ...scales import KVScales, LayerScales
from .biases import layer_biases, spread_layers
from .config import FULL, UNQUANTIZED_LAYER_TYPES, check_attention_interface, decoder_config, layers_of
from .tensors import ATTN_IMPLEMENTATION, PagedKV, dequantize


class FP8Layer(CacheLayerMixin):
    """One full-attention layer of an `FP8Cache`.

    Args:
        index: the layer's number, for errors.
        config: the decoder's config; its attention implementation decides what `update` returns.
        max_cache_len: tokens to make room for, once and for all; None grows.
        checks_room: whether this layer makes sure that new tokens fit into `max_cache_len`. One layer of a cache does so for all, which
            grow together.
        scales, key_dtype, rotate_keys, backend: as `PagedKVCache` takes them.
    Attributes:
        k_mean, v_mean: static means, as `PagedKVCache` takes them; None: zero.
        known_empty: whether the host knows that a static layer holds no tokens. Who writes to its pages directly sets it to False.
    """

    is_sliding = False
    is_croppable = True

    def __init__(
        self,
        index: int,
        config: PreTrainedConfig,
        *,
        max_cache_len: int | None,
        checks_room: bool,
        scales: LayerScales | None,
        key_dtype: str,
        rotate_keys: bool,
        backend: str,
    ) -> None:
        super().__init__()
        self.index = index
        self.config = config
        self.max_cache_len = max_cache_len
        self.checks_room = checks_room
        self.is_compileable = max_cache_len is not None
        self.scales = scales
        self.key_dtype, self.rotate_keys = key_dtype, rotate_keys
        self.k_mean: torch.Tensor | None = None
        self.v_mean: torch.Tensor | None = None
        self.backend = backend
        self.cache: PagedKVCache | None = None
        self.known_empty = False
        self.captured = False  # an append is in a CUDA graph, which may be replayed at any time

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Make the pages for K and V of this shape, `[B, num_kv_heads, S, head_dim]`; S may be 0.

        Raises:
            ValueError: a shape that no kernel takes.
            RuntimeError: inside a compiled region, where nothing can be allocated for good.
        """
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "the first append to a static FP8Cache is in a compiled region; run the prefill uncompiled, or call "
                "cache.early_initialization(batch_size, num_heads, head_dim, dtype, device) before it"
            )
        head_dims = key_states.shape[-1], value_states.shape[-1]
        if head_dims[0] != head_dims[1] or head_dims[0] not in HEAD_DIMS:
            raise UsageError(
                f"layer {self.index} has a K of head_dim {head_dims[0]} and a V of {head_dims[1]}; FP8 pages hold one head_dim for both, "
                f"of {HEAD_DIMS}. Keep such layers in 16 bits (FP8Cache(config, skip_layers=[{self.index}, ...])), or use transformers' "
                "own cache"
            )
        self.batch_size, num_kv_heads, _, head_dim = key_states.shape
        self.dtype, self.device = key_states.dtype, key_states.device
        length = self.max_cache_len
        self.cache = PagedKVCache(
            num_kv_heads,
            head_dim,
            num_seqs=self.batch_size,
            num_pages=None if length is None else self.batch_size * -(-length // PAGE_SIZE),
            key_dtype=self.key_dtype,
            rotate_keys=self.rotate_keys,
            k_mean=self.k_mean,
            v_mean=self.v_mean,
            scales=self.scales,
            device=self.device,
            backend=self.backend,
        )
        if length is not None:
            self.cache.reserve(length)
            for x in self.cache.pages.state:
                if isinstance(x, torch.Tensor):
                    torch._dynamo.mark_static_address(x)  # CUDA graphs write into it in place
        self.is_initialized = self.known_empty = True

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize new tokens onto the end, and return K and V of all.

        Args:
            key_states, value_states: `[B, num_kv_heads, S, head_dim]`, the new tokens.
        Returns:
            K and V `[B, num_kv_heads, length, head_dim]` (the static form: `max_cache_len`, zero past its tokens): `PagedKV` under the
            attention implementation `fp8_kv`, plain dequantized tensors under any other.
        Raises:
            RuntimeError: a derivative is wanted.
            ValueError: another batch, head count or head_dim than before.
        """
        ops.check_derivatives(key_states, value_states)
        key_states, value_states = autocast(key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        cache = self.cache
        batch, heads, length, head_dim = key_states.shape
        if (batch, heads, head_dim) != (self.batch_size, cache.num_kv_heads, cache.head_dim):
            raise ValueError(
                f"layer {self.index} of this cache holds {self.batch_size} sequences of {cache.num_kv_heads} heads of {cache.head_dim}; "
                f"got K {tuple(key_states.shape)}. Use a new FP8Cache for another batch"
            )
        k, v = (x.transpose(1, 2).flatten(0, 1) for x in (key_states, value_states))
        if self.max_cache_len is None:
            cache.append(k, v)
            pages, total = cache.pages, cache.lengths[0]
        else:
            # Device state alone, so that this compiles once.
            pages = self._pages_for(length)
            # Tokens past the pages that the table names would overwrite others: stop there, as an index out of range does.
            if self.checks_room:
                fits = pages.cache_seqlens.max() <= min(self.max_cache_len, pages.page_table.shape[1] * PAGE_SIZE) - length
                torch._assert_async(
                    fits,
                    "FP8Cache is full: make it with a larger max_cache_len (or, if something else than `update` has filled it, set "
                    "`known_empty = False` on its layers)",
                )
            ops.append(pages, k, v, static_scales=self.scales is not None, backend=self.backend)
            total = self.max_cache_len
        implementation = self.config._attn_implementation
        if implementation == ATTN_IMPLEMENTATION:
            return tuple(PagedKV(pages, which, total, key_states.dtype, self.backend) for which in "kv")
        if not torch.compiler.is_compiling():
            # Python shows a warning of one text from one line once.
            warnings.warn(
                f"FP8Cache under attn_implementation={implementation!r} dequantizes all of its K and V in every layer at every step, "
                f"which is slower than a 16-bit cache. Call model.set_attn_implementation({ATTN_IMPLEMENTATION!r}), or make the cache "
                "by FP8Cache.for_model(model), which does",
                stacklevel=2,
            )
        return tuple(dequantize(pages, which, total, key_states.dtype) for which in "kv")

    def _pages_for(self, length: int) -> KVPages:
        """The pages for an append of `length` tokens, and for their attention.

        Kernels are launched for the tokens that the table has room for. Where the host knows that there are no others, that is `length`.
        Not in a CUDA graph, which may be replayed on a cache that has grown; and compiled code would be compiled anew if it looked.
        """
        pages = self.cache.pages
        if not torch.compiler.is_compiling():
            self.captured = self.captured or _is_capturing(self.device)
            if self.known_empty and not self.captured:
                pages = replace(pages, page_table=pages.page_table[:, : -(-length // PAGE_SIZE)])
        self.known_empty = False
        return pages

    # Sizes, as transformers asks for them

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(how many keys a mask for `query_length` new tokens covers, where they begin)."""
        return self.max_cache_len or self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int | torch.Tensor:
        """Tokens held; in the static form, once it holds any, a scalar on the device."""
        if not self.is_initialized:
            return 0
        if self.max_cache_len is None:
            return self.cache.lengths[0]
        return self.cache.pages.cache_seqlens[0].long()  # a copy: what it is read for outlives the next append

    def get_max_length(self) -> int:
        """Tokens that fit; -1 without a limit."""
        return self.max_cache_len or -1

    @property
    def nbytes(self) -> int:
        """Bytes held on the device."""
        return self.cache.nbytes if self.is_initialized else 0

    # Sequences moved about: host work, so the static form reads its lengths back first

    def _moved(self, move: Callable[[PagedKVCache], None]) -> None:
        if not self.is_initialized:
            return
        if self.max_cache_len is None:
            move(self.cache)
        else:
            self.cache.sync()
            move(self.cache)
            self.cache.reserve(self.max_cache_len)  # compiled steps find every page there again, and none shared that they write
            self.known_empty = not (self.captured or any(self.cache.lengths))

    def reset(self) -> None:
        """Forget every token. The growing form also frees its pages; the static form keeps its tensors where they are."""
        if self.max_cache_len is None:
            self.cache, self.is_initialized = None, False
        else:
            self._moved(PagedKVCache.reset)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens.

        Raises:
            ValueError: a positive number.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop takes minus the number of tokens to forget, as in transformers; got {tokens_to_remove}")
        if tokens_to_remove:
            self._moved(lambda cache: cache.truncate([max(0, length + tokens_to_remove) for length in cache.lengths]))

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Sequence `i` becomes a copy of what sequence `beam_idx[i]` was; copies share pages until they differ."""
        self._select(beam_idx.tolist(), "reorder_cache")

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, side by side."""
        if self.is_initialized:
            self._select([i for i in range(self.batch_size) for _ in range(repeats)], "batch_repeat_interleave")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices` (numbers, or a mask)."""
        self._select((indices.nonzero()[:, 0] if indices.dtype == torch.bool else indices).tolist(), "batch_select_indices")

    def _select(self, indices: list[int], what: str) -> None:
        if not self.is_initialized:
            return
        if self.max_cache_len is not None and len(indices) != self.batch_size:
            raise ValueError(
                f"{what} would change a static FP8Cache from {self.batch_size} to {len(indices)} sequences; use max_cache_len=None, or "
                "give the prompt to generate with the final batch"
            )
        self._moved(lambda cache: cache.select(indices))
        self.batch_size = len(indices)

    def __deepcopy__(self, memo: dict) -> FP8Layer:
        """A copy of its own, to go on from one prompt in several ways; the config stays the model's."""
        memo[id(self.config)] = self.config
        new = memo[id(self)] = type(self).__new__(type(self))
        new.__dict__ = copy.deepcopy(self.__dict__, memo)
        return new

    def offload(self) -> None:
        """Raises NotImplementedError: pages stay on their device."""
        raise NotImplementedError(
            "FP8Cache does not offload: its pages stay on the device. Use transformers' DynamicCache(offloading=True)"
        )

    prefetch = offload


def _is_capturing(device: torch.device) -> bool:
    """Whether what is launched now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def edge_layers(first: int = 0, last: int = 0) -> tuple[int, ...]:
    """The numbers of the `first` and the `last` layers of a model, for `skip_layers`: `edge_layers(1, 2)` is `(0, -2, -1)`."""
    return (*range(first), *range(-last, 0))


class FP8Cache(Cache):
    """A transformers cache with FP8 pages in its full-attention layers: half the bytes of BF16.

    Sliding-window and chunked layers stay transformers' own, in 16 bits: they hold a window, which does not grow. (Their masks do: for a
    long prompt to a model that has them, `generate(..., prefill_chunk_size=8192)`.)

    Args:
        config: the model's config (`model.config`). Its attention implementation is read at every step: `fp8_kv` gets the pages.
        max_cache_len: None grows as tokens come. A number makes the static form: all memory at once, no host work in a step, so that
            decoding compiles once (`generate` does so on a GPU) and runs in CUDA graphs.
        scales: calibrated scales and means (`KVScales.load`), of this key_dtype and rotate_keys. None: each page has scales of its own,
            and there is nothing to calibrate.
        key_dtype: what keys are stored in, `"int8"` or `"e4m3"`; values are E4M3.
        rotate_keys: rotate keys before quantization (`rotation.rotate`).
        skip_layers: layers to keep in 16 bits: numbers (negative ones count from the end), or a function of the number. A choice for
            whoever measured the model: `fp8attn calibrate` reports each layer's error; `edge_layers` names the first and last.
        backend: `"auto"`, `"triton"` or `"reference"`, for writing and for attention.
    Raises:
        TypeError: no config of a model.
        UsageError: a model that it cannot serve, by name, with what to do instead; a `max_cache_len` that is no number of tokens; scales
            of another model, key_dtype or rotate_keys.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        max_cache_len: int | None = None,
        scales: KVScales | None = None,
        skip_layers: Iterable[int] | Callable[[int], bool] = (),
        key_dtype: str = DEFAULT_KEY_DTYPE,
        rotate_keys: bool = True,
        backend: str = "auto",
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(f"FP8Cache takes a model's config, as in FP8Cache(model.config); got {type(config).__name__}")
        if max_cache_len is not None and (not isinstance(max_cache_len, int) or max_cache_len < 1):
            raise UsageError(f"max_cache_len must be a positive whole number of tokens (None grows); got {max_cache_len!r}")
        key_type(key_dtype)  # raises ValueError
        specs, config = layers_of(config), decoder_config(config)
        if config._attn_implementation == ATTN_IMPLEMENTATION:
            check_attention_interface(config)
        skipped = _skipped(skip_layers, config.num_hidden_layers)
        if scales is not None:
            full = next(spec for spec in specs if spec.kind == FULL)
            scales.check(
                num_layers=config.num_hidden_layers,
                num_kv_heads=full.num_kv_heads,
                head_dim=full.head_dim,
                model_id=config.name_or_path,
                key_dtype=key_dtype,
                rotate_keys=rotate_keys,
            )
        plain = DYNAMIC_LAYER_TYPE_MAPPING if max_cache_len is None else STATIC_LAYER_TYPE_MAPPING
        length = {} if max_cache_len is None else {"max_cache_len": max_cache_len}
        layers = []
        for index, spec in enumerate(specs):
            if spec.kind not in (FULL, *UNQUANTIZED_LAYER_TYPES):
                raise UsageError(
                    f"layer {index} of {config.model_type!r} is of type {spec.kind!r}; FP8Cache holds full, sliding and chunked attention. "
                    "Use transformers' own cache for this model (DynamicCache(config=model.config))"
                )
            if spec.kind == FULL and not skipped(index):
                layers.append(
                    FP8Layer(
                        index,
                        config,
                        max_cache_len=max_cache_len,
                        checks_room=not any(isinstance(layer, FP8Layer) for layer in layers),
                        scales=None if scales is None else scales.layer(index),
                        key_dtype=key_dtype,
                        rotate_keys=rotate_keys,
                        backend=backend,
                    )
                )
            else:
                layers.append(plain[spec.kind](**{**spec.options, **length}))
        if not any(isinstance(layer, FP8Layer) for layer in layers):
            raise UsageError(
                "no layer would be in FP8: skip_layers keeps every full-attention layer in 16 bits. Use transformers' own cache "
                "(DynamicCache(config=model.config))"
            )
        super().__init__(layers=layers)

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        *,
        max_cache_len: int | None = None,
        skip_layers: Iterable[int] | Callable[[int], bool] = (),
        key_dtype: str = DEFAULT_KEY_DTYPE,
        rotate_keys: bool = True,
        backend: str = "auto",
    ) -> FP8Cache:
        """The cache of `model.config`, with static means where the model's biases are several deviations of K or V (`biases`).

        The model's attention implementation is set to `fp8_kv`, which reads pages as they are. No data are needed. INT8 keys are rotated in
        every layer. E4M3's error is relative, so E4M3 keys are not rotated where that would spread a large error over all channels: where
        K keeps an offset that no constant removes, because RoPE turns it, and where large channels of K meet small ones of Q.

        Args:
            model: a transformers model.
            max_cache_len, skip_layers, key_dtype, rotate_keys, backend: as `FP8Cache` takes them. K's bias is averaged over max_cache_len
                positions; over the config's max_position_embeddings where it is None.
        """
        if not isinstance(model, PreTrainedModel):
            raise TypeError(f"FP8Cache.for_model takes a transformers model; got {type(model).__name__}. A config goes to FP8Cache(config)")
        options = {"skip_layers": skip_layers, "key_dtype": key_dtype, "rotate_keys": rotate_keys, "backend": backend}
        cache = cls(model.config, max_cache_len=max_cache_len, **options)
        check_attention_interface(decoder_config(model.config))
        model.set_attn_implementation(ATTN_IMPLEMENTATION)
        biases, spread = layer_biases(model, max_cache_len), spread_layers(model) if key_dtype == "e4m3" else ()
        for index in cache.fp8_layers:
            layer, found = cache.layers[index], biases.get(index)
            if found is not None:
                layer.k_mean, layer.v_mean = found.k_mean, found.v_mean
            if key_dtype == "e4m3" and (index in spread or (found is not None and found.stands_out)):
                layer.rotate_keys = False
        return cache

    @property
    def nbytes(self) -> int:
        """Bytes held on the device by all layers, FP8 and 16-bit."""
        return sum(
            layer.nbytes if isinstance(layer, FP8Layer) else sum(x.nbytes for x in (layer.keys, layer.values) if x is not None)
            for layer in self.layers
        )

    @property
    def fp8_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that are in FP8."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer, FP8Layer))

    def _all_layers(self, method: str, *args) -> None:
        """Call `method` on every layer, or on none: transformers' static layers lack some."""
        lacking = [index for index, layer in enumerate(self.layers) if not hasattr(layer, method)]
        if lacking:
            raise ValueError(
                f"{method} needs a cache that grows: transformers' static 16-bit layers ({', '.join(map(str, lacking))}) have none. "
                "Use FP8Cache(config) without max_cache_len"
            )
        for layer in self.layers:
            getattr(layer, method)(*args)

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last `-tokens_to_remove` tokens of every layer."""
        self._all_layers("crop", tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence `repeats` times, side by side."""
        self._all_layers("batch_repeat_interleave", repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the sequences `indices`."""
        self._all_layers("batch_select_indices", indices)


def _skipped(skip_layers: Iterable[int] | Callable[[int], bool], num_layers: int) -> Callable[[int], bool]:
    if callable(skip_layers):
        return skip_layers
    numbers = list(skip_layers)
    wrong = [n for n in numbers if not -num_layers <= n < num_layers]
    if wrong:
        raise UsageError(f"skip_layers names {wrong}, and the model has layers 0 to {num_layers - 1} (-1 is the last)")
    return {n % num_layers for n in numbers}.__contains__
