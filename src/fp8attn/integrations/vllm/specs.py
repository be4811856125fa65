"""The bytes of a vLLM block: those of a page (`PageLayout`) for each KV head of each 128 tokens.

A block of more tokens has the pages of all heads for its first 128 tokens, then those for the next. vLLM knows this as
blocks that a kernel reads in parts: it gives layers the parts as blocks, and tables of them.

Layers of several shapes (Gemma 4) get blocks from one pool, so vLLM makes their blocks equally large: by more tokens,
if the bytes divide. They do, because a page of head_dim 512 is as long as two of 256, and so are three of latents as
long as two of 512 (`of_keys`). Otherwise it would leave gaps between blocks, or refuse the model.

vLLM budgets, allocates, hashes and moves blocks by its `KVCacheSpec`. Its own FP8 blocks have `2 * head_dim` bytes a
token and head. A page has one byte more, 128 for the page, which hold its header. vLLM asks the backend
(`customize_spec`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ...formats.spec import ROPE_IN_CODES, SPARE, PageSpec

# vLLM's latent attention has these numbers of channels, and its spec has only their sum: of the latent and of RoPE.
LATENT_PAGES = {rank + rope: PageSpec.latent(rank, rope) for rank, rope in ((512, 64), (256, 64), (512, 0))}
KEYS_PAGES = PageSpec.latent(*ROPE_IN_CODES, rope_in_codes=True, spare=SPARE)  # of keys that follow from values


def of_pages(spec: Any, pages: PageSpec) -> Any:
    """The spec that vLLM makes for a layer, with the bytes of a page."""
    return spec if spec.state_content_bytes is not None else replace(spec, state_content_bytes=pages.layout.token_bytes)


def of_keys(get_kv_cache_spec: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A layer's method `get_kv_cache_spec`, with `KEYS_PAGES`. Three pages are as long as two of head_dim 512."""

    def get_spec(vllm_config: Any) -> Any:
        spec = get_kv_cache_spec(vllm_config)
        return of_pages(replace(spec, block_size=3 * spec.block_size), KEYS_PAGES)

    return get_spec
