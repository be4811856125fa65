"""Settles the scale of a page from many tokens at once (`numerics.settle`), which a program has as two tiles `[64, C]`.

The first token sets the scale. A later token that does not fit makes it grow, and the tokens before it are rounded
again: new tokens in registers (`round_again`), older tokens of the page in memory (`rescale`). The rows' largest
magnitudes determine which token is next. Every warp has all 128 magnitudes, four in each lane (`_lanes`), so the search
needs no barrier.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...formats.page_layout import HEADER
from ..codec import clamp, finite, inverse, magnitude, needed_scale, with_headroom
from ..common import PAGE, V_SCALE_WORD, header_of
from .slot import codes_ptr_of, rescale, round_again, scale_ptr_of, store_scale, word_token

_HEADER_WORDS = tl.constexpr(HEADER // 4)
_LARGE = tl.constexpr(2.0**38)  # values below it do not saturate with a scale that was settled for them


@triton.jit
def _token(tile: tl.constexpr, row, IS_V: tl.constexpr):
    """The token of its page that a row of tile 0 or 1 is."""
    if IS_V:
        return word_token(row // 2) + row % 2 + 8 * tile
    else:
        return row + PAGE // 2 * tile


@triton.jit
def bits_of(x):
    """FP32 as int32. Numbers that are not negative keep their order, and NaN is the largest."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """int32 as FP32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _lanes(x0, x1):
    """The halves of two `[64]`, as four `[32]`. Every warp has all of them, and reductions need no barrier."""
    x = tl.permute(tl.reshape(tl.join(x0, x1), (2, PAGE // 4, 2)), (1, 2, 0))
    first, second = tl.split(x)
    a, c = tl.split(first)
    b, d = tl.split(second)
    return a, b, c, d


@triton.jit
def _lane_tokens(IS_V: tl.constexpr):
    """The tokens of what `_lanes` returns."""
    lane = tl.arange(0, PAGE // 4)
    other = lane + PAGE // 4
    return _token(0, lane, IS_V), _token(0, other, IS_V), _token(1, lane, IS_V), _token(1, other, IS_V)


@triton.jit
def _largest(lanes):
    """The maximum of all elements, which are integers."""
    a, b, c, d = lanes
    return tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))


@triton.jit
def _at(lanes, token, IS_V: tl.constexpr):
    """The element of `token`. All elements are integers that are not negative."""
    a, b, c, d = lanes
    t, u, v, w = _lane_tokens(IS_V)
    return _largest(
        (tl.where(t == token, a, 0), tl.where(u == token, b, 0), tl.where(v == token, c, 0), tl.where(w == token, d, 0))
    )


@triton.jit
def _needs(amax, CODEC: tl.constexpr):
    """The scales that tokens need."""
    a, b, c, d = amax
    a, b = needed_scale(float_of(a), CODEC), needed_scale(float_of(b), CODEC)
    return a, b, needed_scale(float_of(c), CODEC), needed_scale(float_of(d), CODEC)


@triton.jit
def _if_over(need, token, scale, old):
    return tl.where((need > scale) & (token >= old), token, PAGE)


@triton.jit
def _first_token_over(needs, scale, old, IS_V: tl.constexpr):
    """The first new token that needs more than `scale`. (Rows past the end are copies of the last token's.)"""
    a, b, c, d = needs
    t, u, v, w = _lane_tokens(IS_V)
    first = tl.minimum(_if_over(a, t, scale, old), _if_over(b, u, scale, old))
    return tl.min(tl.minimum(first, tl.minimum(_if_over(c, v, scale, old), _if_over(d, w, scale, old))))


@triton.jit
def _factor(token, fresh, ratio, inverse_scale):
    """The factors of the rows of tokens `[N]` before they are rounded. Tokens before `fresh` are codes."""
    return tl.where(token < fresh, ratio, inverse_scale)[:, None]


@triton.jit
def _finite_rows(x0, x1):
    """The bits of the largest finite magnitude of each row of two tiles."""
    return _lanes(bits_of(tl.max(finite(x0), 1)), bits_of(tl.max(finite(x1), 1)))


@triton.jit
def _no_maxima():
    zero = tl.zeros((PAGE // 4,), tl.int32)
    return zero, zero, zero, zero


@triton.jit
def _grow(x0, x1, amax, most, scale, codes_ptr, old, part, CODES: tl.constexpr, CLAMP: tl.constexpr):
    """Round tokens again until one scale fits all.

    Args:
        scale: the scale of the page.
        amax: the magnitudes of the new tokens (`_lanes` of bits). For V in one part, they are computed here.
        most: the scale that the new tokens need.
        part: the part of the channels. With the first one, codes in the page are rounded again, of all channels.
    Returns:
        The values to round of each tile, and the scale that fits all. Codes in the page have been rounded again to it.
    """
    IS_V: tl.constexpr = CODES.is_v
    CODEC: tl.constexpr = CODES.codec
    t0 = _token(0, tl.arange(0, PAGE // 2), IS_V)
    t1 = _token(1, tl.arange(0, PAGE // 2), IS_V)
    if IS_V and CODES.parts == 1:
        amax = _no_maxima()
        if most > scale:  # few pages of V
            amax = _finite_rows(x0, x1)
    needs = _needs(amax, CODEC)
    fresh = old  # tokens before it are codes, to be multiplied by `ratio`
    ratio = 1.0
    while most > scale:
        index = _first_token_over(needs, scale, old, IS_V)
        grown = with_headroom(needed_scale(float_of(_at(amax, index, IS_V)), CODEC), CODEC)
        if CODES.dense or old < index:
            factor = inverse(scale, CODEC)
            x0 = round_again(x0, (t0 < index)[:, None], _factor(t0, fresh, ratio, factor), CODES, CLAMP)
            if IS_V or index > PAGE // 2:  # of K, often not
                x1 = round_again(x1, (t1 < index)[:, None], _factor(t1, fresh, ratio, factor), CODES, CLAMP)
        ratio = scale * inverse(grown, CODEC)
        if not CODES.dense and part == 0 and old > 0:
            rescale(codes_ptr, ratio, old, CODES)
        fresh = index
        scale = grown
    factor = inverse(scale, CODEC)
    x0 *= _factor(t0, fresh, ratio, factor)
    x1 *= _factor(t1, fresh, ratio, factor)
    if CLAMP:
        return clamp(x0, CODEC), clamp(x1, CODEC), scale
    else:
        return x0, x1, scale


# The maxima of a page in several parts of its channels, which are loaded one after another, and then again.


@triton.jit
def no_maxima():
    """What `with_maxima` adds to."""
    return _no_maxima(), tl.full((), 0, tl.int32)


@triton.jit
def with_maxima(maxima, x0, x1):
    """The finite magnitudes of the new tokens (`_lanes` of bits), and whether there is a NaN, with another part of
    them.
    """
    amax, nan = maxima  # Triton 3.6 has no targets within targets
    a, b, c, d = amax
    e, f, g, h = _finite_rows(x0, x1)
    nan = tl.maximum(nan, tl.max(((x0 != x0) | (x1 != x1)).to(tl.int32)))
    return (tl.maximum(a, e), tl.maximum(b, f), tl.maximum(c, g), tl.maximum(d, h)), nan


@triton.jit
def settle_page(x0, x1, part, first, maxima, slot_ptr, old, CODES: tl.constexpr):
    """Settle the scale of a page from its tokens from `old` on, and write it with the last part.

    Args:
        part: the part of the channels.
        first: the largest finite magnitude of V's first token; K's is computed here.
        maxima: of all parts. None: there is one part, whose maxima are computed here.
    Returns:
        The values to round of each tile (`codec.clamp`).
    """
    IS_V: tl.constexpr = CODES.is_v
    CODEC: tl.constexpr = CODES.codec
    DENSE: tl.constexpr = CODES.dense
    scale_ptr = scale_ptr_of(slot_ptr, CODES)
    if CODES.static:
        return _with_static_scale(x0, x1, scale_ptr, slot_ptr, CODES)
    else:
        codes_ptr = codes_ptr_of(slot_ptr, CODES)
        if maxima is not None:
            amax, nan = maxima
            worst = float_of(_largest(amax))
            broken = nan > 0
        else:
            if IS_V:
                amax = first, first, first, first  # rows' maxima are needed only if the scale grows
                worst = tl.max(tl.maximum(tl.abs(x0), tl.abs(x1)))
            else:
                amax = _lanes(bits_of(magnitude(x0, CODES.native)), bits_of(magnitude(x1, CODES.native)))
                worst = float_of(_largest(amax))
            broken = worst != worst
        scale = 0.0
        if not DENSE and old > 0:
            scale = tl.load(scale_ptr)
        if maxima is not None:
            tl.debug_barrier()  # every thread has the scale before the last part writes it
            large = True  # or not: the codes are the same
        else:
            large = (not (worst < _LARGE)) | (scale != scale)
            if large:
                if IS_V:
                    worst = tl.max(tl.maximum(finite(x0), finite(x1)))
                else:
                    amax = _finite_rows(x0, x1)
                    worst = float_of(_largest(amax))
        if not IS_V or maxima is not None:
            first = float_of(_at(amax, old, IS_V))
        if DENSE or old == 0:
            scale = with_headroom(needed_scale(first, CODEC), CODEC)
        most = needed_scale(worst, CODEC)
        # Two paths: few pages have values that saturate, and saturation would add a sixth to the instructions.
        if CODEC.is_integer and large:
            x0, x1, scale = _grow(x0, x1, amax, most, scale, codes_ptr, old, part, CODES, True)
        else:
            x0, x1, scale = _grow(x0, x1, amax, most, scale, codes_ptr, old, part, CODES, False)
        if part == CODES.parts - 1:
            _store_header(scale_ptr, slot_ptr, scale, broken, CODES)
        return x0, x1


@triton.jit
def _with_static_scale(x0, x1, scale_ptr, slot_ptr, CODES: tl.constexpr):
    """The values to round of each tile with the calibrated scale of a page. In dense pages, whose values are E4M3
    already, it is one, and written here.
    """
    CODEC: tl.constexpr = CODES.codec
    if CODES.dense:
        _store_header(scale_ptr, slot_ptr, 1.0, False, CODES)
        return x0, x1
    else:
        factor = inverse(tl.load(scale_ptr), CODEC)
        x0 *= factor
        x1 *= factor
        return clamp(x0, CODEC), clamp(x1, CODEC)


@triton.jit
def _store_header(scale_ptr, slot_ptr, scale, broken, CODES: tl.constexpr):
    """Write the settled scale of a page, and in dense pages the rest of the header, which is zero."""
    LAYOUT: tl.constexpr = CODES.layout
    store_scale(scale_ptr, scale, broken, CODES)
    if CODES.dense and not CODES.is_v:
        i = tl.arange(0, _HEADER_WORDS)
        tl.store(header_of(slot_ptr, LAYOUT) + i, tl.zeros(i.shape, tl.float32), mask=i > V_SCALE_WORD)
