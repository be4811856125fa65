"""Comfy Kitchen's INT8 attention, which ComfyUI has built in: Q, K, V and the weights in 8-bit integers, P·V summed in
INT32 by tile.

Its own quantization runs: Q and K rotated (signs, then Hadamard), K without one of its rows where that makes the range
smaller; a scale for each thread's rows of Q (4 of 32, 8 apart) and of K (32 of 128), and for each channel of V. `comfy`
is its kernel alone, `comfy-call` the whole call, BF16 in and out. Its kernels are for GPUs from Turing on: `mma.sync`,
no `wgmma`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from types import ModuleType

import torch

from ..problem import DEVICE, Run, Shape
from . import dense
from .peer import Call, Peer, Wheel, library
from .sage import ORDER

WHEEL = Wheel("comfy-kitchen==0.2.40", {"comfy_kitchen": "comfy_kitchen/backends/cuda/_C.abi3.so"})
BLOCK = 128  # queries, keys
LEAST_KEYS = 1024  # up to here it has other tiles
BF16 = 2  # its number


@lru_cache
def _kernels() -> ModuleType:
    """The extension module `comfy_kitchen.backends.cuda._C`, without its package."""
    loader = ExtensionFileLoader("_C", str(library("comfy_kitchen")))
    module = module_from_spec(spec_from_loader("_C", loader))
    loader.exec_module(module)
    return module


def _given(*tensors: torch.Tensor) -> list[object]:
    """Tensors as its functions take them, which wait for no stream."""
    return [x.__dlpack__(stream=-1) for x in tensors]


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


@dataclass(frozen=True)
class Quantized:
    """Buffers of a problem's Q, K and V in 8 bits, as the kernels lay them out, which `fill` writes.

    Attributes:
        q, k: `[B, H, S, D]` int8.
        v: `[B * H * D, S padded to BLOCK]` int8, 16 tokens in SageAttention's order.
        q_scale: `[B, H, blocks * 32]`; k_scale: `[B, H, blocks * 4]`; v_scale: `[B * H * D]`; float32.
        anchor: `[B, H]` int32: the row of K that is subtracted, or -1.
    """

    q: torch.Tensor
    q_scale: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor
    anchor: torch.Tensor

    @classmethod
    def like(cls, q: torch.Tensor, k: torch.Tensor) -> Quantized:
        """Buffers for q and k `[B, H, S, D]`, and a V of k's shape."""
        batch, heads, _, dim = k.shape
        queries, keys = (-(-x.shape[2] // BLOCK) for x in (q, k))
        new = partial(torch.empty, device=DEVICE)
        return cls(
            new(q.shape, dtype=torch.int8), new(batch, q.shape[1], queries * 32), new(k.shape, dtype=torch.int8),
            new(batch, heads, keys * 4), new(batch * heads * dim, keys * BLOCK, dtype=torch.int8),
            new(batch * heads * dim),
            new(batch, heads, dtype=torch.int32),
        )  # fmt: skip

    def fill(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        given = _given(q, k, v, self.q, self.q_scale, self.k, self.k_scale, self.v, self.v_scale)
        _kernels().sage_sdpa_quantize(*given, BLOCK, BF16, _stream(), self.anchor.data_ptr())

    def attend(self, out: torch.Tensor, softmax_scale: float) -> torch.Tensor:
        """`out [B, H, S, D]`."""
        given = _given(self.q, self.k, self.v, out, self.q_scale, self.k_scale, self.v_scale)
        _kernels().sage_sdpa_prequantized(*given, BLOCK, softmax_scale, BF16, _stream(), None)
        return out

    def values(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the bytes stand for, `[B, H, S, D]` float32. Q and K are rotated, and K's row is subtracted: the weights
        stay the same.
        """
        row = lambda x: torch.arange(x.shape[2], device=x.device)  # noqa: E731
        of_q, of_k = row(self.q) // 32 * 8 + row(self.q) % 8, row(self.k) // BLOCK * 4 + row(self.k) % 8 // 2
        batch, heads, length, dim = self.k.shape
        tokens = self.v.unflatten(1, (-1, 16))[:, :, torch.tensor(ORDER, device=self.v.device).argsort()].flatten(1)[
            :, :length
        ]
        v = (tokens.float() * self.v_scale[:, None]).view(batch, heads, dim, length).transpose(2, 3)
        return self.q * self.q_scale[:, :, of_q, None], self.k * self.k_scale[:, :, of_k, None], v


def _problem(shape: Shape, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Q, K and V `[B, H, S, D]`.

    Raises:
        ValueError: it cannot do the problem, or has other tiles for it.
    """
    dense.check(shape)
    if dense.masked(shape) or shape.dim != BLOCK or max(shape.keys) <= LEAST_KEYS:
        raise ValueError(f"full attention, head_dim {BLOCK}, more than {LEAST_KEYS} keys")
    return dense.batched(shape, *inputs)


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """Its kernel, on what its quantization gives."""
    q, k, v = _problem(shape, q, k, v)
    held, out = Quantized.like(q, k), torch.empty(q.shape, dtype=q.dtype, device=DEVICE)
    held.fill(q, k, v)
    given = [dense.rows(x) for x in held.values()]
    return Run(lambda: dense.rows(held.attend(out, shape.softmax_scale)), given[0], shape.split(*given[1:]))


def whole(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    """The call that ComfyUI makes."""
    given = _problem(shape, q, k, v)

    def call() -> torch.Tensor:
        held = Quantized.like(*given[:2])
        held.fill(*given)
        return dense.rows(held.attend(torch.empty(given[0].shape, dtype=q.dtype, device=DEVICE), shape.softmax_scale))

    return Run(call, q, shape.split(k, v))


PEER = Peer(
    calls={
        "comfy": Call(attention, "Comfy Kitchen INT8", "#81b29a", levels=2),
        "comfy-call": Call(whole, "Comfy Kitchen INT8, whole call", "#81b29a", levels=2),
    },
    needs=(WHEEL,),
    load=_kernels,
    release=lambda: str(WHEEL),
)
