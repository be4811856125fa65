"""The attention modules of a checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from fp8attn.errors import UsageError
from fp8attn.scales import ranges

from .folder import CONFIG, Checkpoint

# The projections of an attention module. Compressed weights have longer names, such as `weight_packed`.
_PROJECTION = re.compile(
    r"(?P<module>(?P<stack>.*?)\blayers\.(?P<index>\d+)\.self_attn)\.(?P<name>[qkvo]_proj|qkv_proj)\.weight(_packed)?"
)


@dataclass(frozen=True)
class Attention:
    """An attention module of a checkpoint.

    Attributes:
        index: its layer's index, as in the name.
        name: the name, such as `model.layers.0.self_attn`.
        fused: whether Q, K and V have one projection, `qkv_proj`.
    """

    index: int
    name: str
    fused: bool


def heads_of(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """`(num_q_heads, num_kv_heads, head_dim)`, as the config says.

    Raises:
        UsageError: the config does not say it.
    """
    config = checkpoint.decoder
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    kv_heads, head_dim = config.get("num_key_value_heads") or heads, config.get("head_dim")
    if isinstance(heads, int) and isinstance(hidden, int) and head_dim is None:
        head_dim = hidden // heads
    if not all(isinstance(number, int) and number > 0 for number in (heads, kv_heads, head_dim)):
        raise UsageError(
            f"{checkpoint.folder / CONFIG} must have num_attention_heads, and head_dim or hidden_size; "
            f"it has {', '.join(sorted(config)) or 'nothing'}"
        )
    return heads, kv_heads, head_dim  # type: ignore[return-value]  # mypy does not see the check


def attentions_of(checkpoint: Checkpoint) -> dict[int, Attention]:
    """The attention modules of the decoder, by layer index.

    Raises:
        UsageError: the names are unknown, or several stacks of layers could be the decoder's.
    """
    q_heads, kv_heads, head_dim = heads_of(checkpoint)
    stacks: dict[str, dict[int, dict[str, int]]] = {}
    for name, tensor in checkpoint.tensors.items():
        if match := _PROJECTION.fullmatch(name):
            stacks.setdefault(match["stack"], {}).setdefault(int(match["index"]), {})[match["name"]] = tensor.shape[0]
    rows = {"k_proj": kv_heads * head_dim, "v_proj": kv_heads * head_dim}
    fused = {"qkv_proj": (q_heads + 2 * kv_heads) * head_dim}
    # A vision encoder may have a stack of layers with the same names, and other sizes.
    found = {
        stack: layers
        for stack, layers in stacks.items()
        if all(rows.items() <= layer.items() or fused.items() <= layer.items() for layer in layers.values())
    }
    if len(found) != 1:
        what = (
            f"{', '.join(f'{stack}layers.N' for stack in found)}: any could be the decoder's"
            if found
            else f"none: {_names(checkpoint)}"
        )
        raise UsageError(
            f"{checkpoint.folder}: scales need one stack of layers with names such as "
            f"model.layers.N.self_attn.k_proj.weight, of {rows['k_proj']} rows for K and V (num_kv_heads * head_dim), "
            f"or a fused qkv_proj of {fused['qkv_proj']}; found {what}"
        )
    ((stack, layers),) = found.items()
    return {
        index: Attention(index, f"{stack}layers.{index}.self_attn", "k_proj" not in layers[index])
        for index in sorted(layers)
    }


def _names(checkpoint: Checkpoint) -> str:
    """The names of the tensors of layers, with N for numbers, to say what an unknown architecture has."""
    names = sorted(
        {re.sub(r"\b\d+\b", "N", name) for name in checkpoint.tensors if re.search(r"\.\d+\..*(att|qkv|_proj)", name)}
    )
    return (
        ("there are " + ", ".join(names[:12]) + (", ..." if len(names) > 12 else ""))
        if names
        else "no layer has projections"
    )


def layers_text(indices: Iterable[int]) -> str:
    """`layer 3`, `layers 0-2, 5`."""
    given = list(indices)
    return f"layer{'' if len(given) == 1 else 's'} {ranges(given)}"
