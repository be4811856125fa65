"""`warmup`, of a transformers config or of the shape of a layer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, get_args

import torch

from ..errors import UsageError
from ..formats.codec import DEFAULT_KEY_DTYPE, KeyDtype
from ..params import AttentionOption, BackendName
from ..precompile import Kernel, compile_kernels
from ..precompile.calls import DTYPES, Layer


def warmup(
    config: Any = None,
    *,
    num_q_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_dim: int | None = None,
    device: torch.device | str = "cuda",
    dtype: torch.dtype = torch.bfloat16,
    backend: BackendName = "auto",
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE,
    rotate_keys: bool = True,
    means: bool = False,
    static_scales: bool = False,
    advance: bool = True,
    attention: Collection[AttentionOption] = (),
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Kernel]:
    """Compile all kernels that a model's attention layers and their caches use, in threads, into Triton's cache on
    disk.

    Kernels are compiled for:

    - prompts of 1 to 32,768 tokens, whole or in chunks;
    - decode and verification steps of 1 to 16 tokens;
    - batches of up to 64 sequences of equal lengths, with padding on the left, or of different lengths
      (`cu_seqlens_q`);
    - the appends of `FP8Cache` for all of these;
    - dense calls (`scaled_dot_product_attention`, `fp8_attention`), if there are no softcap, sinks or calibrated scales
      and `advance` is True.

    Kernels are not compiled for calls that return the LSE, that pass tables of RoPE, or that have few queries and are
    not causal; for FP8 operands (`scaled_dot_product_attention_quantized`, FP8 queries); and for pages of your own
    whose options no cache of the model has. Such a call works, and compiles its kernel when it runs.

    `warmup` uses no memory of the GPU and runs nothing on it. Kernels that are in Triton's cache already take
    milliseconds. This process then has them all; another one reads a kernel from the cache when it first launches it.

    Args:
        config: a transformers config, which has the shapes of its layers, softcap and sinks. None: give the shape.
        num_q_heads, num_kv_heads, head_dim: the shape of a layer, if there is no config.
        device: the GPU to compile for.
        dtype: the model's dtype, bfloat16 or float16.
        backend: `"auto"`, `"hopper"` or `"triton"`, as in the calls.
        key_dtype, rotate_keys: the options of the cache (`PagedKVCache`).
        means: also compile for static means of K and V (models with biases), twice as many kernels. `FP8Cache` and the
            plugins of engines have both in a layer or none; a `PagedKVCache` with one of them compiles its kernels when
            it runs.
        static_scales: compile for calibrated scales and their means (`scales=` of a cache), and not for the pages' own
            scales.
        advance: False: compile the calls of an engine that keeps the lengths itself (`fp8attn.append(advance=False)`),
            which are causal and have the bounds of sequences, but for one token of each sequence and for prompts of one
            length of more than 128 tokens.
        attention: what attention has, besides what `config` says: `"window"` (these kernels, too; `config` says it of a
            model whose sliding layers an `FP8Cache` has in 8 bits), `"softcap"`, `"sinks"`, `"exact"` (instead of
            attention that is not exact), `"batch_invariant"` (instead of attention that is not).
        threads: number of threads that compile. Default: one for each core that this process may use.
        progress: called with (kernels done, number of kernels).
    Returns:
        The kernels.
    Raises:
        TypeError: `config` is not the config of a model.
        UsageError: the shape is missing; there are no kernels for the device, dtype or shape; this process runs
            Triton's interpreter, or has planned launches for another GPU.
        Exception: a kernel did not compile; Triton's error.
    """
    shape = {"num_q_heads": num_q_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    shape = {name: value for name, value in shape.items() if value is not None}
    if len(shape) != (3 if config is None else 0):
        raise UsageError(
            f"give a transformers config, or all of num_q_heads, num_kv_heads and head_dim; got {shape or 'neither'}"
        )
    if isinstance(attention, str):
        raise UsageError(f"attention is a collection of options: pass ({attention!r},)")
    options = {*attention}
    windowed: dict[tuple[int, int, int], bool] = {}  # by shape, whether an `FP8Cache` has windows of such layers
    if num_q_heads is not None and num_kv_heads is not None and head_dim is not None:
        windowed[num_q_heads, num_kv_heads, head_dim] = False
    else:
        from .transformers.config import has_sinks, has_softcap, layers_of

        for spec in layers_of(config):
            if spec.rank is not None:
                raise UsageError(
                    f"{config.model_type!r} caches latents, whose kernels are few and compiled at their first launch: "
                    f"warmup compiles those of K and V, so there is nothing to do"
                )
            if spec.in_pages:
                size = spec.num_q_heads, spec.num_kv_heads, spec.head_dim
                windowed[size] = windowed.get(size, False) or spec.is_windowed
        if has_softcap(config):
            options.add("softcap")
        if has_sinks(config):
            options.add("sinks")
    if unknown := sorted(options - {*get_args(AttentionOption)}):
        raise UsageError(f"attention may have {', '.join(get_args(AttentionOption))}; got {', '.join(unknown)}")
    if dtype not in DTYPES.values():
        raise UsageError(
            f"dtype must be the model's, torch.bfloat16 or torch.float16, which the kernels take; got {dtype!r}"
        )
    layers: list[Layer] = []
    for size, has_window in windowed.items():
        for has_means in [True] if static_scales else [False, True] if means else [False]:
            layer = Layer(
                *size, dtype=dtype, backend=backend, key_dtype=key_dtype, rotate_keys=rotate_keys, k_mean=has_means,
                v_mean=has_means, static_scales=static_scales, advance=advance,
                attention=frozenset(options - {"window"}),
            )  # fmt: skip
            layers.append(layer)
            if has_window or "window" in options:
                layers.append(replace(layer, attention=layer.attention | {"window"}))
    return compile_kernels(layers, device, threads=threads, progress=progress)
