"""LMCache's multi-process connector for pages.

    vllm serve MODEL ... --kv-transfer-config '{"kv_connector": "LMCachePagesConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "fp8attn.integrations.vllm.lmcache"}'

LMCache (0.5.6) takes from the shape of a layer's tensor, `[blocks, heads, tokens, bytes]`, what it copies at once. Of a
page that is 2 * head_dim + 1 bytes, and its kernels for GPUs refuse an odd number. And where a block has several pages,
which are the first axis, it takes pages for blocks and copies the wrong ones. So it is given a view whose blocks are
vLLM's, each in `SLOTS` parts. A part stands for several tokens, as in LMCache's own formats with compressed tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector

SLOTS = 8  # of 128 tokens: a part has a multiple of 16 bytes, which a GPU copies at once


class LMCachePagesConnector(LMCacheMPConnector):
    """`LMCacheMPConnector`, which moves blocks as runs of bytes."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(whole_blocks(kv_caches, self._kv_cache_config.num_blocks))


def whole_blocks(kv_caches: dict[str, Any], num_blocks: int) -> dict[str, torch.Tensor]:
    """Views `[num_blocks, 1, SLOTS, bytes]` of the layers' blocks."""
    return {name: cache.view(num_blocks, 1, SLOTS, -1) for name, cache in kv_caches.items()}
