"""Options of fp8attn in an engine: `{"scales": "scales.safetensors", "key_dtype": "int8"}`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from ...errors import UsageError
from ...formats.codec import DEFAULT_KEY_DTYPE, KeyDtype, codec_of


@dataclass(frozen=True)
class Options:
    """The options of all layers.

    Attributes:
        scales: a file of `KVScales.save`. Its means of K and V are used. Its scales are used with `static_scales`.
        static_scales: all pages of a layer have the file's scales. Otherwise each page has its own, which grows while
            the page is filled.
        key_dtype: the format of keys, as `PagedKVCache` takes it.
        exact: keep 16 bits of queries and weights in prompts, too (`AttentionParams.exact`), so that a hit of the
            prefix cache computes the rest of a prompt as a whole prompt is computed.
    """

    scales: str | None = None
    static_scales: bool = False
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE
    exact: bool = False

    @classmethod
    def of(cls, values: Any, place: str) -> Options:
        """The options in a JSON object.

        Args:
            place: where the engine has it from, for errors.
        Raises:
            UsageError: an option is unknown, has a value of another type, no such value, or needs another one.
        """
        if not isinstance(values, dict):
            raise UsageError(f"{place} must be a JSON object of options; got {values!r}")
        names = [field.name for field in fields(cls)]
        if unknown := sorted(set(values) - set(names)):
            raise UsageError(f"{place} has {', '.join(unknown)}; the options are {', '.join(names)}")
        for name, value in values.items():
            types = (str,) if name == "key_dtype" else (str, type(None)) if name == "scales" else (bool,)
            if not isinstance(value, types):
                wanted = "true or false, without quotes" if bool in types else "a string"
                raise UsageError(f"{place} has {name} {value!r}; it must be {wanted}")
        options = cls(**values)
        codec_of(options.key_dtype)  # raises UsageError
        if options.static_scales and options.scales is None:
            raise UsageError(f"{place} has static_scales, which needs scales, a file of `fp8attn calibrate`")
        return options
