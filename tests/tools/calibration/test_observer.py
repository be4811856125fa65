"""Observers against direct computation on all values at once."""

import pytest
import torch

from fp8attn.formats.codec import E4M3, INT8
from fp8attn.formats.rotation import rotate
from fp8attn.formats.spec import HEAD_DIMS
from fp8attn_tools.calibration.layer import LayerObserver
from fp8attn_tools.calibration.moments import Moments
from fp8attn_tools.calibration.observer import PIECE, SAMPLED, Observer, Sample
from fp8attn_tools.calibration.rotation import rotate_many


def values(tokens=500, heads=2, seed=0):
    """`[tokens, heads, 64]`, with an outlier in head 1 and an offset of 30 deviations in channel 3 of head 0."""
    x = torch.randn(tokens, heads, 64, generator=torch.Generator().manual_seed(seed))
    x[tokens // 3, 1, 5] = -77.0
    x[:, 0, 3] += 30.0
    return x


@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matrix_is_the_rotation(head_dim, dtype):
    x = torch.randn(5, 3, head_dim, generator=torch.Generator().manual_seed(0)).to(dtype)
    # 8 additions in two orders, of values that are about as large as the sum
    torch.testing.assert_close(rotate_many(x), rotate(x.float()), rtol=0, atol=4e-6)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("with_mean", [False, True])
def test_planted_outliers_and_means(rotated, with_mean):
    x = values()
    observer = Observer(E4M3, rotated, sampled=True)
    mean = torch.zeros(2, 64)
    if with_mean:
        mean[0, 3] = 30.0
        observer.mean = mean
    for part in x.split(130):
        observer.add(part)
    y = rotate(x - mean) if rotated else x - mean
    amax = y.abs().amax((0, 2))
    assert observer.tokens == 500
    torch.testing.assert_close(observer.scale(), amax / 448, rtol=1e-6, atol=0)
    if not rotated:
        assert observer.amax.tolist() == ([x[:, 0].sub(mean[0]).abs().max().item(), 77.0])
    signal, noise = observer.noise(observer.scale()).unbind(1)
    scale = E4M3.needed_scale(amax)[:, None]
    error = E4M3.encode(y, 1 / scale) * scale - y
    torch.testing.assert_close(
        noise, error.double().square().sum((0, 2)), rtol=1e-3, atol=0
    )  # some ties round otherwise
    torch.testing.assert_close(signal, x.double().square().sum((0, 2)), rtol=1e-5, atol=0)  # with the mean


def test_pieces_are_the_whole(monkeypatch):
    x, whole, pieces = values(), Observer(INT8), Observer(INT8)
    whole.add(x)
    assert x.numel() < PIECE
    monkeypatch.setattr("fp8attn_tools.calibration.observer.PIECE", 1000)
    pieces.add(x)
    assert torch.equal(whole.amax, pieces.amax) and whole.tokens == pieces.tokens == 500


def test_a_sample_is_even_and_does_not_depend_on_how_it_was_cut():
    tokens = torch.arange(10 * SAMPLED + 13.0)[:, None, None]
    samples = []
    for size in (len(tokens), 999, 64, 5000):
        sample = Sample()
        for part in tokens.split(size):
            sample.add(part)
            assert len(sample.kept) <= SAMPLED
        samples.append(sample.kept)
    assert all(torch.equal(sample, samples[0]) for sample in samples)
    assert samples[0].flatten().tolist() == list(range(0, len(tokens), 16))
    assert len(samples[0]) > SAMPLED / 2


def test_moments_of_parts_are_those_of_the_whole():
    x = values(3000).bfloat16()
    whole, parts = Moments(rope=True), Moments(rope=True)
    whole.add(x)
    for part in x.split(700):
        parts.add(part)
    torch.testing.assert_close(whole.sums, parts.sums, rtol=1e-12, atol=1e-9)  # float64 sums in another order
    wide = x.double()
    torch.testing.assert_close(whole.sums[0], wide.sum(0), rtol=1e-12, atol=1e-9)
    torch.testing.assert_close(
        whole.sums[1], wide.square().sum(0), rtol=1e-12, atol=0
    )  # squares of BF16 are exact in FP32
    pair = wide[..., :32].square() + wide[..., 32:].square()
    torch.testing.assert_close(whole.sums[2], torch.cat([pair, pair], -1).sum(0), rtol=1e-7, atol=0)  # rounded to FP32
    assert whole.mean().nonzero().tolist() == [[0, 3]]
    assert whole.mean()[0, 3] == pytest.approx(30, abs=0.2)  # on the grid of BF16 numbers of 33: multiples of 1/4


def test_a_layer_is_all_of_its_tokens_without_the_mean_of_the_first():
    layer = LayerObserver(INT8, rotate_keys=False, means=True)
    x = {which: values(800, seed=seed) for seed, which in enumerate("qkv")}
    for which, y in x.items():
        layer.add(which, y[:200])
    layer.settle()
    for which, y in x.items():
        layer.add(which, y[200:300])
        layer.add(which, y[300:])
    layer.settle()
    found = layer.results()
    assert sorted(found) == sorted(
        ["q_scale", "k_scale", "v_scale", "k_mean", "v_mean", "k_noise", "v_noise", "k_offset"]
    )
    assert found["v_mean"].nonzero().tolist() == [[0, 3]] and layer.tokens == 800
    assert found["v_mean"][0, 3] == pytest.approx(x["v"][:200, 0, 3].mean().item(), rel=1e-6)
    for which, codec in (("q", INT8), ("k", INT8), ("v", E4M3)):
        mean = found.get(f"{which}_mean", torch.zeros(2, 64))
        torch.testing.assert_close(
            found[f"{which}_scale"], (x[which] - mean).abs().amax((0, 2)) / codec.max, rtol=1e-6, atol=0
        )
        if which != "q":
            direct = Observer(codec, sampled=True)
            direct.mean = mean
            direct.add(x[which])
            assert torch.equal(found[f"{which}_noise"], direct.noise(found[f"{which}_scale"]))
