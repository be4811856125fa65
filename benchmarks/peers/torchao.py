"""torchao's FP8 attention over FlashAttention-3: one scale a head; BF16 in and out, quantization included."""

from __future__ import annotations

import importlib.machinery
import sys
import types

import torch

from ..problem import Run, Shape
from . import dense, fa3
from .peer import Call, Peer, Wheel, import_wheel

WHEEL = Wheel("torchao==0.18.0")
_registered: list[torch.library.Library] = []


def load() -> None:
    """Import torchao, and make FlashAttention-3 torch's flash backend, for the whole process, as torchao asks of its
    users.

    torch looks for the package `flash_attn_interface` and calls `flash_attn_3::fwd`, which is `fa3_fwd::fwd` by another
    name.
    """
    fa3.PEER.load()
    import_wheel("torchao", "torchao")
    schema = str(torch.ops.fa3_fwd.fwd.default._schema).split("::", 1)[1]
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define(schema)
    library.define("bwd(Tensor x) -> Tensor")
    library.impl("fwd", lambda *args, **kwargs: torch.ops.fa3_fwd.fwd(*args, **kwargs), "CUDA")
    _registered.append(library)
    stand_in = types.ModuleType("flash_attn_interface")
    stand_in.__spec__ = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    sys.modules["flash_attn_interface"] = stand_in
    torch.nn.attention.activate_flash_attention_impl("FA3")
    from torchao.prototype.attention.fp8_fa3.attention import fp8_fa3_sdpa  # noqa: F401


def attention(shape: Shape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Run:
    from torchao.prototype.attention.fp8_fa3.attention import fp8_fa3_sdpa

    dense.check(shape)
    given = dense.batched(shape, q, k, v)
    return Run(lambda: dense.rows(fp8_fa3_sdpa(*given, is_causal=dense.masked(shape))), q, shape.split(k, v))


PEER = Peer(
    calls={"torchao": Call(attention, "torchao", "#f2a65a", levels=1)},
    needs=(WHEEL, fa3.WHEEL),
    load=load,
    release=lambda: f"{WHEEL}, {fa3.WHEEL}",
)
