"""Pages with a scale for every token, in plain PyTorch: where their bytes are, how tokens are rounded, and what the copy to today's form
writes. The kernels compute the same bits.

    rotate(k) ~ k_8bit * k_scale[token]        v ~ v_8bit * v_scale[token]

A page is K `[128, head_dim]` INT8, V `[8, head_dim, 16]` INT8 in `V_ORDER`, 128 scales of K and 128 of V in BF16, and the header. The
scales of 32 tokens are in the order in which decode's threads have them: token `t` is at position `4 * (t % 8) + t // 8`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8attn.formats.codec import E4M3, MAX_SCALE, MIN_SCALE
from fp8attn.formats.page_layout import HEADER, PAGE_SIZE, V_GROUP, pack_k, pack_v, unpack_k, unpack_v
from fp8attn.formats.rotation import rotate, rotate_back

SCALES = 2 * PAGE_SIZE  # of a page, K's first


@dataclass(frozen=True)
class TokenPages:
    """A cache.

    Attributes:
        pool: `[num_pages, num_kv_heads, nbytes]` uint8.
        page_table: `[num_seqs, columns]` int32.
        lengths: `[num_seqs]` int32, the tokens that sequences hold.
    """

    pool: torch.Tensor
    page_table: torch.Tensor
    lengths: torch.Tensor
    head_dim: int

    @property
    def k(self) -> torch.Tensor:
        return self.pool[:, :, : PAGE_SIZE * self.head_dim].view(torch.int8).unflatten(2, (PAGE_SIZE, self.head_dim))

    @property
    def v(self) -> torch.Tensor:
        codes = self.pool[:, :, PAGE_SIZE * self.head_dim : 2 * PAGE_SIZE * self.head_dim].view(torch.int8)
        return codes.unflatten(2, (PAGE_SIZE // V_GROUP, self.head_dim, V_GROUP))

    @property
    def scales(self) -> torch.Tensor:
        """`[num_pages, num_kv_heads, 2, 128]` BF16, in the order of positions."""
        first = 2 * PAGE_SIZE * self.head_dim
        return self.pool[:, :, first : first + 2 * SCALES].view(torch.bfloat16).unflatten(2, (2, PAGE_SIZE))

    def read(self, seq: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K, rotated back, and V of a sequence in float64, `[length, num_kv_heads, head_dim]`."""
        length = int(self.lengths[seq])
        pages = self.page_table[seq, : -(-length // PAGE_SIZE)].long()
        k_scale, v_scale = by_token(self.scales[pages].double()).unbind(2)
        k = unpack_k(self.k[pages].double() * k_scale[..., None])
        v = unpack_v(self.v[pages]).double() * unpack_k(v_scale[..., None])
        return rotate_back(k)[:length], v[:length]


def nbytes(head_dim: int) -> int:
    return 2 * PAGE_SIZE * head_dim + 2 * SCALES + HEADER


def by_token(scales: torch.Tensor) -> torch.Tensor:
    """Scales `[..., 128]` in the order of tokens, from the order of positions."""
    return scales.unflatten(-1, (-1, 8, 4)).transpose(-1, -2).flatten(-3)


def by_position(scales: torch.Tensor) -> torch.Tensor:
    """The inverse of `by_token`."""
    return scales.unflatten(-1, (-1, 4, 8)).transpose(-1, -2).flatten(-3)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes `[..., head_dim]` in FP32 and BF16 scales `[...]` of tokens in FP32.

    The scale is rounded up to BF16 before the codes are computed with it, so nothing saturates.
    """
    scale = (x.abs().amax(-1) * torch.tensor(1 / 127, dtype=torch.float32)).clamp(MIN_SCALE, MAX_SCALE)
    scale = ((scale.view(torch.int32) + 0xFFFF) & -0x10000).view(torch.float32)
    codes = (x * (1.0 / scale)[..., None]).round().clamp(-127, 127)
    return codes, scale.bfloat16()


def store(k: torch.Tensor, v: torch.Tensor, lengths: list[int], spare: int = 3) -> TokenPages:
    """Pages in random order that hold `k` and `v [tokens, num_kv_heads, head_dim]`, the tokens of all sequences.

    Bytes that no kernel may read are poison: NaN in the scales of other pages and of K behind a sequence's end, the largest codes. V's
    scales behind the end are zero, as a cache hands out pages.
    """
    heads, head_dim = k.shape[1:]
    counts = [-(-n // PAGE_SIZE) for n in lengths]
    total, device = sum(counts), k.device
    pool = torch.full((total + spare, heads, nbytes(head_dim)), 0x7F, dtype=torch.uint8, device=device)
    order = torch.randperm(len(pool), device=device)
    table = torch.full((len(lengths), max(*counts, 1) + 1), int(order[-1]), dtype=torch.int32, device=device)
    pages = TokenPages(pool, table, torch.tensor(lengths, dtype=torch.int32, device=device), head_dim)
    pages.scales.fill_(torch.nan)
    first = page = 0
    for seq, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        held = order[page : page + count]
        table[seq, :count] = held
        pad = torch.zeros(count * PAGE_SIZE - length, heads, head_dim, device=device)
        k_codes, k_scale = rounded(rotate(torch.cat([k[first : first + length].float(), pad])))
        v_codes, v_scale = rounded(torch.cat([v[first : first + length].float(), pad]))
        k_codes[length:], v_codes[length:] = 127, 127
        k_scale[length:], v_scale[length:] = torch.nan, 0.0
        pages.k[held] = pack_k(k_codes).to(torch.int8)
        pages.v[held] = pack_v(v_codes).to(torch.int8)
        scales = torch.stack([pack_k(scale[..., None]).squeeze(-1) for scale in (k_scale, v_scale)], 2)
        pages.scales[held] = by_position(scales)
        first, page = first + length, page + count
    return pages


def copied(pages: TokenPages, seq: int, column: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the copy writes for one page: K's codes, V's in E4M3, and their scales `[num_kv_heads, 2]` in FP32.

    The scales are a page's largest token scale of K, and for V the power of two with which 127 times the largest has a code. Ratios of
    token scales to them are rounded to FP16, and so are products of V.
    """
    page = int(pages.page_table[seq, column])
    inside = torch.arange(PAGE_SIZE, device=pages.pool.device) + column * PAGE_SIZE < pages.lengths[seq]
    k_scale, v_scale = torch.where(inside, by_token(pages.scales[page].float()), 0.0).unbind(1)  # [heads, 128]
    k_page = k_scale.amax(1)
    v_page = E4M3.needed_scale(127 * v_scale.amax(1))
    k_ratio, v_ratio = ((scale / unit[:, None]).half() for scale, unit in ((k_scale, k_page), (v_scale, v_page)))
    k = (pages.k[page].double() * k_ratio.double()[..., None]).round().to(torch.int8)
    v_ratio = pack_v(v_ratio.T[..., None])[0]  # [heads, 8, 1, 16]
    v = (pages.v[page].half() * v_ratio).float().to(E4M3.dtype)
    return k, v, torch.stack([k_page, v_page], 1)
