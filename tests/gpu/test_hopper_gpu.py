"""The Hopper kernels against float64 on the same bytes: every head_dim and key format, every option, odd lengths,
poison, graphs.
"""

import pytest
import torch

pytest.importorskip("triton")

import fp8attn
from fp8attn import AttentionParams, KVPages, PagedKVCache, reference
from fp8attn.backends import hopper
from fp8attn.formats.codec import CODECS, FP8
from fp8attn.formats.rotation import rotate_back
from fp8attn.formats.spec import HEAD_DIMS, PageSpec
from fp8attn.kernels import counters, decode, prefill
from fp8attn.numerics import relative_error
from tests.support.kernel_cases import LSE_ERROR, check_out, cumulative, empty_cache, fill

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
    pytest.mark.usefixtures("poisoned"),
]
CUDA = torch.device("cuda", 0)
KEYS = list(CODECS)
HOPPER_HEAD_DIMS = [dim for dim in HEAD_DIMS if hopper.refusal(PageSpec.of(dim)) is None]
FORMATS = [(dim, keys, True) for dim in HOPPER_HEAD_DIMS for keys in KEYS] + [
    (dim, keys, False) for dim in (80, 128) for keys in KEYS
]
# Weights and queries in 8 bits, on V of mean 1: INT8 keys are 0.24% off, E4M3 ones 0.30%, 0.38% in a window of 300
# keys.
PROMPT = 0.005
FEW_KEYS = 0.015  # rows that see few keys average over less
# Sums of weights that were rounded, and scores of 8-bit queries: a score over INT8 keys is 0.007 off, the worst of
# 60,000 0.04.
PROMPT_LSE = {"int8": 0.05, "e4m3": 0.12}
EXACT, EXACT_LSE = 6e-4, {"int8": 0.005, "e4m3": 0.02}  # with FP16 outputs; FP8 products keep 14 bits of a score
ODD_PROMPTS = (  # (queries, keys): FlashAttention-3's tests
    (1, 1), (64, 128), (128, 192), (256, 256), (239, 1), (799, 3), (113, 203), (113, 128), (128, 217), (113, 211),
    (108, 256), (256, 512),
    (384, 256), (640, 128), (512, 256), (1024, 1024), (1023, 1024), (1024, 1023), (4096, 4096), (4224, 4224),
)  # fmt: skip
STEP = 5e-4  # decoding with FP16 queries, and LSE_ERROR


def held(
    lengths: list[int],
    head_dim: int = 128,
    keys: str = "int8",
    rotate: bool = True,
    *,
    heads: int = 2,
    mean: float = 0.0,
) -> KVPages:
    """Sequences of normal K, and V of mean 1, in shuffled pages between poison. `mean`: of static means, which K and V
    have.
    """
    pages = empty_cache(lengths, heads, head_dim, CUDA, mean, key_dtype=keys, rotate=rotate)
    k, v = torch.randn(2, sum(lengths), heads, head_dim, device=CUDA)
    if mean:
        k, v = (
            k + (rotate_back(pages.format.stored_k_mean) if rotate else pages.format.stored_k_mean),
            v + pages.format.v_mean,
        )
    fill(pages, k, v + 1, lengths)
    return pages


def queries(tokens: int, head_dim: int = 128, heads: int = 4, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(tokens, heads, head_dim, device=CUDA).to(dtype)


def options(pages: KVPages, each: int, counts: list[int] | None = None, **given) -> dict:
    """`each` queries of every sequence, or `counts`."""
    return {
        "cu_seqlens_q": None if counts is None else cumulative(counts, CUDA), "max_seqlen_q": each, "causal": True,
        "softmax_scale": pages.head_dim**-0.5, "window": 0, "softcap": 0.0, "sinks": None, "leftpad_k": None,
        "return_lse": True,
    } | given  # fmt: skip


def compare(result, q: torch.Tensor, pages: KVPages, given: dict, limit: float, lse_limit: float) -> None:
    out, lse = result
    q = q.float() if q.dtype == FP8 else q
    ref, ref_lse = reference.attention(
        q, pages, AttentionParams(**given), compute_dtype=torch.float64, out_dtype=torch.float64
    )
    error = relative_error(out, ref)  # NaN where any is
    assert error <= limit, (
        f"{error:.5f}, worst in row {int((out.double() - ref).norm(dim=-1).amax(1).argmax())} of {len(q)}"
    )
    seen = ref_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen)
    assert ((lse - ref_lse)[seen].abs() <= lse_limit + ref_lse[seen].abs() / 1024).all(), float(
        (lse - ref_lse)[seen].abs().max()
    )


