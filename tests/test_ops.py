"""The public ops: refusals, registration, compilation."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import fp8attn
from fp8attn import AttentionParams, KVPages, PagedKVCache, attention
from fp8attn._torch_ops import flatten_format, flatten_pages
from fp8attn.backends import load
from fp8attn.formats.codec import CODECS, E4M3, INT8, codec_of
from fp8attn.formats.kv_format import KVFormat
from fp8attn.formats.spec import PageSpec
from fp8attn.params import Append
from tests.support.kernel_cases import clone


@pytest.fixture
def cache():
    torch.manual_seed(0)
    cache = PagedKVCache(2, 64, num_seqs=2)
    cache.append(0, torch.randn(20, 2, 64), torch.randn(20, 2, 64))
    return cache


@pytest.mark.parametrize(
    ("q", "options", "message"),
    [
        (torch.zeros(3, 4, 64), {}, "cannot be divided evenly among 2 sequences; give cu_seqlens_q and max_seqlen_q"),
        (torch.zeros(2, 3, 64), {}, "num_q_heads a multiple of 2"),
        (torch.zeros(2, 0, 64), {}, "num_q_heads a multiple of 2"),
        (torch.zeros(2, 4, 128), {}, r"\[T, num_q_heads, 64\]"),
        (torch.zeros(2, 64), {}, r"\[T, heads, head_dim\]"),
        (
            torch.zeros(1, 4, 2, 64),
            {},
            r"\(1, 4, 2, 64\): pass q.transpose\(1, 2\).flatten\(0, 1\) if q is \[B, num_q_heads, S, head_dim\]",
        ),
        (torch.zeros(2, 1, 4, 64), {}, r"q.flatten\(0, 1\) if it is \[B, S, num_q_heads, head_dim\]"),
        (torch.zeros(2, 64, 4).transpose(1, 2), {}, "last dimension contiguous"),
        (torch.zeros(2, 4, 64), {"window": 0}, "window must be an integer from 1"),
        (
            torch.zeros(2, 4, 64),
            {"window": (4, 0)},
            r"window must be an integer from 1 .* got window=\(4, 0\), causal=True",
        ),
        (
            torch.zeros(2, 4, 64),
            {"leftpad_k": [1, 0]},
            r"leftpad_k, one count per sequence, must be a tensor \(2,\) on cpu; got list",
        ),
        (torch.zeros(2, 4, 64), {"window": 5, "causal": False}, "needs causal=True.* got window=5, causal=False"),
        (torch.zeros(2, 4, 64), {"softcap": -1.0}, "None for no cap"),
        (torch.zeros(2, 4, 64), {"sinks": torch.zeros(2)}, "one logit per query head"),
        (torch.zeros(2, 4, 64), {"sinks": torch.zeros(4, device="meta")}, r"on cpu; got \(4,\) float32 on meta"),
        (torch.zeros(2, 4, 64), {"leftpad_k": torch.zeros(3)}, "one count per sequence"),
        (torch.zeros(2, 4, 64), {"leftpad_k": torch.zeros(2, device="meta")}, r"on cpu; got \(2,\) float32 on meta"),
        (torch.zeros(2, 4, 64), {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32)}, "needs max_seqlen_q"),
        (
            torch.zeros(4, 4, 64),
            {"max_seqlen_q": 3},
            "every sequence has 2 tokens, and max_seqlen_q is 3: give both or neither",
        ),
        (torch.zeros(2, 4, 64), {"cu_seqlens_q": torch.zeros(3), "max_seqlen_q": 1}, "int32"),
        (
            torch.zeros(2, 4, 64),
            {"cu_seqlens_q": torch.zeros(3, dtype=torch.int32, device="meta"), "max_seqlen_q": 1},
            "int32 on cpu",
        ),
        (
            torch.zeros(2, 4, 64),
            {"cu_seqlens_q": torch.zeros(3).int(), "max_seqlen_q": torch.tensor(1)},
            "must be a Python int",
        ),
        (torch.zeros(2, 4, 64), {"cu_seqlens_q": torch.zeros(3).int(), "max_seqlen_q": -1}, "Python int >= 0"),
        (
            torch.zeros(2, 4, 64),
            {"cu_seqlens_q": torch.zeros(3, 2).int()[:, 0], "max_seqlen_q": 1},
            r"call \.contiguous\(\)",
        ),
        (torch.zeros(2, 4, 64), {"sinks": torch.zeros(4, 2)[:, 0]}, r"call \.contiguous\(\)"),
        (torch.zeros(2, 4, 64), {"sinks": torch.zeros(4).int()}, "floating point"),
        (torch.zeros(2, 4, 64), {"leftpad_k": torch.zeros(2, dtype=torch.int64)}, "int32 on cpu; got .* int64"),
        (torch.zeros(2, 4, 64), {"leftpad_k": torch.zeros(2, 2).int()[:, 0]}, r"call \.contiguous\(\)"),
        (
            torch.zeros(2, 4, 64),
            {"out": torch.zeros(2, 4, 128)},
            r"out must be \(2, 4, 64\) float32 on cpu; got \(2, 4, 128\) float32",
        ),
        (torch.zeros(2, 4, 64), {"out": torch.zeros(2, 4, 64).half()}, "out must be .* float32 on cpu; got .* float16"),
        (torch.zeros(2, 4, 64), {"out": torch.zeros(2, 4, 64, device="meta")}, "on cpu; got .* on meta"),
        (torch.zeros(2, 4, 64), {"out": torch.zeros(4, 2, 64).transpose(0, 1)}, "out must be contiguous"),
        (
            torch.zeros(2, 4, 64),
            {"backend": "fastest"},
            "unknown backend 'fastest'; choose 'auto', 'hopper', 'triton', 'reference'",
        ),
        (
            torch.zeros(2, 4, 64),
            {"backend": "fa3"},
            "backend 'fa3' takes dense K and V, not pages; choose 'auto', 'hopper'",
        ),
        (torch.zeros(2, 4, 64), {"backend": "triton"}, r"bfloat16 and float16, not torch.float32 \(cast a model: "),
        (torch.zeros(2, 4, 64, dtype=torch.int32), {}, "must be floating point"),
        (torch.zeros(2, 4, 64, device="meta"), {}, "the cache is on cpu and q is on meta"),
    ],
)
def test_refusals_say_what_would_do(cache, q, options, message):
    with pytest.raises(ValueError, match=message):
        attention(q, cache.pages(0), **options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"v": torch.zeros(2, 2, 100, 64).bfloat16()},
            r"of one shape .* got \(2, 2, 100, 64\) torch.float32 .* torch.bfloat16",
        ),
        ({"v": torch.zeros(2, 2, 99, 64)}, "k and v must be of one shape"),
        ({"k": torch.zeros(2, 2, 0, 64), "v": torch.zeros(2, 2, 0, 64)}, "not empty"),
        ({"k": torch.zeros(2, 2, 9, 72), "v": torch.zeros(2, 2, 9, 72)}, r"head_dim must be one of \(64, 80.*; got 72"),
        ({"k": torch.zeros(2, 100, 64)}, r"k must be \[B, heads, S, head_dim\]"),
        ({"k": torch.zeros(2, 2, 64, 100).mT}, "last dimension contiguous"),
        ({"k_mean": torch.zeros(2, 2, 64)}, r"k_mean must be \(2, 64\) float32 on cpu; got \(2, 2, 64\)"),
        ({"v_mean": torch.zeros(2, 64).half()}, "v_mean must be .* float32 on cpu; got .* float16"),
        ({"key_dtype": "fp8"}, "key_dtype must be one of 'int8', 'e4m3'; got 'fp8'"),
        ({"key_dtype": torch.int8}, "key_dtype must be one of 'int8', 'e4m3'; got torch.int8"),
        ({"backend": "fastest"}, "unknown backend"),
    ],
)
def test_from_dense_says_what_would_do(changed, message):
    arguments = {"k": torch.zeros(2, 2, 100, 64), "v": torch.zeros(2, 2, 100, 64)} | changed
    with pytest.raises(ValueError, match=message):
        fp8attn.from_dense(arguments.pop("k"), arguments.pop("v"), **arguments)


def test_from_dense_leaves_e4m3_to_the_quantized_sdpa():
    x = torch.randn(2, 2, 100, 64).to(torch.float8_e4m3fn)
    for options in ({}, {"key_dtype": "e4m3", "rotate_keys": False}):
        with pytest.raises(
            ValueError, match=r"are torch.float8_e4m3fn already: .* fp8attn.scaled_dot_product_attention_quantized"
        ):
            fp8attn.from_dense(x, x, **options)
    pages = load("reference").from_dense(x, x, KVFormat(PageSpec.of(64, "e4m3").name, rotate=False))
    for seq in range(2):
        assert all(torch.equal(got, x[seq].float().transpose(0, 1)) for got in pages.read(seq, 100))


@pytest.mark.parametrize("key_dtype", list(CODECS))
@pytest.mark.parametrize("rotate_keys", [True, False])
def test_from_dense_is_a_first_append(key_dtype, rotate_keys):
    torch.manual_seed(0)
    k, v, mean = torch.randn(2, 2, 150, 64), torch.randn(2, 2, 150, 64), torch.randn(2, 64)
    k[0, :, 140] *= 100
    pages = fp8attn.from_dense(k, v, key_dtype=key_dtype, rotate_keys=rotate_keys, k_mean=mean)
    assert (pages.format.k, pages.format.rotate, pages.format.v_mean) == (codec_of(key_dtype), rotate_keys, None)
    assert pages.page_table.tolist() == [[0, 1], [2, 3]] and pages.cache_seqlens.tolist() == [150, 150]
    empty = KVPages.empty(4, 2, 64, 2, 2, key_dtype=key_dtype, rotate_keys=rotate_keys, k_mean=mean)
    empty.page_table.copy_(pages.page_table)
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (k, v))
    fp8attn.append(empty, *flat)
    assert torch.equal(empty.pool, pages.pool)


@pytest.mark.parametrize("rotate_keys", [True, False])
def test_a_k_mean_is_of_k_itself_wherever_it_is_given(rotate_keys):
    torch.manual_seed(0)
    mean, v = torch.randn(2, 64) * 20, torch.randn(1, 2, 128, 64)
    k = torch.randn(1, 2, 128, 64) + mean[:, None]
    given = {"rotate_keys": rotate_keys, "k_mean": mean}
    dense = fp8attn.from_dense(k, v, **given)
    empty, cache = KVPages.empty(1, 2, 64, 1, 1, **given), fp8attn.PagedKVCache(2, 64, **given)
    for append in (partial(fp8attn.append, empty), partial(cache.append, 0)):
        append(*(x[0].transpose(0, 1).contiguous() for x in (k, v)))
    assert torch.equal(empty.pool, dense.pool) and torch.equal(cache.pages(0).pool, dense.pool)
    fake, _ = fp8attn.fake_quantize(k, v, **given)
    for read in (dense.read(0, 128)[0], empty.read(0, 128)[0], cache.read(0, 0)[0], fake[0].transpose(0, 1)):
        assert (
            (read - k[0].transpose(0, 1)).norm() / (k - mean[:, None]).norm()
        ) < 0.02  # of what is left without the mean


def test_empty_pages_are_of_one_sequence_each():
    pages = KVPages.empty(5, 2, 64, num_seqs=2, max_pages=2)
    assert pages.page_table.tolist() == [[0, 1], [2, 3]]
    assert not KVPages.empty(
        3, 2, 64, num_seqs=2, max_pages=2
    ).page_table.any()  # too few pages: the caller divides them
    torch.manual_seed(0)
    k, v, q = torch.randn(2, 200, 2, 64), torch.randn(2, 200, 2, 64), torch.randn(2, 200, 4, 64)
    fp8attn.append(pages, k.flatten(0, 1), v.flatten(0, 1))
    out = attention(q.flatten(0, 1), pages).unflatten(0, (2, -1))
    expected = F.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, enable_gqa=True
    ).transpose(1, 2)
    assert (out - expected).norm() / expected.norm() < 0.05


@pytest.mark.parametrize(
    ("k", "v", "options", "message"),
    [
        (
            torch.zeros(3, 2, 64),
            None,
            {},
            "3 tokens cannot be divided evenly among 2 sequences; give cu_seqlens and max_seqlen",
        ),
        (torch.zeros(4, 3, 64), None, {}, r"must both be \[T, 2, 64\] and have one dtype; got \(4, 3, 64\)"),
        (torch.zeros(4, 2, 64), torch.zeros(2, 2, 64), {}, r"must both be \[T, 2, 64\]"),
        (
            torch.zeros(4, 2, 64),
            torch.zeros(4, 2, 64).half(),
            {},
            "have one dtype; got .* torch.float32 and .* torch.float16",
        ),
        (torch.zeros(4, 64), None, {}, r"\[T, heads, head_dim\]"),
        (torch.zeros(4, 64, 2).mT, None, {}, "last dimension contiguous"),
        (
            torch.zeros(4, 2, 64),
            None,
            {"cu_seqlens": torch.zeros(2).int(), "max_seqlen": 1},
            r"cu_seqlens must be \(3,\) int32",
        ),
        (torch.zeros(4, 2, 64, device="meta"), None, {}, "the cache is on cpu and k is on meta"),
        (torch.zeros(4, 2, 64), None, {"backend": "fastest"}, "unknown backend"),
    ],
)
def test_append_says_what_would_do(cache, k, v, options, message):
    before = cache.pages(0).pool.clone()
    with pytest.raises(ValueError, match=message):
        fp8attn.append(cache.pages(0), k, k if v is None else v, **options)
    assert torch.equal(cache.pages(0).pool, before) and cache.pages(0).cache_seqlens.tolist() == [10, 10]


def test_a_cache_in_place_of_its_pages_is_refused(cache):
    x = torch.zeros(2, 2, 64)
    with pytest.raises(
        TypeError, match=r"append\(pages, k, v\) takes KVPages, and got PagedKVCache: .* pass cache\.pages\(layer\)"
    ):
        fp8attn.append(cache, x, x)
    with pytest.raises(TypeError, match=r"attention\(q, pages\) takes KVPages, and got Tensor"):
        attention(cache.pages(0), x)


def test_append_needs_the_longest_of_ragged_sequences(cache):
    k = torch.zeros(2, 2, 64)
    with pytest.raises(ValueError, match="cu_seqlens needs max_seqlen"):
        fp8attn.append(cache.pages(0), k, k, cu_seqlens=torch.tensor([0, 1, 2], dtype=torch.int32))


def test_append_does_not_count_tokens_that_are_counted(cache):
    """The bytes of an append that advances the lengths; a sequence that is shorter than its new tokens is padding."""
    cache.reserve(200)
    k, v = torch.randn(2, 150, 2, 64)
    expected = clone(cache.pages(0))
    fp8attn.append(expected, k, v)
    pages = cache.pages(0)
    pages.cache_seqlens.copy_(expected.cache_seqlens)
    fp8attn.append(pages, k, v, advance=False)
    assert torch.equal(pages.pool, expected.pool) and pages.cache_seqlens.tolist() == [85, 85]
    pages.cache_seqlens.copy_(torch.tensor([0, 74]))
    fp8attn.append(pages, -k, -v, advance=False)
    assert torch.equal(pages.pool, expected.pool) and pages.cache_seqlens.tolist() == [0, 74]


def test_attention_writes_where_it_is_asked_to(cache):
    buffer = torch.full((6, 4, 64), torch.nan)
    q = torch.randn(4, 4, 64)
    for queries, out in (
        (q, buffer[1:5]),
        (q, torch.empty(1 + q.numel())[1:].view_as(q)),
        (q[:0], buffer[:0]),
    ):  # aligned, not, empty
        assert attention(queries, cache.pages(0), out=out) is out
        assert torch.equal(out, attention(queries, cache.pages(0)))
    found, lse = attention(q, cache.pages(0), out=buffer[1:5], return_lse=True)
    assert found.data_ptr() == buffer[1].data_ptr() and lse.shape == (4, 4)
    assert buffer[::5].isnan().all() and not buffer[1:5].isnan().any()


def test_queries_and_output_share_no_memory(cache):
    memory = torch.zeros(7, 4, 64)
    fused = torch.zeros(2, 12, 64)
    for q, out in ((memory[:4], memory[:4]), (memory[:4], memory[3:]), (fused[:, :4], fused.view(6, 4, 64)[1:3])):
        with pytest.raises(ValueError, match="out shares memory with q"):
            attention(q, cache.pages(0), out=out)
    attention(memory[:2], cache.pages(0), out=memory[2:4])


def test_a_compiled_call_writes_where_it_is_asked_to(cache):
    """The torch op has no argument that it writes, so its result is copied."""
    q, out = torch.randn(4, 4, 64), torch.full((6, 4, 64), torch.nan)
    compiled = torch.compile(
        lambda q, out: attention(q, cache.pages(0), out=out[1:5]), fullgraph=True, backend="aot_eager"
    )
    expected = attention(q, cache.pages(0))
    assert torch.equal(compiled(q, out), expected)
    assert torch.equal(out[1:5], expected) and out[::5].isnan().all()


def test_ops_pass_torch_opcheck(cache):
    cache.reserve(40)
    k = torch.randn(4, 2, 64)
    q = torch.randn(4, 4, 64)
    options = *Append(None, 2), "reference"
    torch.library.opcheck(torch.ops.fp8attn.append, (k, k.clone(), *flatten_pages(cache.pages(0)), *options))
    for return_lse in (False, True):
        params = AttentionParams(None, 2, True, 0.1, return_lse=return_lse, exact=True)
        torch.library.opcheck(torch.ops.fp8attn.attention, (q, *flatten_pages(cache.pages(0)), *params, "reference"))
    x, mean = torch.randn(2, 2, 130, 64), torch.randn(2, 64)
    for codec in (INT8, E4M3):
        form = flatten_format(KVFormat(PageSpec.of(64, codec.name).name, stored_k_mean=mean))
        torch.library.opcheck(torch.ops.fp8attn.from_dense, (x, x.clone(), *form, "reference"))


def test_ops_change_what_they_say_and_nothing_else(cache):
    cache.reserve(40)
    names = ("pool", "page_table", "cache_seqlens")
    bits = lambda: {name: getattr(cache.pages(0), name).clone() for name in names}  # noqa: E731
    before = bits()
    attention(torch.randn(4, 4, 64), cache.pages(0))
    assert all(torch.equal(before[name], after) for name, after in bits().items())
    k = torch.randn(4, 2, 64) * 1000
    fp8attn.append(cache.pages(0), k, k.clone())
    changed = {name for name, after in bits().items() if not torch.equal(before[name], after)}
    assert changed == {"pool", "cache_seqlens"}


def test_whoever_watches_sees_torch_ops(cache):
    """Outside of modes and tracing, kernels are called without the dispatcher, with the same bits."""

    seen = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.add(str(func))
            return func(*args, **(kwargs or {}))

    q, k = torch.randn(4, 4, 64), torch.randn(4, 2, 64)
    plain = attention(q, cache.pages(0))
    with Watch():
        torch.testing.assert_close(attention(q, cache.pages(0)), plain, rtol=0, atol=0)
        fp8attn.append(cache.pages(0), k, k)
    assert {"fp8attn.attention.default", "fp8attn.append.default"} <= seen


def test_gradients_are_refused(cache):
    q, k = torch.randn(2, 4, 64, requires_grad=True), torch.randn(2, 2, 64, requires_grad=True)
    with pytest.raises(RuntimeError, match="for inference: an input requires a gradient, and FP8 ops have none"):
        attention(q, cache.pages(0))
    with pytest.raises(RuntimeError, match="for inference: an input requires a gradient, and FP8 ops have none"):
        cache.append(0, k, k)
    with torch.no_grad():
        cache.append(0, k, k)
        assert not attention(q, cache.pages(0)).requires_grad
    assert cache.lengths == (11, 11)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_forward_mode_derivatives_and_transforms_are_refused(cache):
    q, k = torch.randn(2, 4, 64), torch.randn(2, 2, 64)
    before = [x.clone() for x in cache.pages(0).tensors]
    calls = [
        (q, lambda x: attention(x, cache.pages(0))),
        (k, lambda x: cache.append(0, x, k)),
        (k, lambda x: cache.append(0, k, x)),
    ]
    for x, call in calls:
        with torch.no_grad(), forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            with pytest.raises(RuntimeError, match="for inference: an input has a forward-mode tangent"):
                call(dual)
        for transformed in (lambda: torch.func.jvp(call, (x,), (x,)), lambda: torch.vmap(call)(x[None])):  # noqa: B023
            with pytest.raises(RuntimeError, match=r"for inference: a transform of torch\.func is active"):
                transformed()
    assert cache.lengths == (10, 10)
    assert all(torch.equal(old, new) for old, new in zip(before, cache.pages(0).tensors, strict=True))


def test_a_step_compiles_whole_and_once(cache):
    """Append and attend as static-shape decoding does: one graph, lengths that change between calls."""
    cache.reserve(300)
    twin = PagedKVCache(2, 64, num_seqs=2)
    torch.manual_seed(0)
    twin.append(0, torch.randn(20, 2, 64), torch.randn(20, 2, 64))

    def step(q, k, v):
        fp8attn.append(cache.pages(0), k, v)
        return attention(q, cache.pages(0))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for _ in range(3):
            q, k, v = torch.randn(2, 4, 64), torch.randn(2, 2, 64), torch.randn(2, 2, 64)
            twin.append(0, k, v)
            torch.testing.assert_close(compiled(q, k, v), attention(q, twin.pages(0)), rtol=0, atol=0)
    cache.sync()
    assert cache.lengths == twin.lengths == (13, 13)


def test_the_schema_lists_the_options():
    """The torch op takes the fields of `AttentionParams` in their order, after the queries and the pages."""
    names = [argument.name for argument in torch.ops.fp8attn.attention.default._schema.arguments]
    pages = ["pool", "page_table", "cache_seqlens", "spec", "rotate", "stored_k_mean", "v_mean", "factor"]
    assert names == ["q", *pages, *AttentionParams._fields, "backend"]


def test_no_option_is_dropped_on_its_way(cache, monkeypatch):
    """Each argument of `attention` reaches the backend in its field, directly and through the torch op."""
    seen = []
    backend = load("reference")
    monkeypatch.setattr(
        type(backend), "attention", lambda self, q, pages, params, out=None: (seen.append(params), (q, q[..., 0]))[1]
    )
    given = {
        "cu_seqlens_q": torch.tensor([0, 1, 4], dtype=torch.int32), "max_seqlen_q": 3, "causal": True,
        "softmax_scale": 0.5, "window": 7,
        "softcap": 9.0, "sinks": torch.randn(4), "leftpad_k": torch.tensor([0, 1], dtype=torch.int32),
        "return_lse": True,
        "exact": True,
    }  # fmt: skip
    q = torch.randn(4, 4, 64)
    attention(q, cache.pages(0), **given)
    expected = AttentionParams(**given)
    torch.ops.fp8attn.attention(q, *flatten_pages(cache.pages(0)), *expected, "reference")
    assert len(seen) == 2
    for params in seen:
        for name, value in given.items():
            assert getattr(params, name) is value or getattr(params, name) == value, name


def test_tokens_without_a_page_are_refused_by_the_reference():
    """The kernels cannot check it without waiting for the GPU."""
    pages, k = fp8attn.from_dense(torch.randn(1, 2, 130, 64), torch.randn(1, 2, 130, 64)), torch.randn(127, 2, 64)
    fp8attn.append(pages, k[:126], k[:126])
    with pytest.raises(
        ValueError, match=r"sequence 0 would have 383 tokens, and page_table has pages for 256: it must name a page"
    ):
        fp8attn.append(pages, k, k)
    assert pages.cache_seqlens.tolist() == [256]
