"""`PagedKVCache` of latents: appends, moves of sequences, files, the static form."""

import copy

import pytest
import torch

from fp8attn import PagedKVCache, UsageError
from fp8attn.formats.spec import PageSpec
from fp8attn.numerics import relative_error
from tests.support.latents import statics, tokens

SPEC = PageSpec.latent(256, 32)
SCALE = 0.1
LAYERS = 2


def cache(lengths: list[int], **options) -> PagedKVCache:
    """A cache with random tokens in each layer."""
    torch.manual_seed(0)
    made = PagedKVCache(1, SPEC, num_layers=LAYERS, num_seqs=len(lengths), **options)
    for layer in range(LAYERS):
        made.append(layer, *tokens(sum(lengths), SPEC), lengths=lengths)
    return made


def read(held: PagedKVCache, seq: int) -> list[torch.Tensor]:
    """Latents and keys with RoPE of all layers."""
    return [x for layer in range(LAYERS) for x in held.read(layer, seq)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor], length: int | None = None) -> bool:
    return all(torch.equal(a, b[:length]) for a, b in zip(ours, theirs, strict=True))


def test_steps_and_prompts_attend_as_the_definition_says():
    held, static = PagedKVCache(1, SPEC, num_seqs=2, **statics(SPEC)), statics(SPEC)
    assert held.layers[0].format.factor.shape == (1, 2) == static["factor"].shape
    for n in (130, 1, 1, 3):
        held.append(0, *tokens(2 * n, SPEC))
        q = torch.randn(2 * n, 4, 288)
        out, lse = held.attention(0, q, softmax_scale=SCALE, return_lse=True)
        for seq in range(2):
            x, rope = (y[:, 0].double() for y in held.read(0, seq))
            key, rows = torch.cat([x, rope], -1), q[seq * n : seq * n + n].double()
            scores = torch.einsum("qhd,kd->qhk", rows, key) * SCALE
            hidden = torch.arange(len(x)) > len(x) - n + torch.arange(n)[:, None]
            scores = scores.masked_fill(hidden[:, None], -torch.inf)
            assert relative_error(out[seq * n : seq * n + n], scores.softmax(-1) @ x) < 3e-6
            torch.testing.assert_close(lse[seq * n : seq * n + n].double(), scores.logsumexp(-1), rtol=0, atol=1e-5)


def test_sequences_are_moved_as_bytes():
    held = cache([200, 130, 5])
    first, second, third = (read(held, seq) for seq in range(3))
    held.select([1, 0, 0])
    held.truncate([130, 100, 200])
    held.copy(2, 0, 150)
    assert held.lengths == (150, 100, 200)
    for seq, length in enumerate(held.lengths):
        assert same(read(held, seq), first, length)
    twin = copy.deepcopy(held)
    more = [tokens(3, SPEC) for _ in range(LAYERS)]
    for layer in range(LAYERS):  # each writes to a page that it shared
        held.append(layer, *more[layer], lengths=[1, 1, 1])
    assert same(read(twin, 1), first, 100) and held.lengths == (151, 101, 201)
    for seq, length in enumerate(twin.lengths):
        assert same([x[:length] for x in read(held, seq)], first, length)
    alone = PagedKVCache(1, SPEC)
    alone.append(0, more[0][0][1:2], more[0][1][1:2])
    assert torch.equal(alone.read(0, 0)[0][0], held.read(0, 1)[0][100])
    assert len(second[0]) == 130 and len(third[0]) == 5
    held.reset()
    assert held.lengths == (0, 0, 0)


@pytest.mark.parametrize("options", [{}, {"window": 300}, statics(SPEC)], ids=["", "window", "mean and factor"])
def test_files_have_the_same_bytes(tmp_path, options):
    held = cache([400, 40], **options)
    held.save(tmp_path / "a.safetensors", [1, 0])
    back = PagedKVCache.load(tmp_path / "a.safetensors")
    assert back.spec == SPEC and back.lengths == (40, 400) and back.window == held.window
    assert same(read(back, 1), read(held, 0)) and same(read(back, 0), read(held, 1))
    for ours, theirs in zip(back.layers[1].format.tensors, held.layers[1].format.tensors, strict=True):
        assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs))
    q = torch.randn(2, 4, 288)
    x = tokens(2, SPEC)
    for each, rows in ((held, [0, 1]), (back, [1, 0])):
        for layer in range(LAYERS):
            each.append(layer, *(y[rows] for y in x))
    assert torch.equal(
        held.attention(1, q, softmax_scale=SCALE), back.attention(1, q[[1, 0]], softmax_scale=SCALE)[[1, 0]]
    )


def test_the_static_form_is_compiled():
    held, grows = (PagedKVCache(1, SPEC, num_seqs=2, **more) for more in ({"max_seqlen": 200}, {}))

    def step(x, rope, q):
        held.append(0, x, rope)
        return held.attention(0, q, softmax_scale=SCALE)

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for n in (130, 1, 1):
        new, q = tokens(2 * n, SPEC), torch.randn(2 * n, 4, 288)
        grows.append(0, *new)
        out = compiled(*new, q)
        assert torch.equal(out, grows.attention(0, q, softmax_scale=SCALE))
    assert held.lengths == grows.lengths == (132, 132)


def test_a_window_gives_back_pages():
    held, whole = (PagedKVCache(1, SPEC, **more) for more in ({"window": 150}, {}))
    torch.manual_seed(0)
    for n in (700, *[1] * 5):
        new, q = tokens(n, SPEC), torch.randn(n, 4, 288)
        held.append(0, *new), whole.append(0, *new)
        out = held.attention(0, q, softmax_scale=SCALE)
        assert relative_error(out, whole.attention(0, q, softmax_scale=SCALE, window=150)) < 1e-6
    assert held.num_pages < whole.num_pages


def test_a_step_that_fails_leaves_nothing():
    held = cache([50])
    x, rope = tokens(1, SPEC)
    with pytest.raises(ValueError, match=r"k and v must be a latent \[T, 1, 256\] and its key with RoPE \[T, 1, 32\]"):
        held.append(0, x, x)
    assert held.lengths == (50,)
    held.append(0, x, rope)
    held.truncate(held.lengths)
    assert held.lengths == (50,)


def test_what_only_k_and_v_have_is_refused():
    for options, said in (
        ({"rotate_keys": False}, "latents are rotated"),
        ({"k_mean": torch.zeros(1, 288)}, "latents are rotated"),
        ({"key_dtype": "e4m3"}, "have no key_dtype='e4m3'"),
    ):
        with pytest.raises(UsageError, match=said):
            PagedKVCache(1, SPEC, **options)
    with pytest.raises(UsageError, match="factor is for latents"):
        PagedKVCache(1, 128, factor=torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"factor must be \[1, 2\]; got \[1, 256\]"):
        PagedKVCache(1, SPEC, factor=torch.ones(1, 256))
    assert PagedKVCache(1, PageSpec.of(64, "e4m3")).key_dtype == "e4m3"
