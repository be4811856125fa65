"""What vLLM says about a layer and about the options:
`--additional-config '{"fp8attn": {"scales": "scales.safetensors"}}'`.
"""

from __future__ import annotations

import difflib
import re
from typing import Any

from ...errors import UsageError
from ..engine.options import Options


def config_options(additional_config: Any) -> Options:
    """The options in vLLM's `additional_config`.

    Raises:
        UsageError: as `Options.of`, or the section has a name that is almost `fp8attn`.
    """
    if not isinstance(additional_config, dict):
        return Options()
    if "fp8attn" not in additional_config:
        for name in map(str, additional_config):
            if difflib.get_close_matches("fp8attn", [name.lower()], cutoff=0.7):
                raise UsageError(f"additional_config has {name!r}: the options of fp8attn are under 'fp8attn'")
    return Options.of(additional_config.get("fp8attn", {}), "additional_config['fp8attn']")


def layer_number(layer_name: str) -> int | None:
    """The number in vLLM's name of a layer, such as `model.layers.3.self_attn.attn`."""
    number = re.search(r"layers\.(\d+)\.", layer_name)
    return None if number is None else int(number[1])
