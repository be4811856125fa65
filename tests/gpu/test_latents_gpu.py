"""Latents (MLA) on a GPU: bytes against the reference, attention against float64 up to 131,072 tokens, drafts, poison,
CUDA graphs.
"""

import copy
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import fp8attn
from fp8attn import AttentionParams, KVPages, PagedKVCache, UsageError, latent
from fp8attn.formats.latent import channels
from fp8attn.formats.page_layout import PAGE_SIZE, latent_of
from fp8attn.formats.spec import SPARE, PageSpec
from fp8attn.numerics import relative_error
from fp8attn.params import Append
from tests.support import latents
from tests.support.kernel_cases import cumulative
from tests.support.latents import empty, tokens

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.usefixtures("poisoned"),
]
CUDA = torch.device("cuda", 0)
SPEC = PageSpec.latent(512, 64)
SMALL = PageSpec.latent(256, 32)
IN_CODES = PageSpec.latent(512, 128, rope_in_codes=True)
SPARED = replace(IN_CODES, spare=SPARE)
SCALE = 192**-0.5
BACKENDS = [
    "triton",
    pytest.param("hopper", marks=pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")),
]
# Relative, of FP16 outputs, and of the LSE in absolute terms. Two digits of queries and weights (on Hopper up to 32
# heads and few rows) are as exact as 16 bits. One digit: its rounding is 1 to 1.7% where latents have no mean, and
# averages out where they have one.
# Scores have a deviation of two here, so FP16's rounding of rotated queries moves one of some hundreds by 2e-3.
EXACT = {"triton": (6e-4, 4e-3), "hopper": (1.2e-3, 4e-3)}
ONE_DIGIT = (0.02, 0.1)
MANY = 1024  # query rows of a KV head from which on Hopper's kernel has one digit
REPLAYS = 500  # of two graphs of 16 calls; 31,250 were run once


def bounds_of(backend: str, heads: int, queries: int = 1) -> tuple[float, float]:
    """Of `heads` query heads of a KV head."""
    one_digit = backend == "hopper" and (heads > 32 or queries * heads >= MANY)
    return ONE_DIGIT if one_digit else EXACT[backend]


def filled(lengths: list[int], spec: PageSpec, static: bool = False) -> KVPages:
    """Pages with random tokens. `static`: they have the mean and the factors that the pages have."""
    if not static:
        return latents.filled(lengths, spec, device=CUDA)
    pages, (x, rope) = empty(lengths, spec, static=True, device=CUDA), tokens(sum(lengths), spec, device=CUDA)
    x = x * channels(pages.format.factor) + pages.format.v_mean
    bounds = cumulative(lengths, CUDA)
    fp8attn.append(pages, x, rope, cu_seqlens=bounds, max_seqlen=max(lengths), backend="reference")
    return pages


def queries(count: int, heads: int, pages: KVPages) -> torch.Tensor:
    """Random queries, whose blocks have the size that makes each count for the scores."""
    q = torch.randn(count, heads, pages.spec.k_dim, device=CUDA)
    q[..., : pages.spec.v_dim] /= channels(pages.format.factor)
    return q.half()


def check(pages: KVPages, q: torch.Tensor, params: AttentionParams, backend: str) -> torch.Tensor:
    """Attention of `backend` against float64 on the same bytes, twice with the same bits."""
    options = dict(
        cu_seqlens_q=params.cu_seqlens_q, max_seqlen_q=params.max_seqlen_q, causal=params.causal,
        softmax_scale=params.softmax_scale, window=params.window or None, leftpad_k=params.leftpad_k, return_lse=True,
    )  # fmt: skip
    out, lse = fp8attn.attention(q, pages, backend=backend, **options)
    again = fp8attn.attention(q, pages, backend=backend, **options)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])
    ref, ref_lse = latent.attention(q, pages, params, compute_dtype=torch.float64, out_dtype=torch.float64)
    error, lse_error = bounds_of(backend, q.shape[1] // pages.num_kv_heads, params.max_seqlen_q)
    rounding = relative_error(ref.to(out.dtype), ref)
    assert not out.isnan().any() and torch.equal(lse == -torch.inf, ref_lse == -torch.inf)
    seen = ref_lse > -torch.inf
    assert not out[~seen].any()
    found = relative_error(out, ref)
    assert found**2 <= error**2 + rounding**2, (found, rounding)
    off = float((lse - ref_lse)[seen].abs().max()) if seen.any() else 0.0
    assert off <= lse_error, off
    return out


@pytest.mark.parametrize(("before", "new"), [([0, 0], [1, 1]), ([127, 130], [1, 1]), ([120, 0, 5], [16, 0, 3]),
                                        ([100, 0], [1500, 40]), ([0], [5000])], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "spec", [SPEC, SMALL, PageSpec.latent(128, 0), PageSpec.latent(1024, 128), IN_CODES, SPARED], ids=str
)
@pytest.mark.parametrize("static", [False, True], ids=["", "mean and factor"])
def test_append_writes_the_references_bytes(before, new, spec, static):
    ours = empty([a + b for a, b in zip(before, new, strict=True)], spec, static=static, device=CUDA)
    if any(before):
        latent.append(
            ours, *tokens(sum(before), spec, torch.bfloat16, device=CUDA), Append(cumulative(before, CUDA), max(before))
        )
    theirs = copy.deepcopy(ours)
    x, rope = tokens(sum(new), spec, torch.bfloat16, device=CUDA)
    x[-1] = 0
    step = Append(None if len({*new}) == 1 else cumulative(new, CUDA), max(new))
    fp8attn.append(ours, x, rope, cu_seqlens=step.cu_seqlens, max_seqlen=step.max_seqlen, backend="triton")
    latent.append(theirs, x, rope, step)
    for a, b in zip(*(latent_of(p.pool, p.format.layout) for p in (ours, theirs)), strict=True):
        view = {1: torch.int8, 2: torch.int16, 4: torch.int32}[a.itemsize]
        assert torch.equal(a.view(view), b.view(view))  # poison, too
    assert torch.equal(ours.cache_seqlens, theirs.cache_seqlens)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [16, 20, 40, 128])
