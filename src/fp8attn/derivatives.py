"""Refuses gradients, tangents and transforms of torch.func: FP8 ops have no derivatives and no batching rules."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad


def derivative_reason(*tensors: torch.Tensor) -> str | None:
    """Why FP8 ops cannot take these tensors, or None. FP8 ops have no derivatives and no batching rules."""
    if torch.is_grad_enabled():
        for x in tensors:  # `any` costs a microsecond more
            if x.requires_grad:
                return (
                    "an input requires a gradient, and FP8 ops have none; use torch.no_grad() or torch.inference_mode()"
                )
    # The same check as in torch.autograd.Function. There is no public function for it.
    if torch._C._are_functorch_transforms_active():
        return (
            "a transform of torch.func is active (vmap, grad, jvp, ...), and FP8 ops have no rule for it; call them "
            "outside of it"
        )
    # Dynamo guards on the level, but its tensors have no tangents. A function compiled inside a level may be called
    # with tangents.
    if forward_ad._current_level >= 0 and (
        torch.compiler.is_compiling() or any(forward_ad.unpack_dual(x).tangent is not None for x in tensors)
    ):
        return "an input has a forward-mode tangent, and FP8 ops have no derivative; leave out the tangents"
    return None


def check_derivatives(*tensors: torch.Tensor) -> None:
    """Raise RuntimeError if an input requires a gradient or has a tangent, or a transform of torch.func is active."""
    reason = derivative_reason(*tensors)
    if reason is not None:
        raise RuntimeError(f"FP8 pages are for inference: {reason}")
