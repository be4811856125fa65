"""RoPE on dense tensors `[B, H, S, D]`."""

from __future__ import annotations

import torch

from .._torch_ops import resolve
from ..checks import check_dense
from ..formats.rope import dense_rope, rope_of
from ..ops import run_rope
from ..params import BackendName


def apply_rope(
    x: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, *, rope_interleaved: bool = False, backend: BackendName = "auto"
) -> torch.Tensor:
    """Apply RoPE to a dense tensor (`rope.apply_rope` has the equation).

    Args:
        x: `[B, H, S, D]` bfloat16 or float16. The last dimension is contiguous.
        rope_cos, rope_sin, rope_interleaved: as `fp8attn.from_dense` takes them.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.
    Returns:
        `[B, H, S, D]` in the dtype and memory order of `x`.
    Raises:
        ValueError: a shape, dtype or backend does not fit; the message says what would.
        RuntimeError: an input requires a gradient.
    """
    check_dense(x, "x")
    rope = rope_of(rope_cos, rope_sin, rope_interleaved)
    if rope is None:
        raise ValueError("give rope_cos and rope_sin")
    return run_rope(resolve(backend, x), x, dense_rope(x, rope))