def check_prompt(q: torch.Tensor, pages: KVPages, limit: float = PROMPT, **given) -> None:
    """Check prefill against float64, and that a second call gives the same bits."""
    result, again = (prefill.prefill_attention(q, pages, AttentionParams(**given)) for _ in range(2))
    assert torch.equal(result[0], again[0]) and torch.equal(result[1], again[1])
    compare(result, q, pages, given, limit, PROMPT_LSE["int8" if pages.format.k.dtype == torch.int8 else "e4m3"])


def check_step(q: torch.Tensor, pages: KVPages, limit: float = STEP, **given) -> None:
    result, again = (decode.decode_attention(q, pages, AttentionParams(**given)) for _ in range(2))
    assert torch.equal(result[0], again[0]) and torch.equal(result[1], again[1])
    compare(result, q, pages, given, limit, LSE_ERROR)
    assert not any(count for stream in counters._streams.values() for count in stream.tolist()), (
        "counters must be left at zero"
    )


def all_options(pages: KVPages, heads: int = 4) -> dict:
    leftpad = torch.tensor([10, 140, 0, 3], dtype=torch.int32, device=CUDA)
    return {
        "softcap": 20.0,
        "sinks": torch.randn(heads, device=CUDA),
        "window": 200,
        "leftpad_k": leftpad[: pages.num_seqs],
    }


# Prefill


@pytest.mark.parametrize(("head_dim", "keys", "rotate"), FORMATS)
def test_prompts_of_every_format(head_dim, keys, rotate):
    """Causal behind held tokens, full, an odd length; one key."""
    pages = held([1000, 1000], head_dim, keys, rotate)
    q = queries(1400, head_dim)
    check_prompt(q, pages, **options(pages, 700))
    check_prompt(q, pages, **options(pages, 700, causal=False))
    one = held([1], head_dim, keys, rotate)
    check_prompt(q[:1], one, **options(one, 1))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_prompts_of_odd_lengths(head_dim, causal):
    for count, length in ODD_PROMPTS:
        pages = held([length], head_dim)
        check_prompt(queries(count, head_dim), pages, FEW_KEYS, **options(pages, count, causal=causal))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", ["window", "softcap", "sinks", "leftpad", "all"])
def test_prompts_with_options(name, keys):
    pages = held([1000, 1000], keys=keys, mean=0.5 if name == "all" else 0.0)
    given = {
        "window": {"window": 300}, "softcap": {"softcap": 30.0}, "sinks": {"sinks": torch.randn(4, device=CUDA)},
        "leftpad": {"leftpad_k": torch.tensor([310, 7], dtype=torch.int32, device=CUDA)}, "all": all_options(pages),
    }[name]  # fmt: skip
    check_prompt(queries(1400), pages, FEW_KEYS if name == "all" else PROMPT, **options(pages, 700, **given))


@pytest.mark.parametrize(("head_dim", "keys"), [(128, "int8"), (128, "e4m3"), (64, "int8"), (256, "e4m3")])
def test_static_means_are_restored(head_dim, keys):
    pages = held([1000], head_dim, keys, mean=2.0)
    check_prompt(queries(700, head_dim), pages, **options(pages, 700))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
