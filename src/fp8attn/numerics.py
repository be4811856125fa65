"""What is computed of codes, in plain PyTorch: the growth of a page's scale, means on the grid of a dtype, and measures
of error.

`settle` is the definition of what a page holds. The kernels compute the same bits.

A page's scale depends only on its tokens in their order. So the bytes are the same after one append and after many. The
first token sets the scale, with headroom. A later token that does not fit raises it, and the codes of the tokens before
it are rounded again to the larger scale (`settle`).
"""

from __future__ import annotations

import torch

from .formats.codec import Codec, finite_amax


def settle(
    x: torch.Tensor, old: torch.Tensor, scale: torch.Tensor, age: torch.Tensor, codec: Codec, static: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize new tokens at the ends of pages, and round the codes of older tokens again if a scale grows.

    Args:
        x: `[N, P, D]` FP32, the new tokens of N pages (of one head each) at their positions; zeros elsewhere.
        old: `[N, P, D]` FP32, the codes of the older tokens at their positions; unspecified elsewhere.
        scale: `[N]` FP32, the scale of the older tokens, or the static scale.
        age: `[N, P]` int8: 2 at older tokens, 1 at new ones, 0 at positions without a token. New tokens follow the
            older ones.
        codec: K's or V's.
        static: the scales do not grow; larger values saturate.
    Returns:
        The codes `[N, P, D]` of all tokens as FP32 numbers, and the pages' scales `[N]`.
    """
    new = age == 1
    if not static:
        need = torch.where(new, codec.needed_scale(finite_amax(x, -1)), 0.0)
        first = torch.where(new, need, -1.0).gather(1, new.int().argmax(1, keepdim=True))[:, 0]
        scale = torch.where((age == 2).any(1) | ~new.any(1), scale, codec.with_headroom(first))
    inverse = 1.0 / scale
    codes = torch.where(new[..., None], codec.encode(x, inverse[:, None, None]), old)
    while not static:
        over = new & (need > scale[:, None])
        grows = over.any(1)
        if not grows.any():
            break
        index = over.int().argmax(1, keepdim=True)  # the first token that does not fit
        grown = torch.where(grows, codec.with_headroom(need.gather(1, index)[:, 0]), scale)
        inverse = 1.0 / grown
        before = torch.arange(age.shape[1], device=x.device) < index
        shifted, rounded = (
            codec.encode(y, factor[:, None, None]) for y, factor in ((codes, scale * inverse), (x, inverse))
        )
        again = torch.where(before[..., None], shifted, rounded)
        codes = torch.where((grows[:, None] & (before | new))[..., None], again, codes)
        scale = grown
    return codes, scale


def relative_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """`||out - ref|| / ||ref||` over all elements, in float64."""
    out, ref = out.double(), ref.double()
    return float((out - ref).norm() / ref.norm())


def sqnr_db(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Signal to quantization-noise ratio in dB: `20 log10(||ref|| / ||out - ref||)`."""
    out, ref = out.double(), ref.double()
    return float(20 * torch.log10(ref.norm() / (out - ref).norm()))
