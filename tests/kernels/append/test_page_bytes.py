"""A page's bytes depend only on its tokens: not on how appends were divided, on copies, or on drafts that
were cropped.
"""

import pytest
import torch

from fp8attn import KVPages, PagedKVCache, ops
from fp8attn.formats.codec import FP8
from fp8attn.formats.page_layout import PAGE_SIZE, engine_marks_of, unpack_k, unpack_v

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="interpreted on a CPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of Inf and NaN
]

HEADS = 2
TOKENS = 280
CUTS = (1, 2, 5, 16, 17, 40, 120)


def tokens(head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V whose magnitude changes by a factor of 100 within pages, with some values that are not finite."""
    k, v = (torch.randn(TOKENS, HEADS, head_dim) for _ in "kv")
    for x in (k, v):
        x *= torch.where(torch.rand(TOKENS, HEADS, 1) < 0.03, 100.0, 1.0)  # a token of a head
        x[200:230, 0] *= 100.0
    k[180, 0, 3], k[190, 0, 5] = torch.inf, torch.nan  # K of one page and head; its scale is NaN where keys are INT8
    v[20, 0, 1], v[21, 1, 2], v[150, 1, 0] = torch.inf, -torch.inf, torch.nan
    return k.bfloat16(), v.bfloat16()


def cuts(count: int) -> list[int]:
    found = []
    while (left := count - sum(found)) > 0:
        found.append(min(left, CUTS[torch.randint(len(CUTS), ()).item()]))
    return found


def append(cache: PagedKVCache, seq: int, k: torch.Tensor, v: torch.Tensor) -> None:
    cache.append(0, k, v, lengths=[len(k) if i == seq else 0 for i in range(cache.num_seqs)])


def held(cache: PagedKVCache, seq: int) -> dict[str, torch.Tensor]:
    """The stored data of a sequence: scales `[pages, HEADS]`, and codes `[tokens, HEADS, head_dim]`."""
    pages, length = cache.pages(0), cache.lengths[seq]
    ids = pages.page_table[seq, : -(-length // PAGE_SIZE)].long()
    k, v = unpack_k(pages.k[ids].view(torch.uint8))[:length], unpack_v(pages.v[ids].view(torch.uint8))[:length]
    return {
        "k_scale": pages.k_scale[ids],
        "v_scale": pages.v_scale[ids],
        "k": k.view(pages.format.k.dtype),
        "v": v.view(FP8),
    }


def by_token(scale: torch.Tensor, count: int) -> torch.Tensor:
    return scale.repeat_interleave(PAGE_SIZE, 0)[:count, :, None]


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    """Assert equal data, except for codes whose scale is NaN, and the sign of a NaN."""
    for name in ("k", "v"):
        scale, expected_scale, codes, expected = (
            ours[f"{name}_scale"],
            theirs[f"{name}_scale"],
            ours[name],
            theirs[name],
        )
        assert torch.equal(scale.isnan(), expected_scale.isnan()) and torch.equal(
            scale.nan_to_num(), expected_scale.nan_to_num()
        ), name
        assert torch.equal(codes.isnan(), expected.isnan()), name
        said = ~(expected.isnan() | by_token(scale, len(codes)).isnan())
        assert torch.equal(codes.view(torch.uint8)[said], expected.view(torch.uint8)[said]), name


FORMATS = [
    (64, "int8", True),
    (64, "e4m3", False),
    (80, "int8", False),
    (80, "e4m3", True),
    (128, "int8", True),
    (128, "e4m3", False),
]
# Kernels differ between 64 and 128 channels in the width of their tiles alone, and are slow in the interpreter.
INTERPRETED = [format for format in FORMATS if format[0] < 128]
each_format = pytest.mark.parametrize(
    ("backend", "head_dim", "key_dtype", "rotate_keys"),
    [*(("reference", *format) for format in FORMATS), *(("triton", *format) for format in INTERPRETED)],
)


@each_format
def test_appends_leave_an_engines_mark_in_the_header(head_dim, key_dtype, rotate_keys, backend):
    """The vLLM plugin keeps marks of pages there."""
    torch.manual_seed(0)
    k, v = tokens(head_dim)
    pages = KVPages.empty(3, HEADS, head_dim, 1, 3, key_dtype=key_dtype, rotate_keys=rotate_keys)
    pages.page_table.copy_(torch.tensor([[2, 0, 1]]))
    marks = engine_marks_of(pages.pool)
    marks.fill_(77)
    for cut in (130, 1, 149):
        ops.append(pages, k[:cut], v[:cut], max_seqlen=cut, backend=backend)
    assert pages.cache_seqlens.tolist() == [280] and pages.k_scale.all() and (marks == 77).all()


@each_format
def test_bytes_do_not_depend_on_cuts_and_copies(head_dim, key_dtype, rotate_keys, backend):
    torch.manual_seed(0)
    k, v = tokens(head_dim)
    options = {"key_dtype": key_dtype, "rotate_keys": rotate_keys, "backend": backend}
    whole = PagedKVCache(HEADS, head_dim, **options | {"backend": "reference"})
    whole.append(0, k, v)
    expected = held(whole, 0)
    first = PagedKVCache(HEADS, head_dim, **options | {"backend": "reference"})
    first.append(0, k[:1], v[:1])
    assert (first.pages(0).k_scale < expected["k_scale"][0]).all() and expected["k_scale"].isnan().sum() == (
        key_dtype == "int8"
    )

    pieces = PagedKVCache(HEADS, head_dim, num_seqs=2, **options)
    shared = 100 + torch.randint(100, ()).item()
    for first, last, seq in ((0, shared, 0), (shared, TOKENS, 1), (shared, TOKENS, 0)):
        if first == shared and seq == 1:
            pieces.copy(0, 1)
        at = first
        for cut in cuts(last - first):
            append(pieces, seq, k[at : at + cut], v[at : at + cut])
            at += cut
    assert pieces.lengths == (TOKENS, TOKENS)
    for seq in range(2):
        assert_same(held(pieces, seq), expected)


@each_format
def test_drafts_that_are_taken_back(head_dim, key_dtype, rotate_keys, backend):
    """A draft that fits leaves nothing. One that does not makes a scale grow for good, and codes are rounded once more
    to it: values differ by half a step of the grown scale, which is that of E4M3's subnormals, because the scales are
    powers of two.
    """
    torch.manual_seed(1)
    k, v = (x[:150] for x in tokens(head_dim))
    cache, plain = (
        PagedKVCache(HEADS, head_dim, key_dtype=key_dtype, rotate_keys=rotate_keys, backend=backend) for _ in range(2)
    )
    steps = {"k": 0.5 if key_dtype == "int8" else 2.0**-10, "v": 2.0**-10}
    at = 0
    for size, magnitude in ((1, 0.1), (30, 0.1), (16, 0.1), (61, 0.1), (17, 0.1), (2, 1e4), (23, 1e5)):
        for x in (cache, plain):
            append(x, 0, k[at : at + size], v[at : at + size])
        at += size
        before, draft = (
            held(cache, 0),
            (magnitude * torch.randn(2, 5, HEADS, head_dim)).clamp(-2 * magnitude, 2 * magnitude).bfloat16(),
        )
        append(cache, 0, *draft)
        cache.truncate(at)
        after = held(cache, 0)
        if magnitude < 1:
            assert_same(after, before)
            assert_same(after, held(plain, 0))
            continue
        for name, step in steps.items():
            scale = by_token(after[f"{name}_scale"], at)
            assert (after[f"{name}_scale"][-1] > before[f"{name}_scale"][-1]).all()
            a, b = after[name].float() * scale, before[name].float() * by_token(before[f"{name}_scale"], at)
            assert torch.equal(a.isnan(), b.isnan())
            assert ((a - b).abs().nan_to_num() <= step * scale.nan_to_num() * (1 + 1e-6)).all()
            assert name == "v" or key_dtype == "e4m3" or not torch.equal(a.nan_to_num(), b.nan_to_num())
