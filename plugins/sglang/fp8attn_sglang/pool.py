"""`FP8PagePool`: the pages of all layers, in the place of SGLang's K and V.

SGLang counts its cache in tokens. A token's slot, divided by 128, is the page in which it is. SGLang's first page takes
the tokens of padding, so there is one page more than its count of tokens says.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from fp8attn import UsageError
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.formats.spec import PageSpec


class FP8PagePool(MHATokenToKVPool):
    """`MHATokenToKVPool` describes the arguments. Only the attention backend of fp8attn reads and writes the pages.

    Attributes:
        pages: for each layer `[num_pages, num_kv_heads, page_bytes]` uint8.

    Raises:
        UsageError: pages have another number of tokens, V has another head_dim than K, or SGLang would add memory to
            the pool later.
    """

    def __init__(self, size: int, page_size: int, dtype: torch.dtype, *args: Any, **options: Any) -> None:
        if page_size != PAGE_SIZE:
            raise UsageError(
                f"a page of fp8attn has {PAGE_SIZE} tokens, and SGLang's has {page_size}: pass --page-size {PAGE_SIZE}"
            )
        # As bytes: into a pool of the model's dtype, SGLang's layers write K and V themselves
        # (`enable_fused_set_kv_buffer`).
        super().__init__(size, page_size, torch.uint8, *args, **options)

    def _create_buffers(self) -> None:
        if self.v_head_dim != self.head_dim:
            raise UsageError(
                f"heads of K have {self.head_dim} channels and those of V {self.v_head_dim}; fp8attn needs as many of "
                f"both"
            )
        if self.post_capture_active or self.is_quantized_kv_cache:
            raise UsageError(
                "SGLang would add memory to the KV cache later, or quantize it, which fp8attn does not support"
            )
        num_pages, page_bytes = -(-self.size // PAGE_SIZE) + 1, PageSpec.of(self.head_dim).layout.nbytes
        with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):
            self.pages = [
                torch.zeros(num_pages, self.head_num, page_bytes, dtype=torch.uint8, device=self.device)
                for _ in range(self.layer_num)
            ]
        self.k_buffer: list[torch.Tensor] = []  # SGLang's own, of which there are none
        self.v_buffer: list[torch.Tensor] = []

    def get_kv_size_bytes(self) -> int:
        return sum(pages.nbytes for pages in self.pages)

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        """Anything that would read or write K and V as SGLang lays them out."""
        raise NotImplementedError(
            "fp8attn's pages have no K and V of single tokens that SGLang could read, write or move"
        )

    get_key_buffer = get_value_buffer = get_kv_buffer = set_kv_buffer = set_kv_buffer_prefix_valid = _refuse
    get_cpu_copy = load_cpu_copy = move_kv_cache = get_contiguous_buf_infos = get_device_pool_infos = _refuse
