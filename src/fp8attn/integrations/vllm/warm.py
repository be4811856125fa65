"""Compiles and loads the kernels of a model before the first request, so that no request waits for a compiler."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ...precompile import Kernel
from ..warmup import AttentionOption, warmup

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
    import triton  # vLLM's build for CPUs may lack it

    begun = time.perf_counter()
    given = dict(
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype, key_dtype=key_dtype, means=means,
        static_scales=static_scales, overflows=overflows, attention=sorted(attention), advance=False,
    )  # fmt: skip
    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    load = partial(warmup, **given, device=device, load_kernels=True)
    kernels = _first(folder, (given, metadata.version("fp8attn"), triton.__version__), load) or load()
    logger.info("fp8attn: %d kernels ready in %.1f s", len(kernels), time.perf_counter() - begun)


def _first(folder: Path, given: Any, compile: Callable[[], list[Kernel]]) -> list[Kernel] | None:
    """What `compile` returns in the first of a machine's processes that need the same kernels. The others wait for it, and get None: they
    find the kernels in Triton's cache, and load them side by side. Where a mark is out of date, several processes compile the same."""
    mark = folder / f"fp8attn-{hashlib.sha256(repr(given).encode()).hexdigest()[:16]}.compiled"
    if mark.exists():
        return None
    with FileLock(folder / "fp8attn.lock"):
        if mark.exists():
            return None
        kernels = compile()
        mark.touch()
        return kernels
