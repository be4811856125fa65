"""Static means from a model's weights, without data: what the biases of its projections add to every K and V.

V's mean is its bias. RoPE rotates K's bias, to `R(t) b` at position t; the best constant to subtract is its mean over
positions. That mean is nearly all of the bias in pairs of channels that rotate slowly, and nothing in pairs that rotate
fast. (The position of an image's token has several parts, one for each pair. Each part is a position of the context,
too.) What remains makes the step of INT8 keys larger (`k_step`). A mean is used if it is several deviations. There are
no data to take deviations from. They are computed from the weights: `sqrt(sum_i (W[c, i] g[i])^2)` for channel c of a
projection W after an RMSNorm or LayerNorm of weight g, whose output has a root mean square of g. K's deviation is the
root mean square of the pair of channels that RoPE rotates together.

Projections may be separate (`q_proj`, `k_proj`, `v_proj`) or fused: queries, keys, values (`qkv_proj`, GPT-2's
`c_attn`), or these three of each head after another (GPT-NeoX's `query_key_value`). Other fused forms are not read,
because nothing says how they are divided. Weights that are quantized, adapted (PEFT) or offloaded are not read: their
modules are run on random inputs, which gives the same two numbers for each channel (`_run`).
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from ...errors import UsageError
from ...scales import SEVERAL
from .config import decoder_config, heads_of
from .decoder import decoder_modules

POSITIONS = 4096  # positions of the context that RoPE is computed at
SAMPLES = 256  # inputs of a module that is run; a deviation of them is right to 5%
PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FUSED = {"GPT2Attention": "c_attn", "GPTNeoXAttention": "query_key_value"}
BY_HEAD = ("query_key_value",)  # each head's Q, K and V are together
# Of `LayerBiases.k_step`. Measured: steps of up to 4 cost a model little, and one of 44 half of its divergence.
MAX_STEP = 8.0
MAX_SPREAD = 4.0  # how much larger the variance of a score's error may become: twice the error


@dataclass(frozen=True, eq=False)
class LayerBiases:
    """What the biases of a layer do to its K and V.

    Attributes:
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, to be subtracted; None: nothing is several deviations.
        k_offset: what remains of K's bias after subtracting `k_mean`: the root mean square over positions, in
            deviations, of the pair where it is largest.
        k_step: how many times larger the step of rotated INT8 keys is because of what remains: the root mean square of
            K beside that of K without its bias, in the head where this is largest.
        unread: whether there are biases that cannot be read: the projections or RoPE have an unknown form, or the
            weights are not loaded.
    """

    k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    k_offset: float = 0.0
    k_step: float = 1.0
    unread: bool = False

    @property
    def stands_out(self) -> bool:
        """Whether K keeps an offset of several deviations, which no static mean removes."""
        return self.k_offset >= SEVERAL

    @property
    def loses(self) -> bool:
        """Whether what K keeps makes the step of INT8 keys so large that the model loses accuracy."""
        return self.k_step >= MAX_STEP


# What was read of a model, with the context, the device and the values of its biases then.
_READ: WeakKeyDictionary[nn.Module, tuple[tuple[int, torch.device], torch.Tensor, dict[int, LayerBiases]]] = (
    WeakKeyDictionary()
)


@torch.no_grad()
def layer_biases(
    model: PreTrainedModel, context: int | None = None, k_means: Mapping[int, torch.Tensor] | None = None
) -> dict[int, LayerBiases]:
    """The effect of biases, by layer index. Layers on which biases have none are absent.

    A model's weights are read once, and again when a bias has another value: every request may make a cache, and
    reading takes milliseconds a layer.

    Args:
        context: positions, from 0, over which K's bias is averaged. None: the config's max_position_embeddings.
        k_means: by layer index, `[num_kv_heads, head_dim]` float32, calibrated means of K, which are subtracted in the
            place of those here.
    """
    context = context or getattr(decoder_config(model.config), "max_position_embeddings", None) or POSITIONS
    attentions, unknown = _attentions(model)
    values = None if k_means else _bias_values(attentions)
    if values is None:
        return _read_biases(model, attentions, unknown, context, k_means or {})
    last = _READ.get(model)
    if last is None or last[0] != (context, values.device) or not torch.equal(last[1], values):
        biases = _read_biases(model, attentions, unknown, context, {})
        _READ[model] = last = (context, values.device), values, biases
    return dict(last[2])


@torch.no_grad()
def spread_layers(model: PreTrainedModel) -> set[int]:
    """The indices of layers whose E4M3 keys the rotation would make worse, because large channels of K meet small
    channels of Q.

    E4M3's error is relative. Let q_c^2 and k_c^2 be the mean squares of channel c, computed from the weights. The
    variance of a score's error is proportional to `sum_c q_c^2 k_c^2`, and with rotated keys to
    `sum_c q_c^2 * sum_c k_c^2 / head_dim`. A layer is included if for one of its heads the second is more than
    `MAX_SPREAD` times the first. Layers with projections of an unknown form are not included.
    """
    spread = set()
    for attention in _attentions(model)[0]:
        q, k = (attention.mean_squares(which) for which in "qk")
        if q is not None and k is not None and len(q) % len(k) == 0:
            q = q.unflatten(0, (len(k), -1)).mean(1)  # over the query heads of a KV head
            if (q.mean(1) * k.sum(1) > MAX_SPREAD * (q * k).sum(1)).any():
                spread.add(attention.index)
    return spread


def _bias_values(attentions: list[Attention]) -> torch.Tensor | None:
    """All biases that `layer_biases` reads, one after another, float32 on one device. None: some modules must be run to
    be read.
    """
    modules = [
        module
        for attention in attentions
        for module in (attention.linear("k"), attention.linear("v"), attention.norm)
        if module is not None
    ]
    if not all(map(_is_plain, modules)) or not all(
        type(module) in (nn.Linear, Conv1D) or not [*module.children()] for module in modules
    ):
        return None
    biases = [bias for module in modules if isinstance(bias := getattr(module, "bias", None), torch.Tensor)]
    return torch.cat([bias.float().to(biases[0].device) for bias in biases]) if biases else torch.empty(0)


def _read_biases(
    model: PreTrainedModel,
    attentions: list[Attention],
    unknown: set[int],
    context: int,
    k_means: Mapping[int, torch.Tensor],
) -> dict[int, LayerBiases]:
    """`layer_biases`, from the weights."""
    rotary, layers = None, {}
    for attention in attentions:
        layer = LayerBiases()
        if attention.is_biased("k"):
            projection = attention.projection("k")
            rotary = rotary or (_rotary(model) if projection is not None else None)
            k_mean = k_means.get(attention.index)
            rotated = None if projection is None else _rotated(*projection, attention.module, rotary, context, k_mean)
            layer = rotated or LayerBiases(unread=True)
        if attention.is_biased("v"):
            projection = attention.projection("v")
            v_mean = None if projection is None else _several(*projection)
            layer = replace(layer, v_mean=v_mean, unread=layer.unread or projection is None)
        if layer.v_mean is not None or layer.k_mean is not None or layer.k_offset or layer.unread:
            layers[attention.index] = layer
    return layers | {index: LayerBiases(unread=True) for index in unknown}


def _attentions(model: PreTrainedModel) -> tuple[list[Attention], set[int]]:
    """The decoder's attention modules of a known form, and the layers with one of another form that has biases."""
    attentions, unknown = [], set()
    for name, module in decoder_modules(model):
        # As an attribute, it would take a microsecond of each module without it.
        index = vars(module).get("layer_idx")
        if not isinstance(index, int):
            continue
        if (hasattr(module, "k_proj") and hasattr(module, "v_proj")) or _fused(module):
            layer = model.get_submodule(name.rpartition(".")[0])
            norm = getattr(layer, "input_layernorm", None) or getattr(layer, "ln_1", None)
            attentions.append(Attention(index, module, norm))
        elif getattr(module, "is_causal", False) is True and _has_bias(module):
            unknown.add(index)
    return attentions, unknown - {attention.index for attention in attentions}


