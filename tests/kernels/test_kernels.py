"""The Triton kernels in Triton's interpreter, on a CPU (conftest.py sets TRITON_INTERPRET where there is no GPU)."""

import math
import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("the kernels run compiled here: see tests/gpu", allow_module_level=True)
pytest.importorskip("triton")

import triton
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder

import fp8attn
from fp8attn import AttentionParams, KVPages, reference
from fp8attn._torch_ops import flatten, flatten_pages
from fp8attn.formats.codec import E4M3, FP8
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.page_layout import PageLayout
from fp8attn.formats.rope import Rope
from fp8attn.kernels import combine as combining
from fp8attn.kernels import portable
from fp8attn.kernels.append import MAX_STRIDE, append, from_dense, rope_dense
from fp8attn.kernels.codec import from_e4m3, from_int8, round_to, to_e4m3
from fp8attn.kernels.combine import MAX_SPLITS, combine, num_splits
from fp8attn.kernels.launch import recording
from fp8attn.kernels.machine import Machine
from fp8attn.kernels.quantize_rows import quantize_rows
from fp8attn.numerics import relative_error
from fp8attn.params import Append
from tests.support.kernel_cases import (
    APPEND_EDGES,
    APPEND_FACTORS,
    ATTENTION_FACTORS,
    COUNTED,
    QUANTIZE_FACTORS,
    case_id,
    check_append,
    check_attention,
    check_counted,
    check_from_dense,
    check_out,
    clone,
    cumulative,
    empty_cache,
    fill,
    pairwise,
    poison_empty,
    random_tokens,
    run_attention,
)

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of Inf and NaN

EVERY_CODE = torch.arange(256, dtype=torch.uint8)


@pytest.fixture(autouse=True, scope="module")
def _dynamo_knows_torch():
    """Dynamo identifies torch's functions once, by object. So this runs before `torch.empty` is replaced."""
    torch.compile(lambda: torch.empty(1), backend="eager")()


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    torch.manual_seed(0)
    poison_empty(monkeypatch)


@triton.jit
def _convert(codes_ptr, halves_ptr, integers_ptr, x_ptr, quantized_ptr, bf16_ptr, N: tl.constexpr):
    i = tl.arange(0, 256)
    tl.store(halves_ptr + i, from_e4m3(tl.load(codes_ptr + i), False))
    tl.store(integers_ptr + i, from_int8(tl.load(codes_ptr + i)))
    i = tl.arange(0, N)
    x = tl.load(x_ptr + i)
    tl.store(quantized_ptr + i, to_e4m3(x, False))
    tl.store(bf16_ptr + i, round_to(x, tl.bfloat16, False))


@pytest.mark.triton36
def test_conversions_without_hardware_are_exact():
    exact = EVERY_CODE.view(torch.float8_e4m3fn).float()
    # Every value, every tie, and both neighbors of each; what is out of range, and what is hardly there.
    ties = torch.cat([exact[:-1], (exact[:-1] + exact[1:]) / 2])
    edges = torch.tensor([0.0, -0.0, 449.0, 464.0, 1e30, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-20, 2.0**-10, 2.0**-126])
    x = torch.cat([ties, torch.nextafter(ties, torch.tensor(torch.inf)), torch.nextafter(ties, torch.tensor(-torch.inf)), edges])
    x = torch.cat([x, torch.randn(4096 - len(x)) * torch.exp2(torch.randint(-30, 20, (4096 - len(x),)).float())])
    halves, integers = torch.zeros(2, 256).half()
    quantized, bf16 = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096).bfloat16()
    _convert[(1,)](EVERY_CODE, halves, integers, x, quantized, bf16, N=4096)
    assert torch.equal(integers.float(), EVERY_CODE.view(torch.int8).float())
    assert torch.equal(halves.float().nan_to_num(1e5), exact.nan_to_num(1e5))
    assert torch.equal(quantized, E4M3.quantize(x).view(torch.uint8))
    assert torch.equal(bf16.float().nan_to_num(7e30), x.bfloat16().float().nan_to_num(7e30))


@pytest.mark.parametrize("case", pairwise(APPEND_FACTORS), ids=case_id)
def test_append_writes_the_references_bytes(case):
    check_append(append, case)


