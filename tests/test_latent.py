"""Append and attention over latents, on a CPU: against float64 attention, and what is refused."""

import pytest
import torch

import fp8attn
from fp8attn import AttentionParams, KVPages, UsageError, latent
from fp8attn.formats.latent import channels
from fp8attn.formats.page_layout import latent_of
from fp8attn.formats.spec import ROPE_IN_CODES, SPARE, PageSpec
from fp8attn.numerics import relative_error
from fp8attn.params import Append
from tests.formats.test_latent import ERROR
from tests.support.latents import cumulative, empty, expected, filled, tokens

SPEC = PageSpec.latent(512, 64)
SCALE = 192**-0.5


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"window": 40},
        {"leftpad": [0, 30, 128, 0]},
        {"leftpad": [0, 3, 200, 0], "window": 150},
        {"batch_invariant": True},
        {"exact": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "spec",
    [
        SPEC,
        PageSpec.latent(256, 32),
        PageSpec.latent(128, 0),
        PageSpec.latent(*ROPE_IN_CODES, rope_in_codes=True, spare=SPARE),
    ],
    ids=lambda spec: spec.name,
)
@pytest.mark.parametrize("static", [False, True], ids=["", "mean and factor"])
def test_attention_against_float64(spec, static, options):
    """Several sequences of several lengths, one of them empty, and of several queries."""
    lengths, queries = [1, 140, 300, 0], [1, 4, 130, 0]
    options = dict(options)
    pages = filled(lengths, spec, static=static)
    q = torch.randn(sum(queries), 6, spec.k_dim)
    leftpad = options.pop("leftpad", None)
    out, lse = fp8attn.attention(
        q, pages, cu_seqlens_q=cumulative(queries), max_seqlen_q=max(queries), softmax_scale=SCALE, return_lse=True,
        leftpad_k=None if leftpad is None else torch.tensor(leftpad, dtype=torch.int32), **options,
    )  # fmt: skip
    assert out.shape == (sum(queries), 6, spec.v_dim) and lse.shape == (sum(queries), 6)
    want, want_lse = expected(q, pages, queries, SCALE, leftpad=leftpad, **options)
    seen = want_lse > -torch.inf
    assert torch.equal(lse > -torch.inf, seen) and not out[~seen].any()
    assert relative_error(out, want) < 3e-6
    torch.testing.assert_close(lse[seen].double(), want_lse[seen], rtol=0, atol=1e-5)


def test_long_sequences_are_read_in_blocks(monkeypatch):
    pages = filled([700, 513], SPEC)
    q = torch.randn(40, 4, 576)
    whole = fp8attn.attention(q, pages, softmax_scale=SCALE)
    monkeypatch.setattr(latent, "KEY_BLOCK", 256)
    monkeypatch.setattr(latent, "ROW_BLOCK", 12)
    assert relative_error(fp8attn.attention(q, pages, softmax_scale=SCALE), whole) < 2e-6


def test_several_kv_heads():
    spec = PageSpec.latent(128, 32)
    pages = filled([200], spec, heads=3, static=True)
    q = torch.randn(2, 6, 160)
    out = fp8attn.attention(q, pages, softmax_scale=0.1)
    assert relative_error(out, expected(q, pages, [2], 0.1)[0]) < 3e-6


def test_attention_loses_little_of_random_latents():
    """Values have the error of a token. Scores have it, too, times their deviation, and change the weights by as much.
    The two do not depend on each other.
    """
    torch.manual_seed(0)
    deviation = 512**0.5 * SCALE
    pages = empty([1000], SPEC)
    x, rope = tokens(1000, SPEC)
    fp8attn.append(pages, x, rope)
    q = torch.randn(1, 16, 576)
    keys = torch.cat([x, rope], -1)[:, 0].double()
    want = (q[0].double() @ keys.T * SCALE).softmax(-1) @ x[:, 0].double()
    assert relative_error(fp8attn.attention(q, pages, softmax_scale=SCALE)[0], want) < (1 + deviation**2) ** 0.5 * ERROR


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_what_is_stored(dtype):
    pages = empty([300], SPEC, static=True)
    x, rope = tokens(300, SPEC, dtype)
    x = (x.float() * channels(pages.format.factor) + pages.format.v_mean).to(dtype)
    fp8attn.append(pages, x, rope)
    got, key = pages.read(0, 300)
    assert got.shape == (300, 1, 512) and key.shape == (300, 1, 64)
    assert torch.equal(key, rope.half().float())
    assert relative_error(got, x) < ERROR


@pytest.mark.parametrize("cuts", [[300], [1] * 130 + [170], [127, 1, 1, 171], [128, 128, 44]], ids=len)
def test_bytes_do_not_depend_on_calls(cuts):
    x, rope = tokens(600, SPEC)
    pages = empty([300, 300], SPEC)
    at = 0
    for n in cuts:
        rows = torch.cat([torch.arange(at, at + n), torch.arange(300 + at, 300 + at + n)])
        fp8attn.append(pages, x[rows], rope[rows])
        at += n
    for seq in range(2):  # alone, in another place of another cache
        alone = empty([300], SPEC)
        fp8attn.append(alone, x[300 * seq : 300 * seq + 300], rope[300 * seq : 300 * seq + 300])
        for ours, theirs in zip(*(_stored(p, s, 300) for p, s in ((pages, seq), (alone, 0))), strict=True):
            assert torch.equal(ours, theirs)


def _stored(pages: KVPages, seq: int, length: int) -> list[torch.Tensor]:
    ids = pages.page_table[seq].long()
    return [x[ids].transpose(1, 2).flatten(0, 1)[:length] for x in latent_of(pages.pool, pages.format.layout)]


