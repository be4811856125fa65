"""How latents (MLA) are stored: INT8 after the rotation, with one scale for each token. In plain PyTorch.

    y = rotate((x - mean) / factor)        scale = max |y| / 127        code = round(y / scale)

The bytes of a token depend on that token alone. `mean` and `factor` are static, the factor one number for each block of
128 channels. All three steps are linear, so attention over latents is attention over `code * scale`:

    q . x = q . mean + rotate(q * factor) . y        sum p x = mean + factor * rotate_back(sum p y)        if sum p = 1

The key with RoPE beside a latent is in FP16, whose largest number it saturates at. Or it is rotated, too, and in codes
of the same scale (`PageSpec.rope_in_codes`).
"""

from __future__ import annotations

from functools import lru_cache

import torch

from .rotation import MAX_BLOCK, rotate, rotate_back

BLOCK = MAX_BLOCK  # channels of a factor, and of the rotation
MOST_CODE = 127.0
MOST_ROPE = torch.finfo(torch.float16).max  # 65,504


def quantize(
    x: torch.Tensor,
    mean: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
    rope: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes and the scale of each token. In FP32 this defines the bits that kernels store.

    Args:
        x: `[..., rank]` float32.
        mean: `[..., rank]` float32, broadcastable; None: zero.
        factor: `[..., rank / 128]` float32, broadcastable; None: one.
        rope: `[..., rope]` float32, the key with RoPE if it is in codes.
    Returns:
        codes `[..., rank]` or `[..., rank + rope]` int8, and scales `[...]` float32. The scale is zero where all
        channels are, and NaN where a channel is NaN or infinite. Both have codes of zero.
    """
    x = x if mean is None else x - mean
    y = rotate(x if factor is None else x / channels(factor))
    y = y if rope is None else torch.cat([y, rotate(rope)], -1)
    amax = y.abs().amax(-1)  # NaN if a channel is
    scale = torch.where(amax < torch.inf, amax * (1 / MOST_CODE), torch.nan)
    ratio = y / scale.unsqueeze(-1)  # Scales below FP32's normal numbers are coarse, so a ratio may be above 127.
    codes = torch.where(scale.unsqueeze(-1) > 0, ratio.clamp(-MOST_CODE, MOST_CODE).round(), 0.0)
    return codes.to(torch.int8), scale


def restore(y: torch.Tensor, mean: torch.Tensor | None, factor: torch.Tensor | None) -> torch.Tensor:
    """`mean + factor * rotate_back(y)` of `y [..., rank]`, the codes times their scales, in y's dtype."""
    x = rotate_back(y)
    x = x if factor is None else x * channels(factor).to(x.dtype)
    return x if mean is None else x + mean.to(x.dtype)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, out: torch.Tensor) -> None:
    """`restore(codes * scale)` without mean and factor, in a few launches: the rotation is a product with a matrix.

    Args:
        codes: `[T, rank]` int8.
        scale: `[T]` float32.
        out: `[T, rank]`, in 16 bits of any strides.
    """
    x = (codes.half().unflatten(1, (-1, BLOCK)) @ _back(codes.device)).flatten(1)
    torch.mul(x, scale[:, None] * BLOCK**-0.5, out=out)


@lru_cache
def _back(device: torch.device) -> torch.Tensor:
    """`[128, 128]` float16 of 1 and -1: a block's codes times this are `rotate_back` of them, but for its factor. Sums
    above 2048 are rounded, by less than BF16 rounds.
    """
    return (rotate_back(torch.eye(BLOCK, device=device)) * BLOCK**0.5).round().half()


def absorb(q: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    """The query `rotate(q * factor)`, whose product with `y` is that of `q [..., rank]` with the latent less its
    mean.
    """
    return rotate(q if factor is None else q * channels(factor).to(q.dtype))


def to_rope(x: torch.Tensor) -> torch.Tensor:
    """Keys with RoPE in FP16, saturated. NaN stays NaN."""
    return x.float().clamp(-MOST_ROPE, MOST_ROPE).half()  # BF16 has no 65,504


def channels(factor: torch.Tensor) -> torch.Tensor:
    """The factor of each channel `[..., rank]`, from those of blocks `[..., rank / 128]`."""
    return factor.repeat_interleave(BLOCK, -1)