def test_exact_prompts(head_dim, keys):
    """As exact as a decode step, whose rows they give; with all options, too."""
    pages, q = held([1000, 1000], head_dim, keys), queries(1400, head_dim, dtype=torch.float16)
    for given in (options(pages, 700), options(pages, 700, causal=False), options(pages, 700, **all_options(pages))):
        result = prefill.prefill_attention(q, pages, AttentionParams(**given, exact=True))
        compare(result, q, pages, given, EXACT, EXACT_LSE[keys])
    given = options(pages, 700)
    prompt = prefill.prefill_attention(q, pages, AttentionParams(**given, exact=True))[0].view(2, 700, 4, head_dim)[
        :, -16:
    ]
    last = q.view(2, 700, 4, head_dim)[:, -16:].flatten(0, 1)
    step = decode.decode_attention(last, pages, AttentionParams(**given | {"max_seqlen_q": 16}))[0]
    assert relative_error(prompt.flatten(0, 1), step.double()) < EXACT


@pytest.mark.parametrize("long", [False, True])
def test_exact_prompts_of_both_shapes(long, monkeypatch):
    """With two and with three warpgroups; ragged, and in parts of the keys."""
    monkeypatch.setattr(prefill.cut, "cuts", lambda width, *_: [(prefill.cut.SHAPES[width][long], 1)])
    lengths, counts = [0, 900, 5, 128, 0, 1000], [3, 300, 40, 128, 0, 77]
    pages, q = held(lengths), queries(sum(counts), dtype=torch.float16)
    given = options(pages, max(counts), counts)
    compare(
        prefill.prefill_attention(q, pages, AttentionParams(**given, exact=True)),
        q,
        pages,
        given,
        EXACT,
        EXACT_LSE["int8"],
    )
    monkeypatch.setattr(prefill.cut, "cuts", lambda width, *_: [(prefill.cut.SHAPES[width][long], 2)])
    prefill.plan.make_prefill_plan.cache_clear()
    pages, q = held([5000]), queries(300, dtype=torch.float16)
    given = options(pages, 300)
    compare(
        prefill.prefill_attention(q, pages, AttentionParams(**given, exact=True)),
        q,
        pages,
        given,
        EXACT,
        EXACT_LSE["int8"],
    )


@pytest.mark.parametrize(("head_dim", "keys"), [(128, "int8"), (128, "e4m3"), (80, "int8"), (256, "int8")])
def test_ragged_prompts(head_dim, keys):
    """Empty sequences, more queries than keys, rows behind the last."""
    lengths, counts = [0, 900, 5, 128, 0, 1000], [3, 300, 40, 128, 0, 77]
    pages, q = held(lengths, head_dim, keys), queries(sum(counts) + 150, head_dim)
    given = options(pages, max(counts), counts)
    result = prefill.prefill_attention(q, pages, AttentionParams(**given))
    assert not result[0][sum(counts) :].any()
    rows = slice(sum(counts))
    compare([x[rows] for x in result], q[rows], pages, given, FEW_KEYS, PROMPT_LSE[keys])


@pytest.mark.parametrize(
    ("head_dim", "keys", "splits"), [(128, "int8", 3), (128, "e4m3", 5), (64, "int8", 2), (256, "e4m3", 4)]
)
def test_keys_in_parts(head_dim, keys, splits, monkeypatch):
    monkeypatch.setattr(prefill.cut, "cuts", lambda width, *_: [(prefill.cut.SHAPES[width][0], splits)])
    pages, q = held([1500, 200, 0], head_dim, keys), queries(3 * 64, head_dim)
    check_prompt(q, pages, **options(pages, 64))


@pytest.mark.parametrize("keys", KEYS)
def test_the_shape_of_long_prompts(keys, monkeypatch):
    monkeypatch.setattr(prefill.cut, "cuts", lambda width, *_: [(prefill.cut.SHAPES[width][1], 1)])
    pages = held([1000, 1000], keys=keys)
    for causal in (True, False):
        check_prompt(queries(1400), pages, **options(pages, 700, causal=causal))


@pytest.mark.parametrize("head_dim", HOPPER_HEAD_DIMS)
def test_fp8_queries(head_dim):
    pages = held([1000, 1000], head_dim, "e4m3", False)
    check_prompt(queries(1400, head_dim, dtype=FP8), pages, **options(pages, 700))


@pytest.mark.parametrize("keys", KEYS)
def test_fp8_queries_need_keys_like_them(keys):
    pages, q = held([200], keys=keys), queries(200, dtype=FP8)
    with pytest.raises(ValueError, match="pass 16-bit queries"):
        prefill.prefill_attention(q, pages, AttentionParams(**options(pages, 200)))


