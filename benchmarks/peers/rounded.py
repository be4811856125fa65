"""Q, K and V in 8 bits, with scales at the grain that a peer takes. Its error is measured against `bits * scale`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8attn.formats.codec import E4M3, FP8


@dataclass(frozen=True)
class Rounded:
    """Rows in 8 bits.

    Attributes:
        bits: `[tokens, heads, head_dim]` float8_e4m3fn or int8.
        scale: float32, broadcast over `bits`.
    """

    bits: torch.Tensor
    scale: torch.Tensor

    def __getitem__(self, tokens: slice | torch.Tensor) -> torch.Tensor:
        """The dequantized values of some tokens, float32."""
        return self.bits[tokens].float() * (self.scale if len(self.scale) == 1 else self.scale[tokens])


def by_heads(x: torch.Tensor, groups: int) -> tuple[Rounded, torch.Tensor]:
    """E4M3 with one scale for each of `groups` runs of heads, and these scales, `[groups]`.

    Args:
        x: `[tokens, heads, head_dim]`.
    """
    scale = x.unflatten(1, (groups, -1)).abs().amax((0, 2, 3)).float() / E4M3.max
    return _rounded(x, scale.repeat_interleave(x.shape[1] // groups)[None, :, None]), scale


def by_token(x: torch.Tensor) -> Rounded:
    """E4M3 with one scale for each token and head."""
    return _rounded(x, x.abs().amax(-1, keepdim=True).float() / E4M3.max)


def _rounded(x: torch.Tensor, scale: torch.Tensor) -> Rounded:
    scale = scale.clamp(min=1e-12)  # of zeros
    return Rounded((x.float() / scale).to(FP8), scale)
