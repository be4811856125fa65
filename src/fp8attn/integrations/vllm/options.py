"""Options of fp8attn in vLLM: `--additional-config '{"fp8attn": {"scales": "scales.safetensors", "key_dtype": "int8"}}'`."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ...errors import UsageError
from ...formats.codec import DEFAULT_KEY_DTYPE, KeyDtype, key_type
from ...formats.rotation import rotate
from ...scales import KVScales


class Calibrated(NamedTuple):
    """What is static in a layer's pages, on the CPU.

    Attributes:
        stored_k_mean, v_mean: `[heads, head_dim]` float32, as `KVPages` has them; None: zero.
        page_scales: `[heads, 2]` float32, the scales of K and V of every page; None: each page has its own.
    """

    stored_k_mean: torch.Tensor | None = None
    v_mean: torch.Tensor | None = None
    page_scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Options:
    """The options of all layers.

    Attributes:
        scales: a file of `KVScales.save`. Its means of K and V are used. Its scales are used with `static_scales`.
        static_scales: all pages of a layer have the file's scales. Otherwise each page has its own, which grows while the page is filled.
        key_dtype: `"int8"` or `"e4m3"`.
        exact: keep 16 bits of queries and weights in prompts, too (`AttentionParams.exact`), so that a hit of the prefix cache computes the
            rest of a prompt as a whole prompt is computed.
        count_overflows: count how often the scales of pages grow, for `impl.overflows` and `metrics`.
    """

    scales: str | None = None
    static_scales: bool = False
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE
    exact: bool = False
    count_overflows: bool = False

    @classmethod
    def of(cls, additional_config: Any) -> Options:
        """The options in vLLM's `additional_config`.

        Raises:
            UsageError: an option is unknown, has a value of another type, no such value, or needs another one.
        """
        given = additional_config.get("fp8attn", {}) if isinstance(additional_config, dict) else {}
        if not isinstance(given, dict):
            raise UsageError(f"additional_config['fp8attn'] must be a JSON object of options; got {given!r}")
        if isinstance(additional_config, dict) and "fp8attn" not in additional_config:
            for name in map(str, additional_config):
                if difflib.get_close_matches("fp8attn", [name.lower()], cutoff=0.7):
                    raise UsageError(f"additional_config has {name!r}: the options of fp8attn are under 'fp8attn'")
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(names)):
            raise UsageError(f"additional_config['fp8attn'] has {', '.join(unknown)}; the options are {', '.join(names)}")
        for name, value in given.items():
            types = (str,) if name == "key_dtype" else (str, type(None)) if name == "scales" else (bool,)
            if not isinstance(value, types):
                wanted = "true or false, without quotes" if bool in types else "a string"
                raise UsageError(f"additional_config['fp8attn'] has {name} {value!r}; it must be {wanted}")
        options = cls(**given)
        key_type(options.key_dtype)  # raises UsageError
        if options.static_scales and options.scales is None:
            raise UsageError("additional_config['fp8attn'] has static_scales, which needs scales, a file of `fp8attn calibrate`")
        return options

    def calibrated(self, layer_name: str, heads: slice, *, num_layers: int, num_kv_heads: int, head_dim: int) -> Calibrated:
        """What the file has for a layer.

        Args:
            layer_name: vLLM's, such as `model.layers.3.self_attn.attn`.
            heads: the KV heads of this process, if tensor parallelism divides them.
            num_layers, num_kv_heads, head_dim: the shape of the whole model.
        Raises:
            UsageError: the file is missing or damaged, or of another model, key_dtype or rotation.
        """
        if self.scales is None:
            return Calibrated()
        scales = _load(self.scales)
        scales.check(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, key_dtype=self.key_dtype, rotate_keys=True)
        number = layer_number(layer_name)
        if number is None or number not in scales:  # layers with a window have none
            return Calibrated()
        layer = scales.layer(number)
        stored_k_mean, v_mean = rotate(layer.k_mean[heads]), layer.v_mean[heads].contiguous()
        if self.static_scales:  # kernels of static scales have both means (`precompile.warmup`)
            return Calibrated(stored_k_mean, v_mean, torch.stack([scale[heads] for scale in layer.page_scales], -1))
        return Calibrated(stored_k_mean if stored_k_mean.any() else None, v_mean if v_mean.any() else None)


def layer_number(layer_name: str) -> int | None:
    """The number in vLLM's name of a layer, such as `model.layers.3.self_attn.attn`."""
    found = re.search(r"layers\.(\d+)\.", layer_name)
    return None if found is None else int(found[1])


@lru_cache(maxsize=1)
def _load(path: str) -> KVScales:
    return KVScales.load(path)
