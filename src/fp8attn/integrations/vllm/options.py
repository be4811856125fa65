"""Options of fp8attn in vLLM: `--additional-config '{"fp8attn": {"scales": "scales.safetensors", "key_dtype": "int8"}}'`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch

from ...errors import UsageError
from ...layout import DEFAULT_KEY_DTYPE, KeyDtype, key_type
from ...rotation import rotate
from ...scales import KVScales


@dataclass(frozen=True)
class Options:
    """The options of all layers.

    Attributes:
        scales: a file of `KVScales.save`. Its means of K and V are used. Its scales are not: each page has its own.
        key_dtype: `"int8"` or `"e4m3"`.
        exact: keep 16 bits of queries and weights in prompts, too (`AttentionParams.exact`), so that a hit of the prefix cache computes the
            rest of a prompt as a whole prompt is computed.
        count_overflows: count how often the scales of pages grow, for `impl.overflows` and `metrics`.
    """

    scales: str | None = None
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE
    exact: bool = False
    count_overflows: bool = False

    @classmethod
    def of(cls, additional_config: Any) -> Options:
        """The options in vLLM's `additional_config`.

        Raises:
            UsageError: an option is unknown, or has no such value.
        """
        given = additional_config.get("fp8attn", {}) if isinstance(additional_config, dict) else {}
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(given) - set(names)):
            raise UsageError(f"additional_config['fp8attn'] has {', '.join(unknown)}; the options are {', '.join(names)}")
        options = cls(**given)
        key_type(options.key_dtype)  # raises UsageError
        return options

    def means(
        self, layer_name: str, heads: slice, *, num_layers: int, num_kv_heads: int, head_dim: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """The means of K (rotated) and V of a layer, each `[heads, head_dim]` float32 on the CPU; None where all are zero.

        Args:
            layer_name: vLLM's, such as `model.layers.3.self_attn.attn`.
            heads: the KV heads of this process, if tensor parallelism divides them.
            num_layers, num_kv_heads, head_dim: the shape of the whole model.
        Raises:
            UsageError: the file is missing or damaged, or of another model, key_dtype or rotation.
        """
        if self.scales is None:
            return None, None
        scales = _load(self.scales)
        scales.check(num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, key_dtype=self.key_dtype, rotate_keys=True)
        number = layer_number(layer_name)
        if number is None or number not in scales:  # layers with a window have none
            return None, None
        layer = scales.layer(number)
        k_mean, v_mean = rotate(layer.k_mean[heads]), layer.v_mean[heads].contiguous()
        return k_mean if k_mean.any() else None, v_mean if v_mean.any() else None


def layer_number(layer_name: str) -> int | None:
    """The number in vLLM's name of a layer, such as `model.layers.3.self_attn.attn`."""
    found = re.search(r"layers\.(\d+)\.", layer_name)
    return None if found is None else int(found[1])


@lru_cache(maxsize=1)
def _load(path: str) -> KVScales:
    return KVScales.load(path)
