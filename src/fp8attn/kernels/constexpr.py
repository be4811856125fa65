"""The base class of the dataclasses that kernels take as constexpr parameters."""

from __future__ import annotations


class ConstexprFields(dict):
    """An empty dict with attributes.

    Triton calls `knobs.runtime.jit_post_compile_hook` for each new kernel, and first writes the kernel's constexpr parameters as JSON. JSON
    has dicts, but no dataclasses. vLLM sets this hook.
    """

    def __bool__(self) -> bool:
        return True