@pytest.mark.triton36
@pytest.mark.parametrize("name", APPEND_EDGES)
def test_append_at_its_edges(name):
    check_append(append, APPEND_EDGES[name])


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize(
    ("head_dim", "key_dtype", "static"), [(64, torch.int8, False), (128, FP8, False), (64, FP8, True), (128, torch.int8, True)], ids=str
)
@pytest.mark.parametrize("name", COUNTED)
def test_append_of_counted_tokens(name, head_dim, key_dtype, static, backend):
    check_counted(backend, *COUNTED[name], head_dim, key_dtype, static)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("queries", [1, 5, 130])
@pytest.mark.parametrize("splits", [1, 3])
def test_attention_writes_into_a_given_output(queries, splits, backend, monkeypatch):
    monkeypatch.setattr(portable, "num_splits", lambda *_: splits)
    check_out(backend, 64, queries)


@pytest.mark.parametrize("case", pairwise(QUANTIZE_FACTORS), ids=case_id)
def test_from_dense_writes_the_references_bytes(case):
    check_from_dense(from_dense, case)


@pytest.mark.parametrize("rotary", [8, 64])
@pytest.mark.parametrize("interleaved", [False, True])
def test_no_angles_are_read_but_the_tables(rotary, interleaved, monkeypatch):
    """If RoPE rotates only some channels, a row has fewer angles than pairs of channels."""
    k, angle = random_tokens(80, 2, 64, torch.bfloat16).view(2, 40, 2, 64).transpose(1, 2), torch.randn(2, 40, rotary // 2)
    held = torch.zeros(3, *angle.shape)
    held[0], held[1] = angle.cos(), angle.sin()
    first, last = held.data_ptr(), held[2].data_ptr()
    read = []
    masked_load = InterpreterBuilder.create_masked_load

    def noting(self, ptrs, mask, *rest):
        read.append(ptrs.data[mask.data])
        return masked_load(self, ptrs, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", noting)
    from_dense(k, k, KVFormat(k.shape[3]), Rope(held[0], held[1], interleaved))
    addresses = torch.cat([torch.from_numpy(x.astype("int64")).flatten() for x in read])
    assert ((first <= addresses) & (addresses < last)).any()
    assert not ((last <= addresses) & (addresses < last + held[2].nbytes)).any()


def test_append_of_nothing():
    pages = empty_cache([128, 128], 2, 64)
    before = clone(pages)
    nothing = torch.zeros(0, 2, 64, dtype=torch.float16)
    append(pages, nothing, nothing, Append(None, 0))
    append(pages, nothing, nothing, Append(cumulative([0, 0]), 5))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before.tensors, pages.tensors, strict=True))


@pytest.mark.parametrize("case", pairwise(ATTENTION_FACTORS), ids=case_id)
def test_attention_against_float64(case, monkeypatch):
    monkeypatch.setattr(portable, "num_splits", lambda *_: case["splits"])
    check_attention(portable.portable_attention, case)


ARGUMENTS = {
    "cu_seqlens_q": None,
    "max_seqlen_q": 1,
    "causal": True,
    "softmax_scale": 0.125,
    "window": 0,
    "softcap": 0.0,
    "sinks": None,
    "leftpad_k": None,
    "return_lse": True,
}


@pytest.mark.triton36
@pytest.mark.parametrize("key_dtype", [torch.int8, FP8], ids=str)
@pytest.mark.parametrize("splits", [1, 40])
@pytest.mark.parametrize(("k", "v"), [(0.0, 1.0), (8.0, None), (0.0, None), ("needle", 1.0)], ids=str)
def test_attention_of_extremes(k, v, splits, key_dtype, monkeypatch):
    """Flat and peaked scores, constant V, means that are not removed."""
    monkeypatch.setattr(portable, "num_splits", lambda *_: splits)
    length, heads = 700, 2
    pages = empty_cache([length], heads, 64, key_dtype=key_dtype)
    keys = torch.randn(length, heads, 64) * (0.0 if k == "needle" else k)
    values = torch.full((length, heads, 64), v) if v else torch.randn(length, heads, 64) + 1
    q = torch.randn(1, 8, 64).half()
    if k == "needle":  # one key that weighs about as much as all others together, with a value of its own
        keys[333] = q[0, ::4].float() * 0.8
        values[333] = torch.randn(heads, 64)
    fill(pages, keys, values, [length])
    run_attention(portable.portable_attention, pages, q, ARGUMENTS)


