"""Conversions of 8-bit codes in kernels, in Triton's interpreter."""

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from fp8attn.formats.codec import E4M3
from fp8attn.kernels.codec import from_e4m3, from_int8, round_to, to_e4m3
from tests.support.interpreted import QUIET, dynamo_knows_torch, poisoned  # noqa: F401

pytestmark = QUIET


EVERY_CODE = torch.arange(256, dtype=torch.uint8)


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
    edges = torch.tensor(
        [0.0, -0.0, 449.0, 464.0, 1e30, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-20, 2.0**-10, 2.0**-126]
    )
    x = torch.cat(
        [ties, torch.nextafter(ties, torch.tensor(torch.inf)), torch.nextafter(ties, torch.tensor(-torch.inf)), edges]
    )
    x = torch.cat([x, torch.randn(4096 - len(x)) * torch.exp2(torch.randint(-30, 20, (4096 - len(x),)).float())])
    halves, integers = torch.zeros(2, 256).half()
    quantized, bf16 = torch.zeros(4096, dtype=torch.uint8), torch.zeros(4096).bfloat16()
    _convert[(1,)](EVERY_CODE, halves, integers, x, quantized, bf16, N=4096)
    assert torch.equal(integers.float(), EVERY_CODE.view(torch.int8).float())
    assert torch.equal(halves.float().nan_to_num(1e5), exact.nan_to_num(1e5))
    assert torch.equal(quantized, E4M3.quantize(x).view(torch.uint8))
    assert torch.equal(bf16.float().nan_to_num(7e30), x.bfloat16().float().nan_to_num(7e30))