@pytest.mark.parametrize("keys", KEYS)
def test_fp16_queries_of_other_strides(keys):
    pages = held([1000], keys=keys)
    check_prompt(queries(4, heads=700, dtype=torch.float16).transpose(0, 1), pages, **options(pages, 700))


@pytest.mark.parametrize(
    ("keys", "rotate", "dtype"), [("int8", True, torch.bfloat16), ("e4m3", True, torch.bfloat16), ("e4m3", False, FP8)]
)
def test_long_prompts_keep_the_mean_of_v(keys, rotate, dtype):
    """131,072 keys, which two-level accumulation is for: 0.3%."""
    pages = held([131072], keys=keys, rotate=rotate, heads=1)
    for causal in (True, False):
        check_prompt(queries(128, heads=1, dtype=dtype), pages, 0.003, **options(pages, 128, causal=causal))


def test_nan_reaches_the_rows_that_see_it_and_no_others():
    """The NaN is in a token of K, or in a row of Q."""
    pages, q = held([600], keys="e4m3", heads=1), queries(600, heads=1)
    given = options(pages, 600)
    page = pages.page_table[0, 2].long()  # tokens 256 to 383
    codes = pages.k.view(torch.uint8)
    for token in range(300, 318):  # every place in a group of exponentials
        saved = codes[page, 0, token % 128, 0].clone()
        codes[page, 0, token % 128, 0] = 0x7F
        got = prefill.prefill_attention(q, pages, AttentionParams(**given))[0].isnan().all(-1)[:, 0]
        codes[page, 0, token % 128, 0] = saved
        assert torch.equal(got, torch.arange(600, device=CUDA) >= token), token
    q[77, 0, 3] = torch.nan
    assert prefill.prefill_attention(q, pages, AttentionParams(**given))[0].isnan().all(-1)[
        :, 0
    ].nonzero().flatten().tolist() == [77]


@pytest.mark.parametrize("head_dim", [128, 256])
def test_without_an_lse_the_output_has_the_same_bits(head_dim):
    """Without an LSE, scores against K's means are not computed, except where a softcap or sinks need them."""
    pages = held([700, 700], head_dim, mean=1.0)
    q = queries(1400, head_dim)
    for given in ({}, {"softcap": 20.0}, {"sinks": torch.randn(4, device=CUDA)}):
        expected, _ = prefill.prefill_attention(q, pages, AttentionParams(**options(pages, 700, **given)))
        out, lse = prefill.prefill_attention(
            q, pages, AttentionParams(**options(pages, 700, **given, return_lse=False))
        )
        assert torch.equal(out, expected) and lse is None, given


# Decode

ODD = [1, 2, 15, 16, 17, 127, 128, 129, 0, 255, 256, 257, 1000, 4097, 22939]


@pytest.mark.parametrize(("head_dim", "keys", "rotate"), FORMATS)
def test_steps_of_every_format(head_dim, keys, rotate):
    for lengths in (ODD, [20000], [37 * i % 1500 for i in range(100)]):
        pages = held(lengths, head_dim, keys, rotate)
        check_step(queries(len(lengths), head_dim, 8, torch.float16), pages, **options(pages, 1))


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(("group", "each"), [(1, 1), (16, 1), (4, 4), (16, 8)])
def test_steps_of_many_rows(group, each, keys):
    lengths = [3000, 130, 0, 700]
    pages = held(lengths, keys=keys)
    for causal in (True, False):
        check_step(
            queries(each * len(lengths), heads=2 * group, dtype=torch.float16),
            pages,
            **options(pages, each, causal=causal),
        )


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("name", ["means", "window", "all"])
def test_steps_with_options(name, keys):
    lengths, counts = [700, 1200, 300, 50], [1, 3, 2, 2]
    pages = held(lengths, keys=keys, mean=0.0 if name == "window" else 1.0)
    if name == "all":
        given = options(pages, 3, counts, **all_options(pages, 8))
        check_step(queries(sum(counts), heads=8, dtype=torch.float16), pages, **given)
    else:
        given = options(pages, 1, **({"window": 130} if name == "window" else {}))
        check_step(queries(4, heads=8, dtype=torch.float16), pages, **given)


