"""FP8 attention in the models of diffusers (Wan, Flux, SD3, Qwen-Image and others), by block and by step.

    with fp8_transformer(pipe.transformer, AttentionPolicy(skip_first=2, skip_last=2, steps=range(5, 45))) as report:
        pipe(prompt, callback_on_step_end=on_step_end(report))
    print(report)

It is `fp8attn.fp8_attention` with the model's blocks as layers: diffusers' attention backends are not touched,
and the default one calls `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import UsageError
from ..extras import needs
from ..mode import AttentionPolicy, AttentionReport, fp8_attention

with needs("diffusers"):
    from diffusers import ModelMixin
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

THROUGH_SDPA = {
    AttentionBackendName.NATIVE,
    AttentionBackendName._NATIVE_CUDNN,
    AttentionBackendName._NATIVE_EFFICIENT,
    AttentionBackendName._NATIVE_FLASH,
    AttentionBackendName._NATIVE_MATH,
}


@contextmanager
def fp8_transformer(transformer: torch.nn.Module, policy: AttentionPolicy | None = None) -> Iterator[AttentionReport]:
    """Run the attention of a diffusers model in FP8 until the `with` block ends; nothing else in the pipeline changes.
    Calls of few queries or keys, such as attention to a prompt, stay in 16 bits (`AttentionPolicy.min_length`).

    Args:
        transformer: a model of diffusers, compiled or not: `pipe.transformer` of a pipeline. If there is a
            `pipe.transformer_2` (Wan 2.2), it needs its own context, inside this one.
        policy: `skip_first` and `skip_last` count the blocks that have attention, in the order in which the model
            defines them: Flux's double blocks before the single ones, VACE's blocks after Wan's. Default:
            `AttentionPolicy()`.
    Yields:
        The `AttentionReport`; its `step` is called by `on_step_end`.
    Raises:
        UsageError: no model of diffusers; context parallelism, which exchanges keys between GPUs in 16 bits; an
            attention backend that does not call `scaled_dot_product_attention`.
    """
    inner = getattr(transformer, "_orig_mod", transformer)  # torch.compile wraps a model
    if not isinstance(inner, ModelMixin):
        raise UsageError(
            f"the transformer must be a model of diffusers (of a pipeline, pipe.transformer); got "
            f"{type(inner).__name__}. For another module, call fp8attn.fp8_attention(policy, module)"
        )
    if getattr(inner._parallel_config, "context_parallel_config", None) is not None:
        raise UsageError(
            "FP8 attention does not run context-parallel: leave out enable_parallelism, or use data or tensor "
            "parallelism"
        )
    if (backend := _foreign_backend(inner)) is not None:
        raise UsageError(
            f"the attention backend {backend.value!r} does not call scaled_dot_product_attention: "
            "call transformer.set_attention_backend('native') first"
        )
    with fp8_attention(policy, inner, layers=_blocks(inner)) as report:
        yield report


def on_step_end(*reports: AttentionReport) -> Callable:
    """A pipeline's `callback_on_step_end`: it sets each report's next step; after the last step that is 0, for the next
    video. Where a pipeline takes no such callback (modular pipelines), leave `AttentionPolicy.steps` out.

    Raises:
        TypeError: something else than reports is passed.
    """
    if not reports or not all(isinstance(report, AttentionReport) for report in reports):
        raise TypeError(
            "on_step_end takes the reports that fp8_transformer yields: callback_on_step_end=on_step_end(report); got "
            f"{', '.join(type(report).__name__ for report in reports) or 'none'}"
        )

    def callback(pipeline: Any, step: int, timestep: Any, callback_kwargs: dict[str, Any]) -> dict[str, Any]:
        for report in reports:
            report.step((step + 1) % pipeline.num_timesteps)
        return callback_kwargs

    return callback


def _blocks(transformer: torch.nn.Module) -> list[torch.nn.Module]:
    """The contents of the transformer's own `ModuleList`s that have attention: not its projections, and not the blocks
    of a text refiner inside it.
    """
    lists = (child for child in transformer.children() if isinstance(child, torch.nn.ModuleList))
    return [block for blocks in lists for block in blocks if any(hasattr(m, "processor") for m in block.modules())]


def _foreign_backend(transformer: torch.nn.Module) -> AttentionBackendName | None:
    """An attention backend in use that calls something else."""
    # Only read: set_attention_backend sets it for the whole process.
    default, _ = _AttentionBackendRegistry.get_active_backend()
    for module in transformer.modules():
        processor: Any = getattr(module, "processor", None)
        if hasattr(processor, "_attention_backend"):
            backend = AttentionBackendName(processor._attention_backend or default)
            if backend not in THROUGH_SDPA:
                return backend
    return None
