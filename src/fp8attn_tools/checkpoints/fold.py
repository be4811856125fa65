"""Static means of V, moved into the biases of a checkpoint.

The weights of attention sum to one, so `sum_j p_j v_j = sum_j p_j (v_j - m) + m` for any constant m. `v - m` is V with
another bias, and the output projection W of `o + m` is `W o + W m`, which is a projection of o with another bias:

    v_proj.bias <- v_proj.bias - m        o_proj.bias <- o_proj.bias + W m'

with m' the m of each query head's KV head. So V loses its offset before it is quantized, and the model computes the
same function. v_proj's new bias is rounded to its dtype; m is then exactly what that bias lost, so that the only error
left is the rounding of o_proj's new bias.
K has no such place: RoPE rotates its bias with every token.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

from fp8attn.errors import UsageError

from .attentions import Attention, heads_of
from .folder import FLOATS, Checkpoint


def moved_means(checkpoint: Checkpoint, attention: Attention, v_mean: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of an attention module with `v_mean [num_kv_heads, head_dim]` moved from V to the output, by name.

    Raises:
        UsageError: the projections have no biases, or their dtype is not a plain one; a new bias is too large for its
            dtype.
    """
    q_heads, kv_heads, head_dim = heads_of(checkpoint)
    v_bias = f"{attention.name}.{'qkv_proj' if attention.fused else 'v_proj'}.bias"
    o_bias, o_weight = (f"{attention.name}.o_proj.{part}" for part in ("bias", "weight"))
    if missing := [name for name in (v_bias, o_bias, o_weight) if name not in checkpoint.tensors]:
        raise UsageError(
            f"V of layer {attention.index} has a mean, which this checkpoint has no place for: it lacks "
            f"{', '.join(missing)}. Export with fold_v_mean=False: V is then stored with its offset"
        )
    for name in (v_bias, o_bias, o_weight):
        if checkpoint.tensors[name].dtype not in FLOATS:
            raise UsageError(
                f"V of layer {attention.index} has a mean, and {name} is {checkpoint.tensors[name].dtype}, which "
                f"cannot be rewritten (only {', '.join(FLOATS)} can); export with fold_v_mean=False"
            )
    old_v, old_o, weight = (checkpoint.get(name) for name in (v_bias, o_bias, o_weight))
    rows = slice(-kv_heads * head_dim, None)  # V's are the last rows of a fused projection
    new_v = old_v.clone()
    new_v[rows] = (old_v[rows].double() - v_mean.double().flatten()).to(old_v.dtype)
    moved = (
        (old_v.double() - new_v.double())[rows]
        .view(kv_heads, head_dim)
        .repeat_interleave(q_heads // kv_heads, 0)
        .flatten()
    )
    new_o = (old_o.double() + weight.double() @ moved).to(old_o.dtype)
    new = {v_bias: new_v, o_bias: new_o}
    for name, tensor in new.items():
        if not torch.isfinite(tensor).all():
            raise UsageError(f"{name} would be too large for {tensor.dtype}; export with fold_v_mean=False")
    return new


def overwrite(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Overwrite tensors of a safetensors file in place, with values of the same dtypes and shapes.

    So a file of gigabytes needs no memory, and its other bytes stay as they are. A second file with the new tensors
    would not do: some loaders read files in any order, and would take the old ones.
    """
    with path.open("r+b") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        for name, tensor in tensors.items():
            begin, end = header[name]["data_offsets"]
            data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            assert (FLOATS[header[name]["dtype"]], end - begin) == (tensor.dtype, len(data)), name
            file.seek(8 + size + begin)
            file.write(data)
