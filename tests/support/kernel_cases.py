"""What the kernel tests share, in the interpreter and on a GPU: caches with poison in unused bytes, cases, and the one
tolerance.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import replace
from typing import NamedTuple

import torch

import fp8attn
from fp8attn import AttentionParams, KVPages, reference
from fp8attn.formats import rotation
from fp8attn.formats.codec import CODECS, E4M3, FP8, KeyDtype
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.page_layout import HEADER, PAGE_SIZE, unpack_k, unpack_v
from fp8attn.formats.rope import DenseRope, Rope
from fp8attn.formats.spec import PageSpec
from fp8attn.numerics import relative_error
from fp8attn.params import Append

KERNEL_ERROR = 3e-4  # relative, against float64 on the same bytes, besides the rounding of the output
LSE_ERROR = 5e-4  # absolute; half a unit in the last place of FP16, in which a softmax's weights are summed
POISON = 0x7F  # NaN in E4M3, and the largest number in INT8


def assert_kernel_error(out: torch.Tensor, ref: torch.Tensor) -> float:
    """Fails unless `out` is `ref` (float64) to within KERNEL_ERROR and what `out.dtype` rounds off:
    `e^2 <= 3e-4^2 + rounding^2`.
    """
    assert not out.isnan().any(), "NaN in the output"
    if not ref.any():
        assert not out.any()
        return 0.0
    error, rounding = relative_error(out, ref), relative_error(ref.to(out.dtype), ref)
    assert error**2 <= KERNEL_ERROR**2 + rounding**2, f"error {error:.2e}; rounding alone is {rounding:.2e}"
    return error


def assert_lse(lse: torch.Tensor, ref: torch.Tensor, slack: float = 0.0) -> None:
    assert torch.equal(lse == -torch.inf, ref == -torch.inf)
    seen = ref > -torch.inf
    assert torch.allclose(lse[seen], ref[seen], rtol=0, atol=LSE_ERROR + slack), float((lse - ref)[seen].abs().max())


def poison_empty(monkeypatch) -> None:
    """Make `torch.empty` return NaN, so that outputs and scratch memory that a kernel does not write become visible."""
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *a, **k: x.fill_(torch.nan) if (x := empty(*a, **k)).is_floating_point() else x
    )


def pairwise(factors: dict[str, list], seed: int = 0) -> list[dict]:
    """A small set of cases in which all pairs of values of different factors occur (a greedy covering array)."""
    rng = random.Random(seed)
    names = list(factors)
    pairs = lambda case: {((a, case[a]), (b, case[b])) for a, b in itertools.combinations(range(len(names)), 2)}  # noqa: E731
    sizes = [range(len(factors[name])) for name in names]
    missing = {
        ((a, x), (b, y)) for a, b in itertools.combinations(range(len(names)), 2) for x in sizes[a] for y in sizes[b]
    }
    cases = []
    while missing:
        (a, x), (b, y) = min(missing)
        candidates = []
        for _ in range(60):
            case = [rng.choice(size) for size in sizes]
            case[a], case[b] = x, y
            candidates.append((len(pairs(case) & missing), case))
        case = max(candidates)[1]
        missing -= pairs(case)
        cases.append({name: factors[name][i] for name, i in zip(names, case, strict=True)})
    return cases


def case_id(case: dict) -> str:
    return "-".join(str(value).replace("torch.", "").replace(" ", "") for value in case.values())


def cumulative(lengths: list[int], device="cpu") -> torch.Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def clone(pages: KVPages) -> KVPages:
    return copy.deepcopy(pages)


def random_tokens(tokens: int, heads: int, head_dim: int, dtype, device="cpu", spread: float = 3.0) -> torch.Tensor:
    """Normal values whose size differs from token to token by powers of two, so that the pages' scales differ."""
    size = torch.exp2(torch.randint(-int(spread), int(spread) + 1, (tokens, 1, 1), device=device).float())
    return (torch.randn(tokens, heads, head_dim, device=device) * size).to(dtype)