@pytest.mark.parametrize("key_dtype", [torch.int8, FP8], ids=str)
def test_rounding_rotated_queries_costs_little(key_dtype):
    """Rounding Q to FP16 is off by up to 2^-12 of an element, 2e-4 in the mean square. Where the scores' deviation is 1 as here, the
    weights are off by so much each. Rounding P adds 2e-4."""
    pages = empty_cache([300], 2, 128, key_dtype=key_dtype)
    fill(pages, torch.randn(300, 2, 128), torch.randn(300, 2, 128), [300])
    q = torch.randn(16, 8, 128).half()
    arguments = ARGUMENTS | {"max_seqlen_q": 16, "softmax_scale": 128**-0.5}
    ref, _ = reference.attention(q, pages, AttentionParams(**arguments), compute_dtype=torch.float64, out_dtype=torch.float64)
    out, _ = portable.portable_attention(q, pages, AttentionParams(**arguments))
    assert relative_error(out, ref) ** 2 < 2 * 2e-4**2 + relative_error(ref.half(), ref) ** 2


@pytest.mark.parametrize("rotate", [True, False])
def test_large_and_tiny_queries_keep_their_digits(rotate):
    pages = empty_cache([40], 1, 64, rotate=rotate)
    fill(pages, random_tokens(40, 1, 64, torch.float16), torch.randn(40, 1, 64), [40])
    q = (torch.randn(1, 4, 64) * torch.tensor([1e-30, 1e-6, 1e5, 1e20])[None, :, None]).bfloat16()
    for scale in (0.125, 1e-5, 1e-20, 0.0):
        arguments = ARGUMENTS | {"softmax_scale": scale}
        ref, _ = reference.attention(q, pages, AttentionParams(**arguments), compute_dtype=torch.float64, out_dtype=torch.float64)
        out, _ = portable.portable_attention(q, pages, AttentionParams(**arguments))
        torch.testing.assert_close(out.double(), ref, rtol=2**-8, atol=2e-3)


def test_nan_in_a_value_is_not_hidden():
    pages = empty_cache([40, 40], 1, 64)
    v = torch.randn(80, 1, 64)
    v[3, 0, 5] = torch.nan
    fill(pages, torch.randn(80, 1, 64), v, [40, 40])
    out, _ = portable.portable_attention(torch.randn(2, 2, 64).half(), pages, AttentionParams(**ARGUMENTS))
    assert out[0, :, 5].isnan().all()
    assert int(out.isnan().sum()) == 2


@pytest.mark.parametrize("softcap", [0.0, 20.0])
@pytest.mark.parametrize("queries", [2, 30])  # tiles whose warps share the keys, and tiles whose warps share the rows
@pytest.mark.parametrize(("key_dtype", "token"), [(torch.int8, 129), (FP8, 130)], ids=str)
def test_nan_in_a_key_is_for_the_rows_that_see_it(key_dtype, token, queries, softcap):
    """E4M3 has a NaN for the token; INT8 makes the scale of the page NaN, and so all tokens of the page. Rows before it are as without."""
    pages = empty_cache([132], 1, 64, key_dtype=key_dtype)
    k, v = torch.randn(132, 1, 64), torch.randn(132, 1, 64)
    k[130, 0, 7] = torch.nan
    fill(pages, k, v, [132])
    q = torch.randn(queries, 8, 64).half()
    arguments = ARGUMENTS | {"max_seqlen_q": queries, "softcap": softcap}
    ref, ref_lse = reference.attention(q, pages, AttentionParams(**arguments))
    out, lse = portable.portable_attention(q, pages, AttentionParams(**arguments))
    sees = 132 - queries + torch.arange(queries) >= (128 if key_dtype == torch.int8 else 130)
    assert torch.equal(ref.isnan(), sees[:, None, None].expand_as(ref)) and torch.equal(out.isnan(), ref.isnan())
    assert torch.equal(lse.isnan(), ref_lse.isnan())
    torch.testing.assert_close(out[~sees].float(), ref[~sees].float(), rtol=2**-10, atol=2e-3)


