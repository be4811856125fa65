"""`fake_quantize` returns the values of a cache, and a model can be trained with it."""

import copy

import pytest
import torch
import torch.nn.functional as F

import fp8attn
from fp8attn import PagedKVCache, fake_quantize

FORMATS = [("int8", True), ("int8", False), ("e4m3", True), ("e4m3", False)]


def kv(batch=2, heads=2, length=300, dim=64):
    generator = torch.Generator().manual_seed(0)
    spread = torch.linspace(0.3, 3.0, length)[:, None]  # scales grow
    return (torch.randn(batch, heads, length, dim, generator=generator) * spread for _ in "kv")


@pytest.mark.parametrize(("key_dtype", "rotate_keys"), FORMATS)
def test_it_is_what_a_cache_reads(key_dtype, rotate_keys):
    k, v = kv()
    ours = fake_quantize(k, v, key_dtype=key_dtype, rotate_keys=rotate_keys)
    pages = fp8attn.from_dense(k, v, key_dtype=key_dtype, rotate_keys=rotate_keys)
    cache = PagedKVCache(2, 64, num_seqs=2, key_dtype=key_dtype, rotate_keys=rotate_keys)
    for start in range(0, 300, 75):  # however the tokens come
        part = slice(start, start + 75)
        cache.append(0, *(x[:, :, part].transpose(1, 2).flatten(0, 1).contiguous() for x in (k, v)))
    for seq in range(2):
        for x, read, cached in zip(ours, pages.read(seq, 300), cache.read(0, seq), strict=True):
            assert torch.equal(x[seq].transpose(0, 1), read) and torch.equal(read, cached)


def test_means_and_bfloat16():
    k, v = (x.bfloat16() for x in kv())
    means = {"k_mean": torch.randn(2, 64), "v_mean": torch.randn(2, 64)}
    ours = fake_quantize(k, v, **means)
    pages = fp8attn.from_dense(k, v, **means)
    for seq in range(2):
        for x, read in zip(ours, pages.read(seq, 300, torch.bfloat16), strict=True):
            assert x.dtype == torch.bfloat16 and torch.equal(x[seq].transpose(0, 1), read)


def test_gradients_pass_straight_through():
    k, v = (x.requires_grad_() for x in kv())
    weights = torch.randn(2, 2, 2, 300, 64)
    out = fake_quantize(k, v)
    grads = torch.autograd.grad(sum((x * w).sum() for x, w in zip(out, weights, strict=True)), (k, v))
    assert all(map(torch.equal, grads, weights))


class Tiny(torch.nn.Module):
    """One layer of attention between an embedding and logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(50, 64)
        self.qkv = torch.nn.Linear(64, 3 * 64)
        self.out = torch.nn.Linear(64, 50)
        with torch.no_grad():
            self.qkv.weight[::16] *= 8  # outlier channels, whose rounding decides the scores
            self.out.weight *= 4

    def forward(self, ids, cached):
        q, k, v = (x[:, None] for x in self.qkv(self.embed(ids)).chunk(3, -1))
        k, v = fake_quantize(k, v, key_dtype="e4m3", rotate_keys=False) if cached else (k, v)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[:, 0]).log_softmax(-1)


def test_a_few_steps_against_it_lower_the_divergence_from_the_exact_model():
    exact = Tiny()
    model, ids = copy.deepcopy(exact), torch.randint(50, (8, 128), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        target = exact(ids, cached=False)
    optimizer, divergences = torch.optim.Adam(model.parameters(), lr=1e-4), []
    for _ in range(36):
        divergence = F.kl_div(
            model(ids, cached=True).flatten(0, 1), target.flatten(0, 1), log_target=True, reduction="batchmean"
        )
        divergences.append(divergence.item())
        optimizer.zero_grad()
        divergence.backward()
        optimizer.step()
    # Every step moves codes, so single steps scatter: 0.0087 at first, 0.003 to 0.006 at the end.
    assert sum(divergences[-6:]) / 6 < 0.6 * divergences[0], divergences


def test_what_quantize_refuses_it_refuses():
    k, v = kv()
    with pytest.raises(ValueError, match="k and v must be of one shape"):
        fake_quantize(k, v[:, :, :1])
    with pytest.raises(ValueError, match="key_dtype must be one of"):
        fake_quantize(k, v, key_dtype="fp8")
