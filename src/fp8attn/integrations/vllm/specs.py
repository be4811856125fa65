"""The bytes of a vLLM block: those of a page (`PageLayout`) for each KV head of each 128 tokens.

A block of more tokens has the pages of all heads for its first 128 tokens, then those for the next. vLLM knows this as
blocks that a kernel reads in parts: it gives layers the parts as blocks, and tables of them.

Layers of several shapes (Gemma 4) get blocks from one pool, so vLLM makes their blocks equally large: by more tokens,
if the bytes divide. They do, because a page of head_dim 512 is as long as two of 256. Otherwise it would leave gaps
between blocks, or refuse the model.

vLLM budgets, allocates, hashes and moves blocks by its `KVCacheSpec`. Its own FP8 blocks have `2 * head_dim` bytes a
token and head. A page has one byte more, 128 for the page, which hold its header. vLLM 0.28 and later ask the backend
(`customize_spec`). Earlier ones ask the layer, so a layer with this backend gets another method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec, SlidingWindowSpec

from ...errors import UsageError
from ...formats.page_layout import PAGE_SIZE
from ...formats.spec import PageSpec

BACKEND_IS_ASKED = "state_content_bytes" in {field.name for field in fields(AttentionSpec)}  # from vLLM 0.28


# vLLM's latent attention has these numbers of channels, and its spec has only their sum: of the latent and of RoPE.
LATENT_PAGES = {rank + rope: PageSpec.latent(rank, rope) for rank, rope in ((512, 64), (256, 64), (512, 0))}


def of_pages(spec: Any, pages: PageSpec) -> Any:
    """The spec that vLLM makes for a layer, with the bytes of a page."""
    return spec if spec.state_content_bytes is not None else replace(spec, state_content_bytes=pages.layout.token_bytes)


@dataclass(frozen=True, kw_only=True)
class BlockSpec(FullAttentionSpec):
    """A layer's blocks before vLLM 0.28, which finds what manages them by the base class."""

    @property
    def real_page_size_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * PageSpec.of(self.head_size).layout.token_bytes


@dataclass(frozen=True, kw_only=True)
class WindowBlockSpec(SlidingWindowSpec):
    """The blocks of a layer with a window."""

    @property
    def real_page_size_bytes(self) -> int:
        return self.num_kv_heads * self.block_size * PageSpec.of(self.head_size).layout.token_bytes


def of_layer(get_kv_cache_spec: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A layer's method `get_kv_cache_spec` before vLLM 0.28, with the bytes of a page."""

    def get_page_spec(vllm_config: Any) -> Any:
        spec = get_kv_cache_spec(vllm_config)
        if spec.block_size % PAGE_SIZE:
            raise UsageError(
                f"a block must have a multiple of {PAGE_SIZE} tokens, and this one has {spec.block_size}: leave out "
                f"--block-size"
            )
        kind = WindowBlockSpec if isinstance(spec, SlidingWindowSpec) else BlockSpec
        return kind(**{field.name: getattr(spec, field.name) for field in fields(spec)})

    return get_page_spec
