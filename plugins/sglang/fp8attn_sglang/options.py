"""Options of fp8attn in SGLang, which has no option for those of plugins: `FP8ATTN_SGLANG='{"key_dtype": "e4m3"}'`."""

from __future__ import annotations

import json
import os

from fp8attn import UsageError
from fp8attn.integrations.engine.options import Options

VARIABLE = "FP8ATTN_SGLANG"


def environment_options() -> Options:
    """The options in the environment variable `FP8ATTN_SGLANG`.

    Raises:
        UsageError: as `Options.of`, or the variable is not JSON.
    """
    text, place = os.environ.get(VARIABLE, "{}"), f"the environment variable {VARIABLE}"
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place} must be a JSON object of options; got {text!r}: {error}") from error
    return Options.of(options, place)