@pytest.mark.parametrize("keys", KEYS)
def test_long_steps(keys):
    pages = held([131072, 5000], keys=keys, heads=1)
    check_step(queries(2, dtype=torch.float16), pages, **options(pages, 1))


def test_steps_in_bf16():
    pages = held(ODD)
    check_step(queries(len(ODD), heads=8), pages, 2.5e-3, **options(pages, 1))  # BF16's rounding is 1.6e-3


# A given output


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("queries", [1, 4, 200])
def test_attention_writes_into_a_given_output(head_dim, queries):
    """Decode, and prefill with its output stored by TMA or, for several sequences in one batch and for head_dim 256, by
    threads.
    """
    check_out("hopper", head_dim, queries, CUDA, (300, 200, 700))


@pytest.mark.parametrize("sinks", [False, True])
def test_parts_are_added_into_a_given_output(sinks):
    """Few rows of long sequences, whose keys are cut into parts. `prefill` adds the parts in a launch of its own."""
    options = {"sinks": torch.randn(8, device=CUDA)} if sinks else {}
    check_out("hopper", 128, 2, CUDA, (20000, 5), **options)
    check_out("hopper", 128, 65, CUDA, (20000, 66), **options)


# Graphs


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("attention", [decode.decode_attention, prefill.prefill_attention], ids=["decode", "prefill"])
def test_a_graph_follows_lengths(attention, keys):
    """A graph is captured once and replayed with other lengths, for decode and for ragged prompts."""
    one = attention is decode.decode_attention  # token of each sequence
    pages, each = held([9000, 700], keys=keys), 1 if one else 700
    counts = [each, each]
    q = queries(2 * each, heads=8, dtype=torch.float16)
    given = options(pages, each, None if one else counts)
    limits = (STEP, LSE_ERROR) if one else (FEW_KEYS, PROMPT_LSE[keys])
    attention(q, pages, AttentionParams(**given))
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        result = attention(q, pages, AttentionParams(**given))
    for lengths in ([9000, 700], [1, 0], [8999, 17], [512, 700], [0, 0]):
        pages.cache_seqlens.copy_(torch.tensor(lengths))
        for x in result:
            x.fill_(torch.nan)
        for _ in range(3):
            captured.replay()
        torch.cuda.synchronize()
        if any(lengths):
            compare(result, q, pages, given, *limits)
        else:
            assert not result[0].any() and (result[1] == -torch.inf).all()


@pytest.mark.parametrize(
    "mode", [{"backend": "cudagraphs"}, {"mode": "reduce-overhead"}], ids=["cudagraphs", "inductor"]
)
def test_the_first_step_may_be_the_warm_up_of_a_graph(mode, monkeypatch):
    """Tensors that the kernels keep must not come from the memory pool of that graph, which allows none to
    outlive it.
    """
    monkeypatch.undo()  # Dynamo does not trace a replaced torch.empty
    for name in ("_streams", "_pools"):
        monkeypatch.setattr(counters, name, {})
    torch._dynamo.reset()
    caches = [PagedKVCache(2, 128, num_seqs=2, num_pages=8, device="cuda") for _ in range(2)]
    prompt = torch.randn(2, 600, 2, 128, dtype=torch.bfloat16, device="cuda")
    for cache in caches:
        cache.append(0, *prompt)
        cache.reserve(400)
        for x in cache.pages(0).tensors:
            if isinstance(x, torch.Tensor):
                torch._dynamo.mark_static_address(x)
    tokens = torch.randn(5, 2, 12, 128, dtype=torch.bfloat16, device="cuda")

    def step(x, pages):
        fp8attn.append(pages, x[:, :2], x[:, 2:4])
        return fp8attn.attention(x[:, 4:], pages)

    compiled = torch.compile(lambda x: step(x, caches[0].pages(0)), fullgraph=True, **mode)
    outs = [compiled(x).clone() for x in tokens]
    assert counters._pools
    assert all(torch.equal(out, step(x, caches[1].pages(0))) for out, x in zip(outs, tokens, strict=True))
