"""Each call between `torch.inference_mode` and normal mode: tensors made in either, used in either, with equal results.

Caches are in `tests/cache` and `tests/integrations/transformers`.
"""

from contextlib import nullcontext
from itertools import product

import pytest
import torch

import fp8attn

B, H, S, D = 2, 2, 20, 64
MODES = {"inference": torch.inference_mode, "normal": nullcontext}
PAIRS = list(product(MODES, MODES))
BACKENDS = ["reference", "triton"]  # the latter in Triton's interpreter


def draw(mode, *shape, seed=0, dtype=torch.bfloat16):
    """Random numbers that were made in that mode."""
    with MODES[mode]():
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check(run, made, used):
    """The same values from tensors of `made` in `used` as in normal mode; results can be used in both modes."""
    expected = run("normal")
    with MODES[used]():
        outs = run(made)
    for mode in MODES.values():
        with mode():
            for out, right in zip(outs, expected, strict=True):
                assert torch.equal(out, right) and torch.equal(out + 0, right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("made", "used"), PAIRS)
def test_dense_calls(made, used, backend):
    def run(mode):
        q, k, v = (draw(mode, B, H, S, D, seed=i) for i in range(3))
        cos, sin = (draw(mode, S, D // 2, seed=i, dtype=torch.float32) for i in (3, 4))
        q8, k8, v8 = (x.to(torch.float8_e4m3fn) for x in (q, k, v))
        scale = draw(mode, B, H, seed=5, dtype=torch.float32).abs()
        quantized = fp8attn.scaled_dot_product_attention_quantized
        return (
            fp8attn.scaled_dot_product_attention(q, k, v, is_causal=True, backend=backend),
            fp8attn.rope_scaled_dot_product_attention(q, k, v, cos, sin, backend=backend),
            quantized(q8, k8, v8, q_descale=scale, k_descale=scale, v_descale=scale, backend=backend),
            *fp8attn.fake_quantize(k, v, backend=backend),
        )

    check(run, made, used)


@pytest.mark.parametrize(("made", "used"), PAIRS)
def test_gradients_of_fake_quantize(made, used):
    """They reach weights in normal mode, whatever the other tensors are."""
    with MODES[used]():
        fp8attn.fake_quantize(*(draw(made, B, H, S, D, seed=i) for i in range(2)))
    k, v = (draw("normal", B, H, S, D, seed=i, dtype=torch.float32).requires_grad_() for i in range(2))
    outs = fp8attn.fake_quantize(k, v)
    torch.autograd.backward(outs, [torch.ones_like(x) for x in outs])
    assert torch.equal(v.grad, torch.ones_like(v)) and k.grad.isfinite().all() and k.grad.any()


@pytest.mark.parametrize(("made", "appended", "attended", "backend"), list(product(MODES, MODES, MODES, BACKENDS)))
def test_pages(made, appended, attended, backend):
    """Pages are made in one mode, written in another and read in a third."""

    def run(modes):
        mode, append, attend = modes
        with MODES[mode]():
            pages = fp8attn.KVPages.empty(2 * B, H, D, B, 2, v_mean=torch.full((H, D), 0.5))
            out = torch.empty(B * 3, 2 * H, D, dtype=torch.bfloat16)
            empty = torch.empty(0, 2 * H, D, dtype=torch.bfloat16)
        with MODES[append]():
            for step, tokens in enumerate((127, 3)):
                k, v = (draw(append, B * tokens, H, D, seed=2 * step + i) for i in range(2))
                fp8attn.append(pages, k, v, backend=backend)
        with MODES[attend]():
            q = draw(attend, B * 3, 2 * H, D, seed=9)
            result = fp8attn.attention(q, pages, causal=True, backend=backend)
            assert fp8attn.attention(q, pages, causal=True, out=out, backend=backend) is out
            fp8attn.attention(q[:0], pages, out=empty, backend=backend)
        return [result, out, pages.cache_seqlens, *pages.read(1, 130)]

    expected = run(["normal"] * 3)
    for result, right in zip(run([made, appended, attended]), expected, strict=True):
        assert torch.equal(result, right)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("made", "appended"), PAIRS)
def test_from_dense_and_append(made, appended, backend):
    def run(made, appended):
        with MODES[made]():
            pages = fp8attn.from_dense(*(draw(made, B, H, 100, D, seed=i) for i in range(2)), backend=backend)
        with MODES[appended]():
            fp8attn.append(pages, *(draw(appended, B, H, D, seed=i) for i in (2, 3)), backend=backend)
        return pages

    pages, right = run(made, appended), run("normal", "normal")
    assert torch.equal(pages.cache_seqlens, right.cache_seqlens)
    for field in ("k_scale", "v_scale"):
        assert torch.equal(getattr(pages, field), getattr(right, field)), field
    assert torch.equal(pages.v.view(torch.uint8), right.v.view(torch.uint8))
    # `from_dense` allocates pages without zeroing them, so codes of K after the last token are not specified.
    assert torch.equal(pages.k[:, :, :101], right.k[:, :, :101])
