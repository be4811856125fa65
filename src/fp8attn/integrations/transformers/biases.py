"""Static means that a model's weights give without data: what the biases of its projections add to every K and V.

V's mean is its bias. K's bias is turned by RoPE, `R(t) b` at position t, and the best constant to subtract is its mean over positions:
nearly all of it where a pair of channels turns slowly, nothing where it turns fast. Means are used where they are several deviations.
There are no data to take deviations from, so the weights give them: `sqrt(sum_i (W[c, i] g[i])^2)` for channel c of a projection W behind
an RMSNorm or LayerNorm of weight g, whose output has a root mean square of g. For K it is the root mean square of the pair that RoPE turns.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ...scales import SEVERAL

POSITIONS = 4096  # of the context, at which RoPE is looked at
MAX_SPREAD = 4.0  # of the variance of a score's error: twice the error


@dataclass(frozen=True, eq=False)
class LayerBiases:
    """What the biases of a layer do to its K and V.

    Attributes:
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, to be subtracted; None: nothing is worth it.
        k_offset: root mean square over positions of what is left of K's bias after that, in deviations, of the pair where it is largest.
    """

    k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    k_offset: float = 0.0

    @property
    def stands_out(self) -> bool:
        """Whether K keeps an offset of several deviations, which no static mean removes."""
        return self.k_offset >= SEVERAL


@torch.no_grad()
def layer_biases(model: nn.Module, context: int | None = None) -> dict[int, LayerBiases]:
    """By layer index, what biases do; layers without biases, or whose projections or RoPE are of an unknown form, are absent.

    Args:
        model: a transformers model.
        context: tokens over whose positions K's bias is averaged. None: the config's max_position_embeddings.
    """
    context = context or getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or POSITIONS
    rotary = next((m for m in model.modules() if any(name.endswith("inv_freq") for name, _ in m.named_buffers(recurse=False))), None)
    found = {}
    for index, attention, norm in _attentions(model):
        k, v = (_offset(attention, which, norm) for which in "kv")
        v_mean = None if v is None else _several(*v)
        k_mean, k_offset = (None, 0.0) if k is None else _rotated(*k, attention, rotary, context)
        if v_mean is not None or k_mean is not None or k_offset:
            found[index] = LayerBiases(k_mean, v_mean, k_offset)
    return found


@torch.no_grad()
def spread_layers(model: nn.Module) -> set[int]:
    """The layers, by index, whose E4M3 keys rotation would make worse: large channels of K meet small channels of Q.

    E4M3's error is relative. Let q_c^2 and k_c^2 be the mean squares of channel c, as the weights give them. A score's error has a variance
    proportional to `sum_c q_c^2 k_c^2`, and of rotated keys to `sum_c q_c^2 * sum_c k_c^2 / head_dim`. A layer is named where a head's
    second number is more than `MAX_SPREAD` times the first. Layers whose projections are of an unknown form are not named.
    """
    found = set()
    for index, attention, norm in _attentions(model):
        q, k = (_mean_squares(attention, which, norm) for which in "qk")
        if q is not None and k is not None and len(q) % len(k) == 0:
            q = q.unflatten(0, (len(k), -1)).mean(1)  # of the query heads of a KV head
            if (q.mean(1) * k.sum(1) > MAX_SPREAD * (q * k).sum(1)).any():
                found.add(index)
    return found


def _mean_squares(attention: nn.Module, which: str, norm: nn.Module | None) -> torch.Tensor | None:
    """Of Q's or K's channels, `[heads, head_dim]` float32, but for a factor; None: there are no weights to see."""
    projection, head_dim = getattr(attention, f"{which}_proj", None), getattr(attention, "head_dim", None)
    if not isinstance(projection, nn.Linear) or not projection.weight.is_floating_point() or head_dim is None:
        return None
    last = getattr(attention, f"{which}_norm", None)
    if last is not None:  # a norm behind the projection: its weight says how large channels are
        gain = getattr(last, "weight", None)
        return None if gain is None or gain.shape != (head_dim,) else _gain(last).square().expand(len(projection.weight) // head_dim, -1)
    weight = projection.weight.float()
    gain = None if norm is None else getattr(norm, "weight", None)
    weight = weight * _gain(norm) if gain is not None and gain.shape == weight.shape[1:] else weight
    return weight.square().sum(1).unflatten(0, (-1, head_dim))


def _gain(norm: nn.Module) -> torch.Tensor:
    """What a norm multiplies channels by."""
    return norm.weight.float() + ("Gemma" in type(norm).__name__)  # Gemma's norms multiply by 1 + weight


def _attentions(model: nn.Module) -> Iterator[tuple[int, nn.Module, nn.Module | None]]:
    """The decoder's attention modules with their layer's number and the norm in front of them, where it is known."""
    for name, module in model.named_modules():
        if isinstance(getattr(module, "layer_idx", None), int) and (hasattr(module, "k_proj") or hasattr(module, "qkv_proj")):
            yield module.layer_idx, module, getattr(model.get_submodule(name.rpartition(".")[0]), "input_layernorm", None)


def _offset(attention: nn.Module, which: str, norm: nn.Module | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """What is added to every K or V, and the deviation, each `[num_kv_heads, head_dim]` float32; None: there is none to see."""
    fused = not hasattr(attention, "k_proj")
    projection = getattr(attention, "qkv_proj" if fused else f"{which}_proj", None)
    head_dim = getattr(attention, "head_dim", None)
    if not isinstance(projection, nn.Linear) or not projection.weight.is_floating_point() or head_dim is None:
        return None  # a quantized or adapted projection, whose weights are not there to see
    if hasattr(attention, f"{which}_norm") or hasattr(attention, f"{which}_layernorm"):
        return None  # a norm behind the projection changes what the bias adds
    weight, bias = projection.weight.float(), projection.bias
    gain = None if norm is None else getattr(norm, "weight", None)
    if gain is not None and gain.shape == weight.shape[1:]:
        gain = _gain(norm)
        shift = getattr(norm, "bias", None)
        added = 0.0 if shift is None else weight @ shift.float()
        weight = weight * gain
    else:
        added = 0.0
    offset = added if bias is None else bias.float() + added
    if not isinstance(offset, torch.Tensor):
        return None
    deviation = weight.norm(dim=1)
    if fused:  # queries, keys, values
        heads = attention.config.num_key_value_heads * head_dim
        rows = slice(len(offset) - 2 * heads, len(offset) - heads) if which == "k" else slice(len(offset) - heads, None)
        offset, deviation = offset[rows], deviation[rows]
    return offset.unflatten(0, (-1, head_dim)), deviation.unflatten(0, (-1, head_dim))


def _several(mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor | None:
    """The mean where it is several deviations, zero elsewhere; None: nowhere."""
    mean = torch.where(mean.abs() >= SEVERAL * deviation, mean, 0.0)
    return mean if mean.any() else None


def _rotated(
    offset: torch.Tensor, deviation: torch.Tensor, attention: nn.Module, rotary: nn.Module | None, context: int
) -> tuple[torch.Tensor | None, float]:
    """K's mean behind RoPE, and what is left of the offset then, in deviations."""
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if (rotary is None and apply is None) or not getattr(attention, "use_rope", True):  # learned positions, or none
        return _several(offset, deviation), 0.0
    if rotary is None or apply is None or list(inspect.signature(apply).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None, 0.0
    # Random positions: at regular ones a pair that turns once from one to the next would seem to stand still.
    generator = torch.Generator().manual_seed(0)
    count = min(context, POSITIONS)
    positions = torch.randperm(context, generator=generator)[:count].sort().values.to(offset.device)
    layer_type = {"layer_type": "full_attention"} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
    cos, sin = rotary(offset, positions[None], **layer_type)
    cos, sin = cos.float(), sin.float()
    x = offset[None, :, None].expand(1, -1, count, -1)  # [1, num_kv_heads, positions, head_dim]
    x = apply(x, x, cos, sin)[1][0]
    # Which channels RoPE mixes with one another: those that it makes of each channel alone at one position.
    each = torch.eye(offset.shape[1], device=offset.device)[None, :, None]
    mixed = (apply(each, each, cos[:, -1:], sin[:, -1:])[1][0, :, 0] != 0).float()

    def length(x: torch.Tensor) -> torch.Tensor:
        return (x.square() @ mixed).sqrt()

    mean = x.mean(1)
    # A mean from which some position is farther than from zero would make the scale of that position's page larger.
    harmless = length(x - mean[:, None]).amax(1) <= length(x).amax(1)
    deviation = length(deviation) / mixed.sum(0).sqrt()
    mean = torch.where(harmless & (length(mean) >= SEVERAL * deviation), mean, 0.0)
    left = length(x - mean[:, None]).square().mean(1).sqrt()
    return mean if mean.any() else None, float((left / deviation).nan_to_num(0.0).amax())
