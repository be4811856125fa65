"""Compiles and loads the kernels of a model before the first request, so that no request waits for a compiler."""

from __future__ import annotations

import logging
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ...precompile import AttentionOption, warmup

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the messages of its own loggers only


def warm_up(vllm_config: Any, layer_names: list[str], device: torch.device) -> None:
    """Compile the kernels of these layers, for all that they have in common."""
    impls = {vllm_config.compilation_config.static_forward_context[name].impl for name in layer_names}
    means = any(impl.has_means for impl in impls)
    for impl in impls:
        _compile(
            impl.num_heads, impl.num_kv_heads, impl.head_size, vllm_config.model_config.dtype, device, impl.options.key_dtype,
            means, impl.has_static_scales, impl.options.count_overflows, _of_attention(impl),
        )  # fmt: skip


def _of_attention(impl: Any) -> frozenset[AttentionOption]:
    has: dict[AttentionOption, bool] = {
        "window": impl.window is not None, "softcap": impl.softcap is not None, "sinks": impl.sinks is not None,
        "exact": impl.options.exact,
    }  # fmt: skip
    return frozenset(name for name, given in has.items() if given)


@cache
def _compile(
    num_q_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, key_dtype: Any, means: bool,
    static_scales: bool, overflows: bool, attention: frozenset[AttentionOption],
) -> None:  # fmt: skip
    from triton import knobs

    begun = time.perf_counter()
    folder = Path(knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "fp8attn.lock"):  # processes of one machine compile the same kernels: the first compiles, the others find them
        kernels = warmup(
            num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, device=device, key_dtype=key_dtype,
            means=means, static_scales=static_scales, overflows=overflows, attention=attention, advance=False, load_kernels=True,
        )  # fmt: skip
    logger.info("fp8attn: %d kernels ready in %.1f s", len(kernels), time.perf_counter() - begun)