@pytest.mark.parametrize("lengths", [[1], [0, 63, 64, 65], [127, 128, 129, 0, 1], [1000, 5, 4096, 2049]], ids=str)
def test_steps(backend, heads, lengths):
    pages = filled(lengths, SPEC)
    q = torch.randn(len(lengths), heads, 576, device=CUDA).half()
    check(pages, q, AttentionParams(None, 1, True, SCALE), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kv_heads", "heads"), [(1, 16), (2, 16), (4, 32), (1, 40)])
@pytest.mark.parametrize("counts", [1, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_rope_in_codes(backend, kv_heads, heads, counts, padded):
    """Gemma 4's heads. Padding ends in both tiles of a page, and at its end."""
    lengths = [2000, 66, 129, 300]
    pages = latents.filled(lengths, IN_CODES, kv_heads, device=CUDA)
    pad = torch.tensor([1000, 3, 127, 128], dtype=torch.int32, device=CUDA) if padded else None
    q = 0.5 * torch.randn(counts * len(lengths), heads, 640, device=CUDA).half()
    check(pages, q, AttentionParams(None, counts, True, SCALE, leftpad_k=pad), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [16, 128])
def test_padding(backend, heads):
    pages = filled([900, 260, 130], SPEC)
    pad = torch.tensor([700, 3, 129], dtype=torch.int32, device=CUDA)
    q = torch.randn(3, heads, 576, device=CUDA).half()
    check(pages, q, AttentionParams(None, 1, True, SCALE, leftpad_k=pad), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [16, 64, 128])
@pytest.mark.parametrize("counts", [[4, 4, 4], [3, 1, 0], [2, 4, 1]], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_drafts(backend, heads, counts, causal):
    lengths = [700, 66, 2]
    pages = filled(lengths, SPEC, static=True)
    q = queries(sum(counts), heads, pages)
    bounds = None if len({*counts}) == 1 else cumulative(counts, CUDA)
    check(pages, q, AttentionParams(bounds, max(counts), causal, SCALE * 0.3), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [20, 40])
@pytest.mark.parametrize(("rank", "rope"), [(256, 32), (256, 0), (512, 128), (512, 0), (128, 64), (1024, 64)])
def test_other_shapes(backend, heads, rank, rope):
    """Ranks that Hopper's kernel does not have go to the portable one."""
    pages = filled([300, 129], PageSpec.latent(rank, rope), static=True)
    check(pages, queries(4, heads, pages), AttentionParams(None, 2, True, 0.03), backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{"window": 100}, {"leftpad_k": True}, {"causal": False}, {"window": 700, "leftpad_k": True}], ids=str
)
def test_options_and_prompts(backend, options):
    """A prompt of 200 tokens over 900. Hopper's kernel takes it without a window, and divides the keys."""
    pages = filled([900, 260], SPEC)
    q = torch.randn(400, 16, 576, device=CUDA).half()
    pad = torch.tensor([130, 3], dtype=torch.int32, device=CUDA) if options.get("leftpad_k") else None
    params = AttentionParams(
        None, 200, options.get("causal", True), SCALE, window=options.get("window", 0), leftpad_k=pad
    )
    check(pages, q, params, backend)


@pytest.mark.parametrize(
    ("spec", "kv_heads", "heads", "lengths", "counts", "options"),
    [
        (IN_CODES, 4, 32, [1030, 1030], [1030, 1030], {}),
        (IN_CODES, 2, 16, [3000, 2111], [1100, 1100], {}),
        (IN_CODES, 2, 16, [1200] * 3, [1200] * 3, {"leftpad_k": [500, 3, 128]}),
        (IN_CODES, 2, 16, [1000, 0, 1500, 777, 64], [1000, 0, 300, 777, 1], {}),
        (IN_CODES, 2, 16, [1500], [1100], {"causal": False}),
        (IN_CODES, 2, 40, [600], [600], {}),
        (SPEC, 1, 16, [1500], [1100], {}),
        (SPEC, 1, 128, [900, 300], [300, 290], {}),
        (SMALL, 1, 128, [400], [100], {}),
    ],
    ids=str,
)
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_prompts(spec, kv_heads, heads, lengths, counts, options):
    """Whole, on past tokens, padded on the left, of several lengths, and empty. A CTA has 64 rows."""
    pages = latents.filled(lengths, spec, kv_heads, device=CUDA)
    pad = torch.tensor(options["leftpad_k"], dtype=torch.int32, device=CUDA) if "leftpad_k" in options else None
    q = 0.5 * torch.randn(sum(counts), heads, spec.k_dim, device=CUDA).half()
    bounds = None if len({*counts}) == 1 else cumulative(counts, CUDA)
    causal = options.get("causal", True)
    check(pages, q, AttentionParams(bounds, max(counts), causal, SCALE, leftpad_k=pad), "hopper")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize(("seqs", "length"), [(1, 131072), (66, 8192), (3, 131071)])
def test_any_length_in_any_batch(backend, heads, mean, seqs, length):
    """The error of a tensor core's sum grows with the length and the batch. Ours must not."""
    pages = empty([length] * seqs, SPEC, device=CUDA)
    rows = length if seqs < 10 else length // 4
    for _ in range(length // rows):
        x, rope = tokens(seqs * rows, SPEC, torch.bfloat16, device=CUDA)
        fp8attn.append(pages, x + mean, rope, backend="triton")
    q = (torch.randn(seqs, heads, 576, device=CUDA) * 0.3).half()
    out, lse = fp8attn.attention(q, pages, softmax_scale=SCALE, return_lse=True, backend=backend)
    error, lse_error = bounds_of(backend, heads)
    for seq in (0, seqs - 1):
        one = KVPages(pages.pool, pages.page_table[seq : seq + 1], pages.cache_seqlens[seq : seq + 1], pages.format)
        ref, ref_lse = latent.attention(
            q[seq : seq + 1], one, AttentionParams(None, 1, True, SCALE), compute_dtype=torch.float64,
            out_dtype=torch.float64,
        )  # fmt: skip
        rounding = relative_error(ref.half(), ref)
        most = max(error, 0.003) if mean else error
        assert relative_error(out[seq : seq + 1], ref) ** 2 <= most**2 + rounding**2
        assert (lse[seq] - ref_lse).abs().max() <= lse_error


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads", [16, 128])
def test_graphs_replayed_at_once(backend, heads):
    """Two graphs on two streams, many calls each: equal bits in every one."""
    works = [(filled([900, 70, 1, 4000], SPEC), torch.randn(4, heads, 576, device=CUDA).half())
             for _ in range(2)]  # fmt: skip

    def call(pages, q):
        return fp8attn.attention(q, pages, softmax_scale=SCALE, return_lse=True, backend=backend)

    expected = [call(*work) for work in works]
    graphs, counts = [], []
    for work, (out, lse) in zip(works, expected, strict=True):
        count, graph = torch.zeros((), dtype=torch.int64, device=CUDA), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for _ in range(16):
                a, b = call(*work)
                count += (a.view(torch.int16) != out.view(torch.int16)).sum()
                count += (b.view(torch.int32) != lse.view(torch.int32)).sum()
        graphs.append(graph), counts.append(count)
    streams = [torch.cuda.Stream() for _ in works]
    for _ in range(REPLAYS):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    assert [int(count) for count in counts] == [0, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_in_a_graph_that_grows(backend):
    """One captured step, of append and attention, replayed from 120 to 140 tokens."""
    cache, theirs = (PagedKVCache(1, SPEC, num_seqs=2, device=CUDA, backend=name) for name in (backend, "reference"))
    prompt = tokens(240, SPEC, torch.bfloat16, device=CUDA)
    for each in (cache, theirs):
        each.reserve(300)
        each.append(0, *prompt)
    x, rope = tokens(2, SPEC, torch.bfloat16, device=CUDA)
    q = torch.randn(2, 16, 576, device=CUDA).bfloat16()
    pages = cache.pages(0)

    def step():
        fp8attn.append(pages, x, rope, backend=backend)
        return fp8attn.attention(q, pages, softmax_scale=SCALE, backend=backend)

    lengths, pool = pages.cache_seqlens.clone(), pages.pool.clone()
    step()
    pages.cache_seqlens.copy_(lengths), pages.pool.copy_(pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    pages.cache_seqlens.copy_(lengths), pages.pool.copy_(pool)
    for i in range(20):
        values = tokens(2, SPEC, torch.bfloat16, device=CUDA), torch.randn_like(q)
        x.copy_(values[0][0]), rope.copy_(values[0][1]), q.copy_(values[1])
        graph.replay()
        theirs.append(0, x, rope)
        ref = theirs.attention(0, q, softmax_scale=SCALE)
        torch.testing.assert_close(out, ref, rtol=2**-7, atol=6e-3, msg=lambda text, i=i: f"step {i}: {text}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_is_for_the_rows_that_see_it(backend):
    x, rope = tokens(140, SPEC, device=CUDA)
    x[138, 0, 3] = torch.nan
    pages = empty([140], SPEC, device=CUDA)
    fp8attn.append(pages, x, rope, backend="reference")
    q = torch.randn(4, 16, 576, device=CUDA).half()
    out = fp8attn.attention(q, pages, softmax_scale=SCALE, max_seqlen_q=4, backend=backend)
    assert out[2:].isnan().all() and not out[:2].isnan().any()


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_batch_invariant_is_refused():
    pages = filled([140], SPEC)
    q = torch.randn(1, 16, 576, device=CUDA).half()
    for backend in ("auto", "hopper", "triton"):
        with pytest.raises(UsageError, match="batch_invariant"):
            fp8attn.attention(q, pages, softmax_scale=SCALE, backend=backend, batch_invariant=True)


@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
def test_auto_is_hopper():
    pages = filled([140] * 3, SPEC)
    q = torch.randn(3, 16, 576, device=CUDA).half()
    auto, hopper = (fp8attn.attention(q, pages, softmax_scale=SCALE, backend=name) for name in ("auto", "hopper"))
    assert torch.equal(auto, hopper) and pages.pool.shape[-1] == PAGE_SIZE * 644
