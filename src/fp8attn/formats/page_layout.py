"""The page layout, which every writer and every kernel uses: the only place that says where a byte of a page is.

A page holds 128 tokens of one KV head in one run of bytes: K `[128, D]`, V `[8, D, 16]`, then a header with their
scales. A page of latent attention (MLA) holds the codes of 128 latents `[128, rank]`, their keys with RoPE
`[128, rope]` in FP16 or in codes, too, and one scale for each token `[128]` float32.

A page of head_dim 512 is as long as two of 256: 128 bytes before its header are not used. Serving engines give layers
of both (Gemma 4) blocks from one pool, and make these equally large by their tokens, which must fill whole pages.
Pages of latents beside them have unused bytes for that, too (`spec.SPARE`).

V has groups of 16 tokens, and each group is transposed. An FP8 tensor-core operand must be contiguous along the
contracted axis, which is V's tokens. 8 channels of a group are 128 contiguous bytes, the unit that a tensor core reads
(a core matrix). A token that is appended touches `D / 8` of these units. The tokens of a group are in `V_ORDER`, so
that the registers of a softmax accumulator are the operand of P·V without a shuffle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PAGE_SIZE = 128
V_GROUP = 16  # tokens of a group of V

# Bytes of the header, and where its fields begin in it. The rest is zero.
HEADER = 128
K_SCALE = 0  # float32
V_SCALE = 4  # float32
ENGINE_MARK = 8  # int64, which a serving engine may write

# V_ORDER[position] is the token at a position of a group.
V_ORDER = (0, 1, 8, 9, 2, 3, 10, 11, 4, 5, 12, 13, 6, 7, 14, 15)


@dataclass(frozen=True)
class PageLayout:
    """Where the parts of a page of one KV head are: offsets from its first byte, and numbers of bytes.

    `spec.PageSpec.layout` is the layout of a spec. Kernels take it as a compile-time option. It has plain fields, so
    that a kernel's key in Triton's cache covers them.

    Attributes:
        k_offset: K, `[128, k_dim]` codes, up to V. Of latents: their codes `[128, v_dim]`.
        v_offset, v_bytes: V, `[8, v_dim, 16]` codes, the tokens of a group in `V_ORDER`. Of latents: the keys with
            RoPE, `[128, k_dim - v_dim]` FP16 or codes.
        header_offset: the header, `HEADER` bytes. Of latents: the scales, `[128]` float32.
        nbytes: the page.
    """

    k_dim: int
    v_dim: int
    k_offset: int
    v_offset: int
    v_bytes: int
    header_offset: int
    nbytes: int

    @property
    def token_bytes(self) -> int:
        """Bytes of a token: K, V and its share of the header."""
        return self.nbytes // PAGE_SIZE

    @classmethod
    def of(cls, k_dim: int, v_dim: int) -> PageLayout:
        """The layout of pages with a scale of K and one of V, which `spec.PageSpec.layout` has."""
        k_bytes, v_bytes = PAGE_SIZE * k_dim, PAGE_SIZE * v_dim  # one byte for each code
        nbytes = k_bytes + v_bytes + HEADER * max(1, k_dim // 256)
        return cls(k_dim, v_dim, 0, k_bytes, v_bytes, nbytes - HEADER, nbytes)

    @classmethod
    def latent(cls, k_dim: int, v_dim: int, rope_bytes: int, spare: int = 0) -> PageLayout:
        """The layout of pages of latents with `v_dim` channels, and `k_dim - v_dim` channels with RoPE of `rope_bytes`
        each. `spare`: bytes of a token that are not used, at the end of the page.
        """
        code_bytes, rope_bytes = PAGE_SIZE * v_dim, PAGE_SIZE * (k_dim - v_dim) * rope_bytes
        scales = code_bytes + rope_bytes
        return cls(k_dim, v_dim, 0, code_bytes, rope_bytes, scales, scales + (4 + spare) * PAGE_SIZE)


# Views of a pool `[num_pages, num_kv_heads, nbytes]` uint8, whose header is at the end of a page


def k_of(pool: torch.Tensor, page: PageLayout, dtype: torch.dtype) -> torch.Tensor:
    """K `[num_pages, num_kv_heads, 128, k_dim]` of `dtype`, which has one byte."""
    return pool[:, :, page.k_offset : page.v_offset].view(dtype).unflatten(2, (PAGE_SIZE, page.k_dim))


def v_of(pool: torch.Tensor, page: PageLayout, dtype: torch.dtype) -> torch.Tensor:
    """V `[num_pages, num_kv_heads, 8, v_dim, 16]` of `dtype`, which has one byte."""
    v = pool[:, :, page.v_offset : page.v_offset + page.v_bytes].view(dtype)
    return v.unflatten(2, (PAGE_SIZE // V_GROUP, page.v_dim, V_GROUP))


def latent_of(pool: torch.Tensor, page: PageLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a pool of latents: the codes `[num_pages, num_kv_heads, 128, rank]` int8, the keys with RoPE
    `[num_pages, num_kv_heads, 128, rope]` float16 or int8 and the scales `[num_pages, num_kv_heads, 128]` float32.
    """
    codes = pool[:, :, : page.v_offset].view(torch.int8).unflatten(2, (PAGE_SIZE, page.v_dim))
    rope_dim = page.k_dim - page.v_dim
    rope = pool[:, :, page.v_offset : page.header_offset]
    rope = rope.view(torch.int8 if page.v_bytes == PAGE_SIZE * rope_dim > 0 else torch.float16)
    return (
        codes,
        rope.unflatten(2, (PAGE_SIZE, rope_dim)),
        pool[:, :, page.header_offset : page.header_offset + 4 * PAGE_SIZE].view(torch.float32),
    )


