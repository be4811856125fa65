"""The host's side: pages with tokens' scales, the launch, and the change of the PTX to unsigned weights and values."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import NamedTuple
from unittest import mock

import torch

from fp8attn import KVPages
from fp8attn.formats.page_layout import PAGE_SIZE, V_ORDER, pack_k, pack_v
from fp8attn.formats.rotation import rotate, rotate_back
from fp8attn.kernels import operands
from fp8attn.kernels.combine import combine
from fp8attn.kernels.common import LOG2E
from fp8attn.kernels.launch import Tiles, launch, make_constants
from fp8attn.kernels.pages import tiles as page_tiles
from fp8attn.kernels.prefill import cut, plan
from fp8attn.kernels.view import View

from .options import LabOptions

D = 128
GROUP = 32
MAGIC = 12582912.0
BIAS = 255.0 * 255.0 * 32.0
WIDE = 256  # bytes of a line of numbers of columns


class Variant(NamedTuple):
    k_form: str
    v_form: str
    synchronous: bool = False  # sums of integers by `mma.sync`
    warpgroups: int = 3
    cubics: int = 0  # of 16 exponentials
    loaded: bool = False  # K's second number of a token, which could be computed from the first
    converted: int = 0  # 1: K is stored with tokens' scales, and brought to the page's in shared memory; 2: V, too

    @property
    def lines(self) -> int:
        """Lines of K's numbers; V's come after them."""
        if self.converted:
            return 1
        return {"page": 0, "group": 1}.get(self.k_form, 4 if self.loaded else 1)


VARIANTS = {
    "A token, token, mma": Variant("fma", "token", True, loaded=True),
    "A token (biased), token, mma": Variant("bias", "token", True),
    "A token (biased), token, mma, two": Variant("bias", "token", True, 2),
    "B page, token, mma": Variant("page", "token", True),
    "B page, token, mma, two": Variant("page", "token", True, 2),
    "C 32 tokens, token, mma": Variant("group", "token", True),
    "D page, page, mma": Variant("page", "page", True),
    "D page, page, two": Variant("page", "page", False, 2),
    "E token, page, mma": Variant("fma", "page", True),
    "E token, page, two": Variant("fma", "page", False, 2),
    "E token (biased), page, mma": Variant("bias", "page", True),
    "E token (biased), page, mma, loaded": Variant("bias", "page", True, loaded=True),
    "E token (biased), page, two": Variant("bias", "page", False, 2),
    "E token (biased), page, two, loaded": Variant("bias", "page", False, 2, loaded=True),
    "G token in storage, page, mma": Variant("page", "page", True, converted=2),
    "G only K, page, mma": Variant("page", "page", True, converted=1),
    "F 32 tokens, page, mma": Variant("group", "page", True),
}


@dataclass
class LabPages:
    pages: KVPages
    columns: torch.Tensor | None  # int8 [pages * heads, lines, WIDE]
    k: torch.Tensor  # what is stored, `[num_seqs, length, heads, D]` FP32
    v: torch.Tensor


def up(x: torch.Tensor) -> torch.Tensor:
    """BF16 numbers that are not smaller, in FP32."""
    y = x.bfloat16().float()
    return torch.where(y < x, (y.view(torch.int32) + 0x10000).view(torch.float32), y)


def by_lane(x: torch.Tensor, inner: int) -> torch.Tensor:
    """Numbers of columns `[N, 128]` in the order of `tiles.interleaved`. A thread of four has `inner` neighbors of every `4 * inner`, and
    reads 16 bytes of them at a time."""
    mine = x.unflatten(1, (-1, 4, inner)).transpose(1, 2).flatten(2)  # [N, 4, 32]
    return mine.unflatten(2, (-1, 16 // x.element_size())).transpose(1, 2).flatten(1)


def store(k: torch.Tensor, v: torch.Tensor, variant: Variant, spare: int = 3) -> LabPages:
    """Pages of `k` and `v [num_seqs, length, heads, D]`, in shuffled order; the pages of no sequence are poison."""
    seqs, length, heads, _ = k.shape
    device, count = k.device, -(-length // PAGE_SIZE)
    pad = torch.zeros(seqs, count * PAGE_SIZE - length, heads, D, device=device)
    k, v = (torch.cat([x.float(), pad], 1).flatten(0, 1) for x in (k, v))  # [seqs * count * 128, heads, D]
    k = rotate(k)
    pages = KVPages.empty(seqs * count + spare, heads, D, seqs, count, device)
    n = seqs * count * heads

    def by_page(x: torch.Tensor) -> torch.Tensor:  # [tokens, heads] to [pages * heads, 128]
        return x.unflatten(0, (-1, PAGE_SIZE)).transpose(1, 2).flatten(0, 1)

    def per_token(x: torch.Tensor) -> torch.Tensor:
        """Scales `[tokens, heads]` of pages' rows `[pages * heads, 128]`."""
        return x.unflatten(0, (-1, heads)).transpose(1, 2).flatten(0, 1)

    def scale_of(x: torch.Tensor, size: int) -> torch.Tensor:
        """Scales `[pages * heads, 128]`, equal in every `size` tokens."""
        amax = by_page(x.abs().amax(-1)).unflatten(1, (-1, size)).amax(2)
        return up((amax / 127).clamp_min(2.0**-32)).repeat_interleave(size, 1)

    k_form = "token" if variant.converted else variant.k_form
    v_form = "token" if variant.converted > 1 else variant.v_form
    k_scale = scale_of(k, {"page": PAGE_SIZE, "group": GROUP}.get(k_form, 1))
    v_scale = scale_of(v, PAGE_SIZE if v_form == "page" else 1)
    k_unit, v_unit = k_scale.amax(1), v_scale.amax(1)
    lines = []
    if variant.k_form in ("fma", "bias"):
        k_unit = torch.exp2(torch.ceil(torch.log2(k_unit)))
        ratio, unit, times = k_scale.double() / k_unit[:, None], k_unit, 1.0
        if variant.k_form == "bias":  # from units of 2^-149 to those of `tiles.SMALL`
            times, k_unit = 2.0**109, k_unit * 2.0**40
        if variant.loaded:
            offset = (MAGIC - BIAS * ratio) * 2.0**-40 if variant.k_form == "bias" else MAGIC - MAGIC * ratio
            lines += [by_lane(x.float(), 2) for x in (ratio * times, offset)]
        else:
            # Two numbers a word, exact in BF16: scales are, and their unit is a power of two. The second number is the whole word, whose
            # low half makes it up to 2^-7 larger, and its token is stored with that.
            pairs = (ratio * times).bfloat16()
            k_scale[:, 1::2] = (pairs.view(torch.float32) / times) * unit[:, None]
            lines.append(by_lane(pairs, 2))
    elif variant.k_form == "group":
        lines.append(torch.zeros(n, 64, device=device))
        lines[0][:, :4] = k_scale[:, ::GROUP] / k_unit[:, None]
    if variant.converted:
        k_ratio, v_ratio = ((scale / unit[:, None]).half() for scale, unit in ((k_scale, k_unit), (v_scale, v_unit)))
        lines += [k_ratio, v_ratio[:, v_tokens()]][: variant.converted]
    elif variant.v_form == "token":
        order = torch.tensor(v_tokens(), device=device)
        ratio = (v_scale / v_unit[:, None] * 252.0).half()
        # What is multiplied is what is stored: the weight's factor has 11 bits, and the codes are rounded with it.
        v_scale = ratio.float() * v_unit[:, None] / 252.0
        lines.append(by_lane(ratio[:, order], 4))
    k_8bit = (k / per_token(k_scale)[..., None]).round().clamp(-127, 127)
    v_8bit = (v / per_token(v_scale)[..., None]).round().clamp(-127, 127)
    pages.pool.fill_(0x7F)
    slots = torch.randperm(pages.num_pages, device=device)
    held = slots[: seqs * count]
    pages.page_table.copy_(held.int().view(seqs, count))
    pages.cache_seqlens.fill_(length)
    pages.k[held] = pack_k(k_8bit).to(torch.int8)
    pages.v.view(torch.uint8)[held] = pack_v(v_8bit + 128).to(torch.uint8)
    pages.k_scale.fill_(torch.nan)
    pages.v_scale.fill_(torch.nan)
    pages.k_scale[held] = k_unit.view(-1, heads)
    pages.v_scale[held] = v_unit.view(-1, heads)
    columns = None
    if lines:
        line = torch.cat([x.contiguous().view(torch.int8).view(n, -1, WIDE) for x in lines], 1)
        columns = torch.full((pages.num_pages, heads, *line.shape[1:]), 0x7F, dtype=torch.int8, device=device)
        columns[held] = line.unflatten(0, (-1, heads))
        columns = columns.flatten(0, 1)
    if variant.converted:  # what the kernel multiplies
        k_8bit, v_8bit = ((x * per_token(ratio.float())[..., None]).round() for x, ratio in ((k_8bit, k_ratio), (v_8bit, v_ratio)))
        k_scale, v_scale = (unit[:, None].expand(-1, PAGE_SIZE) for unit in (k_unit, v_unit))
    k = rotate_back(k_8bit * per_token(k_scale)[..., None])
    v = v_8bit * per_token(v_scale)[..., None]
    return LabPages(pages, columns, *(x.unflatten(0, (seqs, -1))[:, :length] for x in (k, v)))


