"""Calibrated scales and means, per layer and head: checked, saved and loaded."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from .errors import UsageError
from .files import read_tensors, write_tensors
from .formats.codec import DEFAULT_KEY_DTYPE, E4M3, KeyDtype, codec_of

FORMAT = "fp8attn.kv_scales.2"  # the entry `format` in a file's metadata
RECALIBRATE = "calibrate again (fp8attn_tools.calibrate(model, batches).save(path))"
TENSORS = ("k_scale", "v_scale", "k_mean", "v_mean")
OPTIONAL = ("q_scale",)
# A static mean is subtracted if it is at least this many deviations. A smaller one saves little, and it costs accuracy
# if a token with most of the attention has a V near zero, as sink tokens have: after subtracting the mean, that V is no
# longer near zero.
SEVERAL = 4.0
_NAME = re.compile(rf"model\.layers\.(\d+)\.self_attn\.({'|'.join(TENSORS + OPTIONAL)})")


@dataclass(frozen=True, eq=False, repr=False)
class LayerScales:
    """Static scales and means of one layer, which a cache uses instead of its pages' own scales.

    Attributes:
        k_scale, v_scale: `[num_kv_heads]` float32, of K as it is stored: after RoPE, rotated with `rotate_keys`,
            without its mean. A cache rounds scales of E4M3 up to powers of two.
        k_mean, v_mean: `[num_kv_heads, head_dim]` float32, subtracted before quantization; K's as the model makes K,
            not rotated.
        key_dtype: the format of keys, as `PagedKVCache` takes it.
        rotate_keys: whether K is rotated.
        q_scale: `[num_q_heads]` float32, of Q after RoPE in K's 8-bit dtype, rotated with `rotate_keys`; None: not
            calibrated. fp8attn does not use it; engines that quantize Q with a static scale do.
    """

    k_scale: torch.Tensor
    v_scale: torch.Tensor
    k_mean: torch.Tensor
    v_mean: torch.Tensor
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE
    rotate_keys: bool = True
    q_scale: torch.Tensor | None = None

    def __repr__(self) -> str:
        rotation = "rotated" if self.rotate_keys else "not rotated"
        return f"LayerScales({len(self.k_scale)} KV heads of {self.k_mean.shape[1]}, {self.key_dtype} keys, {rotation})"

    @cached_property
    def page_scales(self) -> torch.Tensor:
        """K's and V's scales in the form that pages have, `[num_kv_heads, 2]` float32. Cached, because every cache
        reads them.
        """
        k, v = codec_of(self.key_dtype), E4M3
        return torch.stack([k.needed_scale(self.k_scale * k.max), v.needed_scale(self.v_scale * v.max)], -1)


@dataclass(frozen=True, eq=False, repr=False)
class KVScales:
    """Calibrated `LayerScales` of a model's layers, and how they were found.

    Attributes:
        layers: by layer index, all with one key_dtype and rotate_keys. Layers with a sliding window are absent.
        num_layers: number of attention layers of the model, also of those that are absent here.
        num_kv_heads, head_dim: the shape of every layer here.
        model_id: the model's name or folder, from its config.
        tokens: number of tokens that were counted.
        method: how the scales were chosen: "absmax", "mse", or such as "percentile 99.99".
        sqnr_db: by layer index, (K, V) signal to quantization-noise ratio in dB on a sample of those tokens.
        k_offsets: by layer index, the largest offset of a pair of K's channels that no static mean removes, in
            deviations, because RoPE rotates the pair too far. Layers where it is less than several are absent.
    Raises:
        UsageError: a scale that is not positive and finite, a mean that is not finite, a wrong shape, or layers with
            different key_dtype or rotate_keys.
    """

    layers: Mapping[int, LayerScales]
    num_layers: int
    num_kv_heads: int
    head_dim: int
    model_id: str = ""
    tokens: int = 0
    method: str = ""
    sqnr_db: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    k_offsets: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.layers:
            raise UsageError(f"there are no layers in these scales; {RECALIBRATE}")
        for index, layer in self.layers.items():
            if not 0 <= index < self.num_layers:
                raise UsageError(f"scales for layer {index} of a model of {self.num_layers} layers; {RECALIBRATE}")
            for name in present(layer):
                tensor = getattr(layer, name)
                heads = (
                    self.num_kv_heads
                    if name != "q_scale"
                    else max(1, tensor.numel() // self.num_kv_heads) * self.num_kv_heads
                )
                shape = (heads,) if name.endswith("scale") else (heads, self.head_dim)
                if tensor.shape != shape or tensor.dtype != torch.float32:
                    got = f"{list(tensor.shape)} {tensor.dtype}"
                    raise UsageError(f"layer {index}: {name} must be {list(shape)} float32, not {got}; {RECALIBRATE}")
                if not torch.isfinite(tensor).all() or (name.endswith("scale") and (tensor <= 0).any()):
                    wanted = "positive and finite" if name.endswith("scale") else "finite"
                    raise UsageError(f"layer {index}: {name} must be {wanted}, and is not; {RECALIBRATE}")
            codec_of(layer.key_dtype)  # raises UsageError
        ways = {(layer.key_dtype, layer.rotate_keys) for layer in self.layers.values()}
        if len(ways) > 1:
            raise UsageError(
                f"the layers differ in (key_dtype, rotate_keys): {', '.join(map(str, sorted(ways)))}; {RECALIBRATE}"
            )

    def __repr__(self) -> str:
        first, of = next(iter(self.layers.values())), f" of {self.model_id!r}" if self.model_id else ""
        return (
            f"KVScales(layers {ranges(self.layers)}{of}, {self.method or 'no method'}, {self.tokens} tokens, {first!r} "
            f"each)"
        )

    @property
    def key_dtype(self) -> KeyDtype:
        """The format of keys, as `PagedKVCache` takes it."""
        return next(iter(self.layers.values())).key_dtype

    @property
    def rotate_keys(self) -> bool:
        """Whether keys are rotated."""
        return next(iter(self.layers.values())).rotate_keys

    def __contains__(self, index: int) -> bool:
        """Whether layer `index` has scales."""
        return index in self.layers

    def layer(self, index: int) -> LayerScales:
        """The scales of layer `index`.

        Raises:
            UsageError: that layer was not calibrated.
        """
        if index not in self.layers:
            raise UsageError(
                f"layer {index} has no scales (these are for layers {ranges(self.layers)}); keep it in 16 bits, "
                "or calibrate the model whose cache this is"
            )
        return self.layers[index]

    def check(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        model_id: str | None = None,
        key_dtype: KeyDtype | None = None,
        rotate_keys: bool | None = None,
    ) -> None:
        """Refuse scales that were calibrated on another model, or for other key_dtype or rotate_keys.

        Args:
            num_layers, num_kv_heads, head_dim: the model's shape; with tensor parallelism, of the whole model.
            model_id: the model's name or folder. Only its last part is compared, because a hub name and a local copy
                differ in the rest. None or empty: not compared.
            key_dtype, rotate_keys: the cache's. None: not compared.
        Raises:
            UsageError: they do not match; the message says what differs.
        """
        differences = [
            f"{name} is {mine} in the scales and {yours} in the model"
            for name, mine, yours in (
                ("num_layers", self.num_layers, num_layers),
                ("num_kv_heads", self.num_kv_heads, num_kv_heads),
                ("head_dim", self.head_dim, head_dim),
            )
            if mine != yours
        ]
        if model_id and self.model_id and Path(model_id).name != Path(self.model_id).name:
            differences.append(f"the scales are for {self.model_id!r} and the model is {model_id!r}")
        if differences:
            raise UsageError(f"these scales belong to another model: {'; '.join(differences)}; {RECALIBRATE}")
        wanted = {"key_dtype": key_dtype, "rotate_keys": rotate_keys}
        if any(wish is not None and wish != getattr(self, name) for name, wish in wanted.items()):
            raise UsageError(
                f"these scales are for key_dtype={self.key_dtype!r}, rotate_keys={self.rotate_keys}, and the cache has "
                f"{', '.join(f'{name}={wish!r}' for name, wish in wanted.items() if wish is not None)}; make the cache "
                f"with the scales' options, or calibrate again with the cache's"
            )

    def save(self, path: str | Path) -> None:
        """Write a safetensors file as a whole, and make the folders above it.

        Its tensors are `model.layers.N.self_attn.{k,v}_{scale,mean}`, and `q_scale` if there is one. Its metadata has
        the other attributes, as strings.
        """
        tensors = {
            f"model.layers.{index}.self_attn.{name}": getattr(layer, name)
            .cpu()
            .clone(memory_format=torch.contiguous_format)
            for index, layer in self.layers.items()
            for name in present(layer)
        }
        metadata = {name: str(getattr(self, name)) for name in (*_METADATA, "key_dtype")}
        metadata |= {"format": FORMAT, "rotate_keys": json.dumps(self.rotate_keys)}
        metadata["sqnr_db"] = json.dumps({str(index): list(db) for index, db in self.sqnr_db.items()})
        metadata["k_offsets"] = json.dumps({str(index): offset for index, offset in self.k_offsets.items()})
        write_tensors(path, tensors, metadata)

    @classmethod
    def load(cls, path: str | Path) -> KVScales:
        """Read what `save` wrote. Only tensors and strings are read; nothing in the file is executed.

        Raises:
            UsageError: there is no such file, it is damaged or not from `save`, or its contents are not valid.
        """
        tensors, metadata = read_tensors(path, "`fp8attn calibrate` writes one, and KVScales.save", RECALIBRATE)
        if metadata.get("format") != FORMAT:
            reason = f"its format is {metadata['format']!r}" if "format" in metadata else "it has no format"
            if metadata.get("format") == "fp8attn.kv_scales.1":
                reason = "it was written by an older fp8attn, whose scales mean other values"
            raise UsageError(f"{path} does not hold fp8attn scales ({FORMAT}): {reason}; {RECALIBRATE}")
        named: dict[int, dict[str, torch.Tensor]] = {}
        for name, tensor in tensors.items():
            match = _NAME.fullmatch(name)
            if match is None:
                raise UsageError(f"{path} has a tensor {name!r} that fp8attn does not write; {RECALIBRATE}")
            named.setdefault(int(match[1]), {})[match[2]] = tensor
        for index, of_layer in named.items():
            if missing := sorted(set(TENSORS) - set(of_layer)):
                raise UsageError(f"{path}: layer {index} has no {', '.join(missing)}; {RECALIBRATE}")
        try:
            provenance = {name: kind(metadata[name]) for name, kind in _METADATA.items()}
            key_dtype, rotate_keys = metadata["key_dtype"], {"true": True, "false": False}[metadata["rotate_keys"]]
            sqnr_db = {int(index): (float(k), float(v)) for index, (k, v) in json.loads(metadata["sqnr_db"]).items()}
            offsets = {int(index): float(offset) for index, offset in json.loads(metadata["k_offsets"]).items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UsageError(
                f"{path}: the metadata is incomplete or not as written ({error!r}); {RECALIBRATE}"
            ) from error
        layers = {}
        for index in sorted(named):
            layers[index] = LayerScales(**named[index], key_dtype=codec_of(key_dtype).name, rotate_keys=rotate_keys)
        return cls(layers, sqnr_db=sqnr_db, k_offsets=offsets, **provenance)


_METADATA = {"num_layers": int, "num_kv_heads": int, "head_dim": int, "model_id": str, "tokens": int, "method": str}


def present(layer: LayerScales) -> tuple[str, ...]:
    """The names of the tensors that a layer has."""
    return (*TENSORS, *(name for name in OPTIONAL if getattr(layer, name) is not None))


def ranges(indices: Iterable[int]) -> str:
    """Indices as ranges: `0-3, 5`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
