"""FP8 attention in diffusers' Wan and Flux transformers, by block and by step.

    with fp8_transformer(pipe.transformer, AttentionPolicy(skip_first=2, skip_last=2, steps=range(5, 45))) as report:
        pipe(prompt, callback_on_step_end=on_step_end(report))
    print(report)

It is `fp8attn.fp8_attention` with the transformer's blocks as layers: diffusers' attention backends are not touched,
and the default one calls `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ..errors import UsageError
from ..extras import needs
from ..mode import AttentionPolicy, AttentionReport, fp8_attention

with needs("diffusers"):
    from diffusers import FluxTransformer2DModel, WanTransformer3DModel
    from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry

BLOCKS = {  # where the blocks are, in the order in which they run
    WanTransformer3DModel: ("blocks",),
    FluxTransformer2DModel: ("transformer_blocks", "single_transformer_blocks"),
}
CROSS_ATTENTION = {WanTransformer3DModel: "*.attn2"}  # Flux has none: text and image attend jointly
THROUGH_SDPA = {
    AttentionBackendName.NATIVE,
    AttentionBackendName._NATIVE_CUDNN,
    AttentionBackendName._NATIVE_EFFICIENT,
    AttentionBackendName._NATIVE_FLASH,
    AttentionBackendName._NATIVE_MATH,
}


@contextmanager
def fp8_transformer(transformer: torch.nn.Module, policy: AttentionPolicy | None = None) -> Iterator[AttentionReport]:
    """Run the self-attention of a Wan or Flux transformer in FP8 until the `with` block ends; nothing else in the
    pipeline changes. Attention to the prompt, whose keys are few, stays in 16 bits.

    Args:
        transformer: a `WanTransformer3DModel` or `FluxTransformer2DModel`, compiled or not. Wan 2.2's second
            transformer needs its own context.
        policy: `skip_first` and `skip_last` count blocks, Flux's double blocks before the single ones. Default:
            `AttentionPolicy()`.
    Yields:
        The `AttentionReport`; its `step` is called by `on_step_end`.
    Raises:
        UsageError: another model; context parallelism, which exchanges keys between GPUs in 16 bits; an attention
            backend that does not call `scaled_dot_product_attention`.
    """
    policy = AttentionPolicy() if policy is None else policy
    inner = getattr(transformer, "_orig_mod", transformer)  # torch.compile wraps a model
    kind = next((kind for kind in BLOCKS if isinstance(inner, kind)), None)
    if kind is None:
        names = " or ".join(kind.__name__ for kind in BLOCKS)
        raise UsageError(
            f"the transformer must be a {names} (of a pipeline, pipe.transformer); for a {type(inner).__name__}, say "
            "which modules its layers are: fp8attn.fp8_attention(policy, transformer, layers=transformer.blocks)"
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
    if kind in CROSS_ATTENTION:
        policy = replace(policy, skip=(*policy.skip, CROSS_ATTENTION[kind]))
    blocks = [block for name in BLOCKS[kind] for block in getattr(inner, name)]
    with fp8_attention(policy, inner, layers=blocks) as report:
        yield report


def on_step_end(*reports: AttentionReport) -> Callable:
    """A pipeline's `callback_on_step_end`: it sets each report's next step; after the last step that is 0, for the next
    video.
    """

    def callback(pipeline: Any, step: int, timestep: Any, callback_kwargs: dict[str, Any]) -> dict[str, Any]:
        for report in reports:
            report.step((step + 1) % pipeline.num_timesteps)
        return callback_kwargs

    return callback


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