def test_no_queries():
    pages = empty_cache([40], 1, 64)
    out, lse = portable.portable_attention(torch.zeros(0, 2, 64).half(), pages, AttentionParams(**ARGUMENTS | {"max_seqlen_q": 0}))
    assert out.shape == (0, 2, 64)
    assert lse.shape == (0, 2)


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("splits", [1, 3])
def test_rows_behind_the_last_sequence_are_zeros(splits, sinks, backend, monkeypatch):
    """A serving engine pads its batches. The memory of the output is poisoned here."""
    monkeypatch.setattr(portable, "num_splits", lambda *_: splits)
    pages, q = _cache_and_queries()
    q, logits = torch.cat([q, torch.randn(20, 4, 64).half()]), torch.randn(4) if sinks else None
    bounds = torch.tensor([0, 1, 2], dtype=torch.int32)
    out, lse = fp8attn.attention(q, pages, cu_seqlens_q=bounds, max_seqlen_q=1, sinks=logits, return_lse=True, backend=backend)
    alone, alone_lse = fp8attn.attention(q[:2], pages, sinks=logits, return_lse=True, backend=backend)
    assert torch.equal(out[:2], alone) and torch.equal(lse[:2], alone_lse)
    assert not out[2:].any() and not out[2:].isnan().any()


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_an_idle_step_is_no_error(backend):
    """No sequence has a query, or there is no sequence at all, and the batch has rows to spare."""
    pages, _ = _cache_and_queries()
    q = torch.randn(8, 4, 64).half()
    none = KVPages.empty(4, 2, 64, num_seqs=0, max_pages=2)
    for held, bounds in ((pages, torch.zeros(3, dtype=torch.int32)), (none, torch.zeros(1, dtype=torch.int32))):
        out, lse = fp8attn.attention(q, held, cu_seqlens_q=bounds, max_seqlen_q=0, return_lse=True, backend=backend)
        assert out.shape == q.shape and out.dtype == q.dtype and not out.any() and (lse == -torch.inf).all()
        k, before = torch.randn(8, 2, 64).half(), held.cache_seqlens.clone()
        angle = torch.randn(8, 32)
        turned = fp8attn.append(
            held, k, k, q=q, cu_seqlens=bounds, max_seqlen=0, rope_cos=angle.cos(), rope_sin=angle.sin(), backend=backend
        )
        assert torch.equal(held.cache_seqlens, before) and not turned.isnan().any()
    assert fp8attn.attention(q[:0], none, backend=backend).shape == (0, 4, 64)


def test_the_hopper_kernels_need_no_table(monkeypatch):
    """A sequence without pages has a table without columns."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from fp8attn.kernels import decode, prefill

    pages = KVPages.empty(4, 2, 64, num_seqs=2, max_pages=0)
    for attention, queries in ((decode.decode_attention, 1), (prefill.prefill_attention, 100)):
        q = torch.randn(2 * queries, 4, 64).half()
        out, lse = attention(q, pages, AttentionParams(**ARGUMENTS | {"max_seqlen_q": queries}))
        assert not out.any() and (lse == -torch.inf).all()


def test_a_pool_beyond_tma_s_coordinates_is_refused():
    """TMA counts pages of a head in 32 bits; both Hopper kernels ask for these views."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from fp8attn.kernels.pages import _views

    assert _views((2**31 - 1, 1, PageLayout.of(128).nbytes), 128, torch.int8, 128, 128)
    with pytest.raises(ValueError, match="split them over several pools"):
        _views((2**28, 8, PageLayout.of(128).nbytes), 128, torch.int8, 128, 128)


def test_decode_has_work_for_a_slice_of_a_gpu():
    """A seventh of an H100 (MIG) has 16 multiprocessors or fewer, and at head_dim 256 many query rows are several tiles."""
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from fp8attn.kernels.decode import DecodeShape

    for sms in (1, 7, 14, 132):
        for rows in (1, 16, 128):
            assert DecodeShape(head_dim=256, group=rows, max_rows=rows, num_seqs=1).workers(sms, heads=3) >= 1


def test_integers_may_stand_for_floats():
    pages, q = _cache_and_queries()
    options = {"softcap": 30.0, "softmax_scale": 1.0, "backend": "triton"}
    expected = fp8attn.attention(q, pages, **options)
    assert torch.equal(fp8attn.attention(q, pages, **options | {"softcap": 30, "softmax_scale": 1}), expected)