@dataclass(frozen=True, eq=False)
class Attention:
    """An attention module, whose projections of Q, K and V (`which`: `"q"`, `"k"`, `"v"`) are separate or fused.

    Attributes:
        module: transformers has a class for each model, and none for all.
        norm: the norm before it; None: not known.
    """

    index: int
    module: Any
    norm: nn.Module | None

    @property
    def head_dim(self) -> int | None:
        return getattr(self.module, "head_dim", None) or getattr(self.module, "head_size", None)

    def linear(self, which: str) -> nn.Module:
        """The module that projects Q, K or V, alone or with the others."""
        return getattr(self.module, _fused(self.module) or f"{which}_proj")

    def norm_after(self, which: str) -> Any:
        """The norm between the projection of Q, K or V and RoPE, if there is one."""
        return getattr(self.module, f"{which}_norm", None) or getattr(self.module, f"{which}_layernorm", None)

    def is_biased(self, which: str) -> bool:
        """Whether something is added to every K or V. A norm after the projection would change what a bias adds."""
        return self.norm_after(which) is None and (
            _has_bias(self.linear(which)) or getattr(self.norm, "bias", None) is not None
        )

    def projection(self, which: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The projection of Q, K or V as a function of the norm's output before its weight and bias.

        Returns:
            What is added to each channel, and its deviation, which is the norm of its row of weights, `[heads,
            head_dim]` float32 each. None: the form is unknown, or the weights are not loaded.
        """
        linear, norm = self.linear(which), self.norm
        if self.head_dim is None:
            return None
        if type(linear) in (nn.Linear, Conv1D) and _is_plain(linear) and (norm is None or _is_plain(norm)):
            channels = _read(linear, norm)
        elif _is_function_of_inputs(linear) and _is_loaded(linear) and (norm is None or _is_loaded(norm)):
            channels = _run(linear, norm, getattr(linear, "in_features", None) or self.module.config.hidden_size)
        else:
            return None
        added, deviation = (self._heads(x, which) for x in channels)
        return added, deviation

    def _heads(self, x: torch.Tensor, which: str) -> torch.Tensor:
        """The channels of Q, K or V among those of a projection, `[heads, head_dim]`."""
        fused, number, head_dim = _fused(self.module), "qkv".index(which), self.head_dim or 0
        if fused in BY_HEAD:
            return x.unflatten(0, (-1, 3, head_dim))[:, number]
        if fused:
            width = heads_of(self.module.config)[1] * head_dim
            x = x.split([len(x) - 2 * width, width, width])[number]
        return x.unflatten(0, (-1, head_dim))

    def mean_squares(self, which: str) -> torch.Tensor | None:
        """The mean squares of the channels of Q or K up to a common factor, `[heads, head_dim]` float32; None: they
        cannot be read.
        """
        projection, last = self.projection(which), self.norm_after(which)
        if projection is None:
            return None
        _, deviation = projection
        if last is None:
            return deviation.square()
        # Its weight determines how large channels are.
        gain = getattr(last, "weight", None)
        if gain is None or gain.shape != deviation.shape[1:] or not _is_plain(last):
            return None
        return _gain(last).square().expand_as(deviation)


def _fused(module: nn.Module) -> str | None:
    """The name of the module that projects Q, K and V together, if there is one of a known form."""
    if hasattr(module, "k_proj"):
        return None
    if hasattr(module, "qkv_proj"):
        return "qkv_proj"
    return None if getattr(module, "is_cross_attention", False) else FUSED.get(type(module).__name__)


def _has_bias(module: nn.Module) -> bool:
    return any(isinstance(getattr(each, "bias", None), torch.Tensor) for each in module.modules())


def _rotary(model: PreTrainedModel) -> nn.Module | None:
    """The module that computes RoPE's angles for the decoder. Several modules may do so, if their frequencies are the
    same.

    Raises:
        UsageError: several modules have different frequencies.
    """
    angles: dict[str, dict[str, torch.Tensor]] = {}
    for name, module in decoder_modules(model):
        if frequencies := {part: x for part, x in module.named_buffers(recurse=False) if part.endswith("inv_freq")}:
            angles[name] = frequencies
    if not angles:
        return None
    first, *others = angles.values()
    if not all(x.keys() == first.keys() and all(map(torch.equal, x.values(), first.values())) for x in others):
        raise UsageError(
            f"{', '.join(angles)} of {type(model).__name__} compute RoPE with different frequencies, so it is not "
            f"known how it rotates the biases of K. Use transformers' own cache (DynamicCache(config=model.config))"
        )
    return model.get_submodule(next(iter(angles)))


def _is_plain(module: nn.Module) -> bool:
    """Whether the parameters are what the module computes with."""
    return all(type(x) is nn.Parameter and x.dtype in PLAIN and not x.is_meta for x in module.parameters())


def _is_function_of_inputs(module: nn.Module) -> bool:
    """Whether it takes inputs alone. Zaya's projection also takes the cache."""
    parameters = inspect.signature(module.forward).parameters.values()
    return sum(p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters) == 1


def _is_loaded(module: nn.Module) -> bool:
    """Whether the module can be run: it has its weights, or accelerate's hook loads them when it is called."""
    tensors = [*module.parameters(), *module.buffers()]
    return bool(tensors) and (
        not any(x.is_meta for x in tensors)
        or all(
            hasattr(m, "_hf_hook") or not any(p.is_meta for p in m.parameters(recurse=False)) for m in module.modules()
        )
    )


def _read(linear: nn.Linear | Conv1D, norm: nn.Module | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What is added to each channel of a projection, and its deviation, from the weights."""
    weight = linear.weight.T.float() if isinstance(linear, Conv1D) else linear.weight.float()
    added = torch.zeros_like(weight[:, 0]) if linear.bias is None else linear.bias.float()
    gain = getattr(norm, "weight", None)
    if norm is not None and gain is not None and gain.shape == weight.shape[1:]:
        if (shift := getattr(norm, "bias", None)) is not None:
            added = weight @ shift.float() + added
        weight = weight * _gain(norm)
    return added, weight.norm(dim=1)


def _run(linear: nn.Module, norm: nn.Module | None, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """`_read` by running the modules: on what the norm alone adds, and on normal inputs with the norm's gain."""
    tensors = [x for module in (norm, linear) if module is not None for x in (*module.parameters(), *module.buffers())]
    dtype = next((x.dtype for x in tensors if x.dtype in PLAIN), torch.float32)
    # accelerate's hook moves inputs itself.
    device = next((x.device for x in tensors if not x.is_meta), torch.device("cpu"))
    ones = torch.ones(size, dtype=dtype, device=device)
    ones[::2] = -1.0  # an RMSNorm or a LayerNorm returns its weight times this, plus its bias
    up, down = (x if norm is None else norm(x[None, None])[0, 0] for x in (ones, -ones))
    gain, shift = (up - down) / 2 * ones.to(up.device), (up + down) / 2
    normal = torch.randn(SAMPLES, size, dtype=torch.float32, generator=torch.Generator().manual_seed(0)).to(gain)
    out = linear(torch.cat([shift[None], normal * gain + shift])[None])[0].float()
    return out[0], (out[1:] - out[0]).square().mean(0).sqrt()


def _gain(norm: nn.Module) -> torch.Tensor:
    """What a norm multiplies channels by."""
    assert isinstance(norm.weight, torch.Tensor)
    return norm.weight.float() + ("Gemma" in type(norm).__name__)  # Gemma's norms multiply by 1 + weight


def _several(mean: torch.Tensor, deviation: torch.Tensor) -> torch.Tensor | None:
    """The mean in channels where it is several deviations, else zero; None if it is zero in all."""
    mean = torch.where(mean.abs() >= SEVERAL * deviation, mean, 0.0)
    return mean if mean.any() else None


def _rotated(
    offset: torch.Tensor,
    deviation: torch.Tensor,
    attention: Any,
    rotary: nn.Module | None,
    context: int,
    calibrated: torch.Tensor | None,
) -> LayerBiases | None:
    """What RoPE makes of K's bias. None: RoPE has an unknown form. `calibrated`: the mean to subtract; None: the bias's
    own.
    """
    # A process may have a share of the heads.
    calibrated = None if calibrated is None or calibrated.shape != offset.shape else calibrated.to(offset)
    apply = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if (rotary is None and apply is None) or not getattr(attention, "use_rope", True):  # learned positions, or none
        mean = _several(offset, deviation) if calibrated is None else calibrated
        left = (offset if mean is None else offset - mean)[:, None]
        return LayerBiases(k_mean=mean, k_step=_step(left, deviation))
    if rotary is None or apply is None or list(inspect.signature(apply).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return None
    # Random positions: at regular ones, a pair that makes a full rotation from one to the next would seem not to
    # rotate.
    generator = torch.Generator().manual_seed(0)
    count = min(context, POSITIONS)
    positions = torch.randperm(context, generator=generator)[:count].sort().values.to(offset.device)
    layer_type = (
        {"layer_type": "full_attention"} if "layer_type" in inspect.signature(rotary.forward).parameters else {}
    )
    # The position of a token of an image has three parts, which older transformers want for each token.
    positions = positions.expand(3, 1, -1) if hasattr(rotary, "mrope_section") else positions[None]
    cos, sin = (x.to(offset) for x in rotary(offset, positions, **layer_type))  # its module may be on another device
    # Phi and StableLM give RoPE only the channels that it rotates.
    width = getattr(attention, "rotary_ndims", offset.shape[1])

    def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return torch.cat([apply(x[..., :width], x[..., :width], cos, sin)[1], x[..., width:]], -1)[0]

    x = rotate(offset[None, :, None].expand(1, -1, count, -1), cos, sin)  # [num_kv_heads, positions, head_dim]
    # Which channels RoPE mixes: those that are not zero after it is applied to one channel at one position.
    each = torch.eye(offset.shape[1], dtype=torch.float32, device=offset.device)[None, :, None]
    mixed = (rotate(each, cos[:, -1:], sin[:, -1:])[:, 0] != 0).float()

    def length(x: torch.Tensor) -> torch.Tensor:
        return (x.square() @ mixed).sqrt()

    of_pair = length(deviation) / mixed.sum(0).sqrt()
    mean = calibrated
    if mean is None:
        mean = x.mean(1)
        # If some position is farther from the mean than from zero, the mean would make the scale of that position's
        # page larger.
        harmless = length(x - mean[:, None]).amax(1) <= length(x).amax(1)
        mean = torch.where(harmless & (length(mean) >= SEVERAL * of_pair), mean, 0.0)
    left = x - mean[:, None]
    in_deviations = length(left).square().mean(1).sqrt() / of_pair
    return LayerBiases(
        k_mean=mean if mean.any() else None,
        k_offset=float(in_deviations.nan_to_num(0.0).amax()),
        k_step=_step(left, deviation),
    )


def _step(left: torch.Tensor, deviation: torch.Tensor) -> float:
    """`LayerBiases.k_step`, of what remains at each position `[num_kv_heads, positions, head_dim]`; 1 if deviations are
    unknown.
    """
    size = deviation.square().sum(1)
    return float(torch.where(size > 0, (1 + left.square().mean(1).sum(1) / size).sqrt(), 1.0).amax())