def v_tokens() -> list[int]:
    """The tokens of a page in the order of V's positions."""
    return [16 * group + token for group in range(8) for token in V_ORDER]


def call(q: torch.Tensor, lab: LabPages, variant: Variant, causal: bool, out: torch.Tensor) -> torch.Tensor:
    """Attention of `q [num_seqs, S, num_q_heads, D]` BF16 over the pages, into `out`."""
    from .kernel import lab_kernel

    pages, device = lab.pages, q.device
    num_seqs, tokens, num_q_heads, _ = q.shape
    with mock.patch.object(cut, "cuts", only(cut.cuts, variant.warpgroups)):
        made = plan.make_prefill_plan.__wrapped__(
            device, q.shape, q.stride(), out.stride(), pages.num_kv_heads, pages.page_table.shape, pages.page_table.stride(0), False,
            tokens, causal, 0, False, False, None, True, False, False, False,
        )  # fmt: skip
    given = made.constants["OPTIONS"]
    values = {f.name: getattr(given, f.name).value for f in fields(given)} | {"cubics": variant.cubics}
    options = LabOptions(**values, k_form=variant.k_form, v_form=variant.v_form, synchronous=variant.synchronous, loaded=variant.loaded,
                         converted=variant.converted)  # fmt: skip
    constants = make_constants("lab", device, operands="all", OPTIONS=options, num_warps=made.constants["num_warps"], launch_pdl=True)
    k_tiles, v_tiles = page_tiles(pages, made.width, made.part)
    v_tiles = Tiles(v_tiles.x, as_int8(v_tiles.view))
    target, lse = out, None
    if made.splits > 1:
        lse = torch.empty(num_seqs, tokens, num_q_heads, dtype=torch.float32, device=device)
        target = torch.empty(made.splits, lse.numel(), D, dtype=torch.float32, device=device)
        target_lse = torch.empty(2, made.splits, lse.numel(), dtype=torch.float32, device=device)
    args = (
        Tiles(q, made.queries), k_tiles, v_tiles, *numbers(lab.columns, variant),
        *((None, target) if made.outputs is None else (Tiles(out, made.outputs), None)),
        target_lse if made.splits > 1 else None, pages.pool, pages.page_table, pages.cache_seqlens, made.counter, *made.numbers,
        D**-0.5 * LOG2E.value, 0.0,
    )  # fmt: skip
    launch(lab_kernel, made.grid, args, constants)
    if made.splits > 1:
        combine(target, target_lse, None, out, lse)
    return out