def test_a_window_may_be_wider_than_32_bits():
    pages, q = _cache_and_queries()
    expected = fp8attn.attention(q, pages, backend="triton")
    assert torch.equal(fp8attn.attention(q, pages, window=2**31 - 1, backend="triton"), expected)
    assert torch.equal(fp8attn.attention(q, pages, window=2**32, backend="triton"), expected)


def test_no_batch_is_too_large_for_a_grid(monkeypatch):
    """Only the first dimension of a CUDA grid goes beyond 65,535."""
    monkeypatch.setattr(portable, "_device", lambda device: (132, 232448))
    for module in ("append", "combine", "portable", "quantize_rows"):
        monkeypatch.setattr(f"fp8attn.kernels.{module}.is_native", lambda device: True)
    monkeypatch.setattr("fp8attn.kernels.append.num_sms", lambda device: 132)
    monkeypatch.setattr("fp8attn.kernels.append.machine", lambda device: Machine(132, 232448, True))
    batch, half = 70_000, {"dtype": torch.float16, "device": "meta"}
    x = torch.empty(batch, 2, 16, 64, **half)
    angle = torch.empty(batch, 16, 32, device="meta")
    rope = Rope(angle, angle)
    tokens, prompt = torch.empty(batch, 2, 64, **half), torch.empty(40 * batch, 2, 64, **half)
    bounds = torch.empty(batch + 1, dtype=torch.int32, device="meta")
    with recording(dry=True) as launches:
        pages = from_dense(x, x, KVFormat(64), rope)
        from_dense(x.to(FP8), x.to(FP8), KVFormat(64, E4M3, rotate=False), None)
        rope_dense(x, rope)
        quantize_rows(x, rope=rope, rotate_keys=True, subtract_mean=True, heads_per_scale=1, codec=E4M3)
        append(pages, tokens, tokens, Append(None, 1))
        append(pages, prompt, prompt, Append(None, 40))
        append(pages, prompt, prompt, Append(bounds, 40))
        portable.portable_attention(tokens.repeat(1, 2, 1), pages, AttentionParams(**ARGUMENTS))
    assert len({note.kernel.fn.__name__ for note in launches}) == 8
    for note in launches:
        assert note.grid[0] < 2**31 and all(programs < 65_536 for programs in note.grid[1:]), (note.kernel.fn.__name__, note.grid)


def test_splits_fill_the_machine():
    assert num_splits(1000, 64, 264) == 1
    assert 16 <= num_splits(8, 64, 264) <= 33
    assert num_splits(8, 1, 264) == 1
    assert num_splits(128, 64, 264) == 2
    assert num_splits(1, 8192, 264) <= MAX_SPLITS


def _cache_and_queries():
    pages = empty_cache([150, 30], 2, 64, mean=1.0)
    fill(pages, torch.randn(180, 2, 64), torch.randn(180, 2, 64), [150, 30])
    return pages, torch.randn(2, 4, 64).half()


@pytest.mark.triton36
@pytest.mark.parametrize(("splits", "many"), [(3, False), (3, True), (40, False), (40, True)])
def test_parts_come_together(splits, many, monkeypatch):
    monkeypatch.setattr(combining, "MANY", 1 if many else 1 << 20)
    combining._plan.cache_clear()
    batch, tokens, heads, dim = 2, 7, 3, 48  # 42 rows: not a multiple of what a program takes
    parts, lse = torch.randn(splits, batch * tokens * heads, dim), 4 * torch.randn(splits, batch * tokens * heads)
    hidden = torch.rand(lse.shape) < 0.3
    hidden[:, 5] = True  # a row that no part has keys for
    lse[hidden], parts[hidden] = -torch.inf, torch.nan
    mean_score, sinks = torch.randn(lse.shape[1]), torch.randn(heads)
    out, out_lse = torch.empty(batch, heads, tokens, dim).transpose(1, 2), torch.empty(batch, tokens, heads)
    combine(parts, torch.stack([lse, mean_score.expand_as(lse)]), sinks, out, out_lse)
    scores = torch.cat([(lse + mean_score) * math.log(2), sinks.repeat(batch * tokens)[None]]).double()
    weights = torch.softmax(scores, 0)[:-1]
    exact = (weights[:, :, None] * parts.double().nan_to_num()).sum(0).unflatten(0, (batch, tokens, heads))
    torch.testing.assert_close(out.double(), exact, rtol=2e-6, atol=2e-6)  # FP32, in another order
    torch.testing.assert_close(out_lse.double().flatten(), torch.logsumexp(scores, 0), rtol=2e-6, atol=2e-6)