def empty_cache(
    lengths: list[int], heads: int, head_dim: int, device="cpu", mean: float = 0.0, spare: int = 2,
    key_dtype: KeyDtype = "int8",
    rotate: bool = True,
) -> KVPages:  # fmt: skip
    """Pages for `lengths`, shuffled. K, the scales and the pages that no table names are poisoned. The means are normal
    values times `mean`, or None if that is 0."""
    columns = max(1, -(-max(lengths) // PAGE_SIZE))
    num_seqs = len(lengths)
    k_mean, v_mean = (torch.randn(heads, head_dim, device=device) * mean if mean else None for _ in "kv")
    pages = KVPages.empty(
        num_seqs * columns + spare, heads, head_dim, num_seqs, columns, device, key_dtype=key_dtype, rotate_keys=rotate,
        k_mean=k_mean, v_mean=v_mean,
    )  # fmt: skip
    order = torch.randperm(pages.num_pages, device=device)
    pages.page_table.copy_(order[: num_seqs * columns].view(num_seqs, columns))
    pages.k.view(torch.uint8).fill_(POISON)
    pages.pool[order[num_seqs * columns :]] = POISON
    pages.k_scale.fill_(torch.nan)
    pages.v_scale.fill_(torch.nan)
    return pages


def fill(pages: KVPages, k: torch.Tensor, v: torch.Tensor, lengths: list[int], static: bool = False) -> None:
    """Append with the reference: the first tokens of every sequence."""
    if sum(lengths):
        cu = cumulative(lengths, k.device)
        reference.append(pages, k, v, Append(cu, max(lengths), static_scales=static))


# Append

APPEND_FACTORS = {
    "head_dim": [64, 80, 96, 128, 192, 256],
    "dtype": [torch.bfloat16, torch.float16],
    "heads": [1, 3],
    "lengths": [[0, 0, 0], [5, 127, 0], [128, 100, 250], [17, 1, 128]],  # tokens there before
    "new": [[1, 1, 1], [3, 16, 0], [200, 1, 29], [128, 0, 140]],
    "static": [False, True],
    "strided": [False, True],
    "grow": [False, True],  # the new tokens are far larger than the old
    "key_dtype": list(CODECS),
    "rotate": [True, False],
    "mean": [0.0, 0.5],
}
_EDGE = {
    "head_dim": 64, "dtype": torch.bfloat16, "heads": 1, "strided": False, "key_dtype": "int8", "rotate": True,
    "mean": 0.5,
}  # fmt: skip
APPEND_EDGES = {
    "a step across pages": _EDGE | {"lengths": [127, 120, 5], "new": [3, 16, 1], "grow": True, "static": False},
    "a step across pages, static": _EDGE | {"lengths": [127, 120, 5], "new": [3, 16, 1], "grow": True, "static": True},
    "the longest step": _EDGE | {"lengths": [112, 113, 0], "new": [16, 16, 16], "grow": False, "static": False},
    "the shortest prompt": _EDGE | {"lengths": [112, 113, 0], "new": [17, 16, 1], "grow": True, "static": False},
    "more heads than turns": _EDGE
    | {"heads": 40, "lengths": [3, 127, 0], "new": [1, 1, 1], "grow": False, "static": False},
    "a step across pages, e4m3": _EDGE
    | {"lengths": [127, 120, 5], "new": [3, 16, 1], "grow": True, "static": False, "key_dtype": "e4m3"},
    "many sequences": _EDGE
    | {
        "lengths": [i % 7 * 40 for i in range(133)],
        "new": [i % 19 * (i % 6 == 0) for i in range(133)],
        "grow": False,
        "static": False,
    },
}

_WIDE = _EDGE | {"head_dim": 512, "grow": True, "static": False}
APPEND_WIDE = {  # head_dim 512, whose pages are written in parts
    "a step": _WIDE | {"lengths": [127, 5, 0], "new": [3, 16, 0]},
    "prompts": _WIDE | {"lengths": [5, 127, 0], "new": [200, 1, 29]},
    "e4m3": _WIDE | {"lengths": [100, 0], "new": [30, 130], "key_dtype": "e4m3"},
    "static": _WIDE | {"lengths": [17, 0], "new": [120, 90], "static": True, "strided": True},
}


def check_append(append, case: dict, device="cpu") -> None:
    """The kernel's bytes, scales and lengths are the reference's, on every token written; V's tail is finite."""
    heads, head_dim, dtype, lengths, new = (case[name] for name in ("heads", "head_dim", "dtype", "lengths", "new"))
    totals = [a + b for a, b in zip(lengths, new, strict=True)]
    expected = empty_cache(
        totals, heads, head_dim, device, case["mean"], key_dtype=case["key_dtype"], rotate=case["rotate"]
    )
    if case["static"]:
        expected.k_scale.fill_(0.01 if CODECS[case["key_dtype"]].is_integer else 2.0**-7)
        expected.v_scale.fill_(2.0**-8)
    fill(
        expected, *(random_tokens(sum(lengths), heads, head_dim, dtype, device) for _ in "kv"), lengths, case["static"]
    )

    tokens = sum(new)
    kv = torch.stack([random_tokens(tokens, heads, head_dim, dtype, device, 6) for _ in "kv"], 1)
    kv = kv * (512.0 if case["grow"] else 0.5)
    chance = torch.rand(kv.shape, device=device)
    if not CODECS[
        case["key_dtype"]
    ].has_nan:  # NaN is the scale of a page that has one, or, rotated, Inf: in few pages, or none shows more
        chance[:, 0][torch.rand(tokens, device=device) < 0.99] = 0.5
    kv[chance < 0.006] = -0.0
    kv[chance < 0.003] = torch.nan
    kv[chance < 0.002] = torch.inf
    kv[chance < 0.001] = -torch.inf
    kv[chance > 0.998] = 1e-7
    k, v = kv[:, 0], kv[:, 1]
    if case["strided"]:  # as cut out of a fused projection
        fused = torch.cat([v, k, v], -1)
        k, v = fused[..., head_dim : 2 * head_dim], fused[..., 2 * head_dim :]
    cu = None if len(set(new)) == 1 else cumulative(new, device)
    how = Append(cu, max(new), case["static"])
    actual = clone(expected)
    reference.append(expected, k, v, how)
    append(actual, k, v, how)
    assert actual.cache_seqlens.tolist() == expected.cache_seqlens.tolist() == totals
    for seq, total in enumerate(totals):
        ids = actual.page_table[seq, : -(-total // PAGE_SIZE)].long()
        for name, unpack in (("k", unpack_k), ("v", unpack_v)):
            ours, theirs = (getattr(p, f"{name}_scale")[ids] for p in (actual, expected))
            assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours.nan_to_num(), theirs.nan_to_num()), (
                name,
                seq,
            )
            ours, theirs = (unpack(getattr(p, name).view(torch.uint8)[ids]) for p in (actual, expected))
            if name == "v" or CODECS[case["key_dtype"]].has_nan:
                ours, theirs = (torch.where(x == 0xFF, POISON, x) for x in (ours, theirs))  # a NaN may lose its sign
            assert torch.equal(ours[:total], theirs[:total]), (name, seq, int((ours != theirs)[:total].sum()))
            assert name == "k" or not (ours[total:] == POISON).any(), "V's unwritten tail must stay finite"
    held = torch.zeros(actual.num_pages, dtype=torch.bool)
    held[actual.page_table.flatten().long().cpu()] = True
    assert (actual.pool[~held.to(device)] == POISON)[:, :, :-HEADER].all(), "wrote to a page that is in no table"
    rest = actual.pool.view(torch.float32)[..., -HEADER // 4 :][held.to(device)]
    assert not rest[..., 2:].any(), "wrote to the header's zeros"


COUNTED = {  # tokens held before, and new tokens
    "one token": ([5, 127, 128, 0], [1, 1, 1, 1]),
    "three tokens": ([5, 126, 128, 0], [3, 3, 3, 3]),
    "200 tokens": ([5, 127, 0, 300], [200, 200, 200, 200]),
    "a ragged step": ([5, 40, 127, 0], [3, 0, 16, 1]),
    "a ragged prompt": ([5, 40, 127, 250], [200, 0, 1, 134]),
}


def check_counted(
    backend: str, lengths: list[int], new: list[int], head_dim: int, key_dtype: torch.dtype, static: bool, device="cpu"
) -> None:
    """`append(advance=False)` writes the bytes of an append that advances the lengths, and leaves the lengths.

    Two more sequences pad the batch, as engines pad it: their length is 0, `cu_seqlens` is flat at its end, and their
    rows of the page table name pages that do not exist. Without `cu_seqlens`, they have as many new tokens as the
    others.
    """
    uniform = len(set(new)) == 1
    totals = [a + b for a, b in zip(lengths, new, strict=True)]
    pages = empty_cache([*totals, 0, 0], 3, head_dim, device, key_dtype=key_dtype)
    if static:
        pages.k_scale.fill_(0.01 if CODECS[key_dtype].is_integer else 2.0**-7)
        pages.v_scale.fill_(2.0**-8)
    real = replace(pages, page_table=pages.page_table[:-2], cache_seqlens=pages.cache_seqlens[:-2])
    fill(real, *(random_tokens(sum(lengths), 3, head_dim, torch.bfloat16, device) for _ in "kv"), lengths, static)
    pages.page_table[-2:] = 1 << 30
    counted = clone(pages)
    counted.cache_seqlens.copy_(torch.tensor([*totals, 0, 0]))
    k, v = (random_tokens(sum(new), 3, head_dim, torch.bfloat16, device, 6) for _ in "kv")
    options = {"static_scales": static, "backend": backend}
    fp8attn.append(real, k, v, cu_seqlens=cumulative(new, device), max_seqlen=max(new), **options)
    options["advance"] = False
    if uniform:
        k, v = (torch.cat([x, x[: 2 * new[0]]]) for x in (k, v))
        fp8attn.append(counted, k, v, **options)
    else:
        k, v = (torch.cat([x, x[:5]]) for x in (k, v))  # the rows of a batch that is padded
        fp8attn.append(counted, k, v, cu_seqlens=cumulative([*new, 0, 0], device), max_seqlen=max(new), **options)
    assert real.cache_seqlens.tolist() == totals and counted.cache_seqlens.tolist() == [*totals, 0, 0]
    assert torch.equal(counted.pool, pages.pool)


QUANTIZE_FACTORS = {
    "head_dim": [64, 96, 128],
    "dtype": [torch.bfloat16, torch.float16, FP8],
    "shape": [(1, 1, 128), (2, 3, 150)],  # batch, heads, tokens
    "rotary": [0, 40, "all"],
    "interleaved": [False, True],
    "mean": [0.0, 0.5],
    "key_dtype": list(CODECS),
    "rotate": [True, False],
    "transposed": [False, True],
}


def check_from_dense(from_dense, case: dict, device="cpu") -> None:
    """The kernel's pages are the reference's, the headers' zeros and V's tail too, and so are queries after RoPE."""
    (batch, heads, length), head_dim, dtype = case["shape"], case["head_dim"], case["dtype"]
    given_bytes = dtype == FP8
    k, v = (
        random_tokens(batch * length, heads, head_dim, torch.float32, device, 6).unflatten(0, (batch, length))
        for _ in "kv"
    )
    k[-1, length // 2, 0, 5], v[0, 3, 0, 7] = torch.nan, -torch.inf
    k, v = (x.to(dtype).transpose(1, 2) for x in (k, v))
    if not case["transposed"]:
        k, v = k.contiguous(), v.contiguous()
    rotary = 0 if given_bytes else min(head_dim, case["rotary"]) if case["rotary"] != "all" else head_dim
    # More queries than keys, some of which the same program has, in another order of memory, with other angles.
    q = (
        random_tokens(batch * 270, 3 * heads, head_dim, torch.float32, device, 6)
        .unflatten(0, (batch, 270))
        .to(dtype)
        .transpose(1, 2)
    )
    q = q.contiguous() if case["transposed"] else q
    angles = (
        torch.randn(batch, count, half, device=device) * 10
        for count, half in ((length, rotary // 2), (270, head_dim // 2))
    )
    k_mean, v_mean = (
        torch.randn(heads, head_dim, device=device) * case["mean"] if case["mean"] and not given_bytes else None
        for _ in "kv"
    )
    tables = [Rope(angle.cos(), angle.sin(), case["interleaved"]) for angle in angles]
    ropes = [DenseRope(*tables, q, torch.empty_like(q)) if rotary else None for _ in range(2)]
    codec = E4M3 if given_bytes else CODECS[case["key_dtype"]]
    form = KVFormat(PageSpec.of(head_dim, codec.name).name, case["rotate"] and not given_bytes, k_mean, v_mean)
    actual, expected = from_dense(k, v, form, ropes[0]), reference.from_dense(k, v, form, ropes[1])
    if rotary:
        outs = torch.stack([rope.out for rope in ropes])
        assert torch.equal(*outs.isnan()) and torch.equal(*outs.nan_to_num()) and outs.isfinite().any()
    assert torch.equal(actual.page_table, expected.page_table) and torch.equal(
        actual.cache_seqlens, expected.cache_seqlens
    )
    assert actual.format is expected.format is form
    rest = actual.pool.view(torch.float32)[..., -HEADER // 4 :]
    assert not rest[..., 2:].any()
    for seq in range(batch):
        ids = expected.page_table[seq].long()
        for name, unpack in (("k", unpack_k), ("v", unpack_v)):
            scales = torch.stack([getattr(pages, f"{name}_scale")[ids] for pages in (actual, expected)])
            assert torch.equal(*scales.isnan()) and torch.equal(*scales.nan_to_num()), (name, seq)
            codes = torch.stack([unpack(getattr(pages, name)[ids].view(torch.uint8)) for pages in (actual, expected)])
            if getattr(expected, name).dtype == FP8:
                codes[codes == 0xFF] = POISON  # a NaN may lose its sign
            assert torch.equal(*codes[:, :length]) and (name == "k" or not codes[0, length:].any()), (name, seq)


# Attention

LENGTHS = [[1, 300, 0], [2, 15, 128], [16, 17, 129], [127, 130, 1]]
ATTENTION_FACTORS = {
    "head_dim": [64, 80, 96, 128, 192, 256],
    "dtype": [torch.float16, torch.bfloat16],
    "heads": [(2, 1), (1, 8), (2, 2), (1, 4)],  # KV heads, query heads for each
    "lengths": LENGTHS,
    "queries": [1, 2, 7, 130],  # the most of any sequence; some have fewer, some none
    "mask": ["causal", "full", "window 5", "window 140"],
    "softcap": [0.0, 20.0],
    "sinks": [False, True],
    "leftpad": [False, True],
    "splits": [1, 3],
    "scale": [None, -0.3],
    "strided": [False, True],
    "mean": [0.0, 2.0],
    "key_dtype": list(CODECS),
    "rotate": [True, False],
}
_WIDE_ATTENTION = {name: values[0] for name, values in ATTENTION_FACTORS.items()} | {"head_dim": 512}
ATTENTION_WIDE = {  # head_dim 512, on tiles of its own
    "decode": _WIDE_ATTENTION | {"heads": (2, 2), "splits": 3, "mean": 2.0, "leftpad": True, "softcap": 20.0},
    "decode, e4m3": _WIDE_ATTENTION | {"key_dtype": "e4m3", "rotate": False, "sinks": True, "mask": "window 140"},
    "prefill": _WIDE_ATTENTION | {"lengths": [2, 130, 0], "queries": 130, "mean": 2.0, "dtype": torch.bfloat16},
    "prefill, parts": _WIDE_ATTENTION
    | {"lengths": [2, 200, 0], "queries": 130, "splits": 3, "mask": "window 140", "leftpad": True},
    "prefill, e4m3": _WIDE_ATTENTION
    | {"lengths": [1, 140, 3], "queries": 7, "key_dtype": "e4m3", "mask": "full", "splits": 3},
}


class _MeanApart(NamedTuple):
    """Pages for the reference that have `[k, mean]` for keys, so that queries `[a, b]` have the scores
    `a . k + b . mean`.
    """

    pages: KVPages
    num_seqs: int
    num_kv_heads: int
    cache_seqlens: torch.Tensor

    def bounds(self, cu_seqlens: torch.Tensor | None, longest: int) -> list[int]:
        return self.pages.bounds(cu_seqlens, longest)

    def read(self, seq: int, length: int, dtype: torch.dtype, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        form = self.pages.format
        (k, _), (with_mean, v) = (
            pages.read(seq, length, dtype, first)
            for pages in (replace(self.pages, format=replace(form, stored_k_mean=None)), self.pages)
        )
        return torch.cat([k, with_mean - k], -1), torch.cat([v, torch.zeros_like(v)], -1)


def exact_attention(q: torch.Tensor, pages: KVPages, arguments: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and LSE in float64 of what kernels multiply: K by the rotated Q in FP16, each row's exponent apart; K's
    mean by all of Q.
    """
    a = b = q.double()
    if pages.format.rotate:
        rotated = rotation.rotate(q.float())
        _, exponent = torch.frexp(rotated.abs().amax(-1, keepdim=True))
        a = rotation.rotate_back(torch.ldexp(torch.ldexp(rotated, -exponent).half().double(), exponent))
    apart = _MeanApart(pages, pages.num_seqs, pages.num_kv_heads, pages.cache_seqlens)
    wide = {"compute_dtype": torch.float64, "out_dtype": torch.float64}
    out, lse = reference.attention(torch.cat([a, b], -1), apart, AttentionParams(**arguments), **wide)
    return out[..., : q.shape[-1]], lse


def run_attention(attention, pages: KVPages, q, arguments: dict) -> float:
    """Check one call against float64; returns the error of the output."""
    ref, ref_lse = exact_attention(q, pages, arguments)
    out, lse = attention(q, pages, AttentionParams(**arguments))
    assert out.dtype == q.dtype
    assert out.shape == q.shape
    slack = 0.0
    if (
        pages.format.rotate and q.is_cuda
    ):  # where a compiler fuses the rotation's products and sums, an element may round the other way
        rows = (
            rotation.rotate(q.float()).abs().amax(-1) * 2.0**-11
        ).max()  # half a unit in the last place of FP16, of the largest
        keys = max(
            float(pages.read(seq, length)[0].abs().max())
            for seq, length in enumerate(pages.cache_seqlens.tolist())
            if length
        )
        slack = 2 * float(rows) * keys * abs(arguments["softmax_scale"])
    assert_lse(lse, ref_lse, slack)
    return assert_kernel_error(out, ref)


def check_out(
    backend: str,
    head_dim: int,
    queries: int,
    device="cpu",
    lengths: tuple[int, ...] = (300, 130, 140),
    heads: int = 2,
    **options,
) -> None:
    """`attention(out=...)` writes the bits of a call without it, rows after the last sequence too, and nothing around
    them.

    Queries are cut out of a fused projection. The last output is at an address that is no multiple of 16 bytes.
    """
    pages = empty_cache(list(lengths), heads, head_dim, device, mean=0.5)
    fill(pages, *(random_tokens(sum(lengths), heads, head_dim, torch.bfloat16, device) for _ in "kv"), list(lengths))
    tokens = len(lengths) * queries
    fused = torch.randn(tokens + 3, 6 * heads, head_dim, device=device).bfloat16()
    counts = cumulative([min(queries, length) for length in lengths], device)
    for spare, bounds in ((0, {}), (3, {"cu_seqlens_q": counts, "max_seqlen_q": queries})):
        q = fused[: tokens + spare, : 4 * heads]
        expected = fp8attn.attention(q, pages, backend=backend, **bounds, **options)
        assert not expected.isnan().any()
        for around in (4 * heads * head_dim, 1):  # elements before and after the output
            memory = torch.full((q.numel() + 2 * around,), torch.nan, dtype=q.dtype, device=device)
            out = memory[around:-around].view(q.shape)
            assert fp8attn.attention(q, pages, out=out, backend=backend, **bounds, **options) is out
            assert torch.equal(out, expected)
            assert memory[:around].isnan().all() and memory[-around:].isnan().all()


def check_attention(attention, case: dict, device="cpu") -> float:
    """One case of ATTENTION_FACTORS against float64 on the same bytes (`splits` is for the caller to arrange)."""
    (heads, group), head_dim, lengths = case["heads"], case["head_dim"], case["lengths"]
    pages = empty_cache(
        lengths, heads, head_dim, device, case["mean"], key_dtype=case["key_dtype"], rotate=case["rotate"]
    )
    fill(pages, *(random_tokens(sum(lengths), heads, head_dim, torch.float16, device) for _ in "kv"), lengths)
    # As many queries as there are tokens at most, but for the first sequence, whose first rows then see nothing.
    most = case["queries"]
    q_lens = [most if i == 0 or most == 1 else min(most, length) for i, length in enumerate(lengths)]
    uniform = len(set(q_lens)) == 1
    width = head_dim * (3 if case["strided"] else 1)
    q = torch.randn(sum(q_lens), heads * group, width, device=device).to(case["dtype"])[..., -head_dim:]
    kind, _, window = case["mask"].partition(" ")
    arguments = {
        "cu_seqlens_q": None if uniform else cumulative(q_lens, device),
        "max_seqlen_q": max(q_lens),
        "causal": kind != "full",
        "softmax_scale": case["scale"] or head_dim**-0.5,
        "window": int(window or 0),
        "softcap": case["softcap"],
        "sinks": torch.randn(heads * group, device=device) if case["sinks"] else None,
        "leftpad_k": torch.tensor([0, 3, 1], dtype=torch.int32, device=device) if case["leftpad"] else None,
    }
    return run_attention(attention, pages, q, arguments)