def test_lengths_that_count_the_new_tokens():
    """As serving engines keep them: a sequence that is shorter than its new tokens pads the batch."""
    x, rope = tokens(9, SPEC)
    pages, counted = empty([9, 9], SPEC), empty([9, 9], SPEC)
    counted.page_table.copy_(pages.page_table)
    counted.pool.copy_(pages.pool)
    bounds = cumulative([5, 4])
    latent.append(pages, x, rope, Append(bounds, 5))
    counted.cache_seqlens.copy_(torch.tensor([5, 4]))
    latent.append(counted, x, rope, Append(bounds, 5, advance=False))
    assert torch.equal(pages.pool, counted.pool) and counted.cache_seqlens.tolist() == [5, 4]
    counted.cache_seqlens.zero_()
    latent.append(counted, x + 1, rope, Append(bounds, 5, advance=False))
    assert torch.equal(pages.pool, counted.pool)


def test_a_nan_is_for_the_rows_that_see_it():
    x, rope = tokens(260, SPEC)
    x[250, 0, 3] = torch.nan
    pages = empty([260], SPEC)
    fp8attn.append(pages, x, rope)
    q = torch.randn(30, 4, 576)
    out, lse = fp8attn.attention(q, pages, softmax_scale=SCALE, return_lse=True)
    sees = 230 + torch.arange(30) >= 250
    assert out[sees].isnan().all() and not out[~sees].isnan().any()
    assert torch.equal(lse.isnan(), sees[:, None].expand(-1, 4))
    x[250] = 0
    clean = empty([260], SPEC)
    fp8attn.append(clean, x, rope)
    assert torch.equal(out[~sees], fp8attn.attention(q, clean, softmax_scale=SCALE)[~sees])


def test_attention_writes_into_a_given_output():
    pages, q = filled([150], SPEC), torch.randn(3, 4, 576)
    out = torch.full((3, 4, 512), torch.nan)
    result = fp8attn.attention(q, pages, softmax_scale=SCALE, out=out)
    assert result is out and torch.equal(out, fp8attn.attention(q, pages, softmax_scale=SCALE))
    with pytest.raises(ValueError, match=r"out must be \(3, 4, 512\) float32 on cpu; got \(3, 4, 576\)"):
        fp8attn.attention(q, pages, softmax_scale=SCALE, out=torch.empty_like(q))


def test_compiled():
    pages, (x, rope) = empty([20], SPEC, static=True), tokens(20, SPEC)

    def step(x, rope, q):
        fp8attn.append(pages, x, rope)
        return fp8attn.attention(q, pages, softmax_scale=SCALE)

    q = torch.randn(20, 4, 576)
    out = torch.compile(step, backend="aot_eager", fullgraph=True)(x, rope, q)
    assert out.shape == (20, 4, 512) and pages.cache_seqlens.tolist() == [20]
    assert torch.equal(out, fp8attn.attention(q, pages, softmax_scale=SCALE))


def test_under_autocast():
    pages, q = filled([150], SPEC), torch.randn(1, 4, 576)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = fp8attn.attention(q, pages, softmax_scale=SCALE)
    assert torch.equal(out, fp8attn.attention(q, pages, softmax_scale=SCALE))


def test_bad_input_is_refused_by_name():
    pages, (x, rope), q = empty([20], SPEC), tokens(20, SPEC), torch.randn(20, 4, 576)
    append, attention = (lambda *given, **how: fp8attn.append(pages, *given, **how)), fp8attn.attention
    k = torch.randn(20, 1, 576)
    shapes = r"k and v must be a latent \[T, 1, 512\] and its key with RoPE \[T, 1, 64\] of one dtype; got"
    for given in ((k, k), (x[..., :256], rope), (x, x), (x, rope[:3]), (x, rope.half()), (k, k[..., :512])):
        with pytest.raises(ValueError, match=shapes):
            append(*given)
    with pytest.raises(UsageError, match="no static_scales: leave them out"):
        append(x, rope, static_scales=True)
    append(x, rope)
    with pytest.raises(UsageError, match=r"softmax_scale has no default over latents.*qk_nope_head_dim"):
        attention(q, pages)
    for option in ({"softcap": 30.0}, {"sinks": torch.zeros(4)}):
        with pytest.raises(UsageError, match="no softcap and no sinks"):
            attention(q, pages, softmax_scale=SCALE, **option)
    with pytest.raises(ValueError, match=r"q must be \[T, num_q_heads, 576\].*512 channels of the absorbed query"):
        attention(q[..., :192], pages, softmax_scale=SCALE)
    with pytest.raises(ValueError, match=r"k and v must both be \[T, 1, 64\]"):
        fp8attn.append(KVPages.empty(1, 1, 64, 1, 1), x, rope)
    for option in ({"k_mean": torch.zeros(1, 576)}, {"rotate_keys": False}):
        with pytest.raises(UsageError, match="latents are rotated, and their mean is v_mean"):
            KVPages.empty(1, 1, SPEC, 1, 1, **option)
    with pytest.raises(UsageError, match="factor is for latents"):
        KVPages.empty(1, 1, 128, 1, 1, factor=torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"factor must be \(1, 4\) float32"):
        KVPages.empty(1, 1, SPEC, 1, 1, factor=torch.ones(1, 512))


def test_reference_in_float64():
    """What kernels are compared with."""
    pages, q = filled([300], SPEC, static=True), torch.randn(5, 4, 576)
    params = AttentionParams(None, 5, True, SCALE)
    out, _ = latent.attention(q, pages, params, compute_dtype=torch.float64, out_dtype=torch.float64)
    assert relative_error(out, expected(q, pages, [5], SCALE)[0]) < 1e-13
