"""The backend in a release of vLLM in which fp8attn was not run. It imports nothing of vLLM, whose parts may have
moved.
"""

from __future__ import annotations

from typing import Any

from . import unsupported_release, vllm_version


class RefusedBackend:
    """An attention backend that supports nothing."""

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return cls.__module__, cls.__qualname__

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        """The reason, whatever the options are. vLLM prints it and does not start."""
        return [unsupported_release(vllm_version()) or "this release of vLLM is supported; import fp8attn again"]