def scales_of(pool: torch.Tensor) -> torch.Tensor:
    """The scales of K and V `[num_pages, num_kv_heads, 2]` float32."""
    return _header(pool, torch.float32)[:, :, K_SCALE // 4 : V_SCALE // 4 + 1]


def engine_marks_of(pool: torch.Tensor) -> torch.Tensor:
    """What a serving engine has written `[num_pages, num_kv_heads]` int64; zero if it has not."""
    return _header(pool, torch.int64)[:, :, ENGINE_MARK // 8]


def _header(pool: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return pool[:, :, -HEADER:].view(dtype)


# Tokens to pages, and back


def pack_k(x: torch.Tensor) -> torch.Tensor:
    """Tokens `[P * 128, H, D]` to K pages `[P, H, 128, D]`; any dtype."""
    return x.unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2).contiguous()


def unpack_k(pages: torch.Tensor) -> torch.Tensor:
    """K pages `[P, H, 128, D]` to tokens `[P * 128, H, D]`."""
    return pages.transpose(1, 2).flatten(0, 1)


def pack_v(x: torch.Tensor) -> torch.Tensor:
    """Tokens `[P * 128, H, D]` to V pages `[P, H, 8, D, 16]`, transposed and in `V_ORDER`; any dtype."""
    groups = x.unflatten(0, (-1, PAGE_SIZE // V_GROUP, V_GROUP))
    return groups[:, :, list(V_ORDER)].permute(0, 3, 1, 4, 2).contiguous()


def unpack_v(pages: torch.Tensor) -> torch.Tensor:
    """V pages `[P, H, 8, D, 16]` to tokens `[P * 128, H, D]`."""
    return unpack_k(v_rows(pages))


def v_rows(pages: torch.Tensor) -> torch.Tensor:
    """V pages `[..., 8, D, 16]` with their tokens as K pages have them, `[..., 128, D]`."""
    # `V_ORDER` as axes: position 4a + 2b + c has token 8b + 2a + c. Indices would be real tensors where this is traced
    # with fake ones.
    return pages.unflatten(-1, (4, 2, 2)).transpose(-2, -3).flatten(-3).transpose(-1, -2).flatten(-3, -2)