def only(cuts: Callable, warpgroups: int) -> Callable:
    return lambda *args: (x for x in cuts(*args) if x[0].warpgroups == warpgroups)


_VIEWS: dict = {}  # views are compared by identity


def as_int8(view: View) -> View:
    if view not in _VIEWS:
        _VIEWS[view] = View(view.shape, view.strides, view.block, view.swizzled, torch.int8, view.offset)
    return _VIEWS[view]


def numbers(columns: torch.Tensor | None, variant: Variant) -> tuple[Tiles | None, Tiles | None]:
    if columns is None:
        return None, None
    lines, found = columns.shape[1], []
    for first, count in ((0, variant.lines), (variant.lines, int(variant.v_form == "token" or variant.converted > 1))):
        key = tuple(columns.shape), first, count
        if key not in _VIEWS:
            _VIEWS[key] = View((len(columns), count, WIDE), (lines * WIDE, WIDE, 1), (1, count, WIDE), swizzled=False, offset=first * WIDE)
        found.append(Tiles(columns, _VIEWS[key]) if count else None)
    return tuple(found)


_WEIGHTS = re.compile(r"(wgmma\.mma_async\.sync\.aligned\.m64n\d+k32\.s32)\.s8\.s8( \{[^}]*\}, \{)")
_BIAS = re.compile(r"(wgmma\.mma_async\.sync\.aligned\.m64n128k32\.s32)\.s8\.s8( \{[^}]*\}, %rd\d+, %rd\d+, 0;)")


@contextmanager
def unsigned() -> Iterator[None]:
    """Kernels that are compiled in this context multiply unsigned bytes where the left operand is in registers, and where the product is
    added to nothing."""
    before = operands._rewritten

    def rewritten(ptx: str, *rest):
        ptx = ptx.replace(".satfinite.s32.s8.s8.s32", ".satfinite.s32.u8.u8.s32")
        return before(_BIAS.sub(r"\1.u8.u8\2", _WEIGHTS.sub(r"\1.u8.u8\2", ptx)), *rest)

    with mock.patch.object(operands, "_rewritten", rewritten), mock.patch.object(operands, "KEY", operands.KEY + "unsigned 4 "):
        yield