@pytest.mark.triton36
def test_ops_run_the_kernels_and_pass_opcheck():
    pages, q = _cache_and_queries()
    expected = fp8attn.attention(q, pages, backend="reference")
    assert torch.allclose(fp8attn.attention(q, pages, backend="triton").float(), expected.float(), atol=2e-3)
    options = flatten(AttentionParams(None, 1, True, 0.125, return_lse=True, exact=True))
    torch.library.opcheck(torch.ops.fp8attn.attention, (q, *flatten_pages(pages), *options, "triton"))
    token = torch.randn(2, 2, 64).half()
    overflows = torch.zeros(2, 3, dtype=torch.int64)
    arguments = (token, token.clone(), *flatten_pages(pages), None, None, *flatten(Append(None, 1, overflows=overflows)), "triton")
    torch.library.opcheck(torch.ops.fp8attn.append, arguments, test_utils=("test_schema", "test_autograd_registration", "test_faketensor"))


def test_a_compiled_step_calls_the_kernels(monkeypatch):
    monkeypatch.undo()  # Dynamo does not trace a replaced torch.empty
    pages, q = _cache_and_queries()
    twin = clone(pages)
    token = torch.randn(2, 2, 64).half()

    angle = torch.randn(2, 32)

    def step(pages):
        turned = fp8attn.append(pages, token, token, q=q, rope_cos=angle.cos(), rope_sin=angle.sin(), backend="triton")
        return fp8attn.attention(turned, pages, backend="triton")

    expected = step(twin)
    actual = torch.compile(step, backend="aot_eager", fullgraph=True)(pages)
    assert torch.equal(actual, expected)
    assert torch.equal(pages.pool, twin.pool) and torch.equal(pages.cache_seqlens, twin.cache_seqlens)


def test_tokens_that_are_too_far_apart_are_refused():
    """Offsets in a page have 32 bits. A sequence of one token may have any stride, and one of the longest that is taken is written."""
    far = torch.zeros(MAX_STRIDE + 200, dtype=torch.bfloat16)

    def apart(stride: int, length: int = 2) -> torch.Tensor:
        return far.as_strided((1, 1, length, 64), (64, 64, stride, 1))

    near = torch.zeros(1, 1, 2, 64, dtype=torch.bfloat16)
    for k, v, name in ((apart(MAX_STRIDE + 1), near, "k"), (near, apart(MAX_STRIDE + 1), "v")):
        with pytest.raises(ValueError, match=rf"{name} has {MAX_STRIDE + 1} elements from one token .* pass {name}\.contiguous\(\)"):
            from_dense(k, v, KVFormat(64), None)
    assert from_dense(apart(MAX_STRIDE), near, KVFormat(64), None).cache_seqlens.tolist() == [2]
    assert from_dense(apart(2**30, 1), near[:, :, :1], KVFormat(64), None).cache_seqlens.tolist() == [1]


@pytest.mark.parametrize("strides", ["rows apart", "every second column", "of cos and sin apart", "one row for all"])
def test_tables_of_rope_may_have_any_strides(strides):
    torch.manual_seed(0)
    x, wide = torch.randn(2, 2, 128, 64).bfloat16(), torch.randn(2, 128, 128)
    cos, sin = {
        "rows apart": (wide[..., :32], wide[..., 32:64]),
        "every second column": (wide[..., ::4], wide[..., 1::4]),
        "of cos and sin apart": (wide[..., ::4], wide[..., :32].contiguous()),
        "one row for all": (wide[:, :1, :32].expand(-1, 128, -1), wide[:1, :1, :32].expand(2, 128, -1)),
    }[strides]
    given, plain = Rope(cos, sin, True), Rope(cos.contiguous(), sin.contiguous(), True)
    assert torch.equal(rope_dense(x, given), rope_dense(x, plain)) and torch.equal(rope_dense(x, given), reference.rope_dense(x, given))
    ours, theirs = (from_dense(x, x, KVFormat(64), rope) for rope in (given, plain))
    assert torch.equal(ours.k, theirs.k) and torch.equal(ours.k_scale, theirs.k_scale)
