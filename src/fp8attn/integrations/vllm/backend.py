"""`FP8AttentionBackend`: what vLLM asks before the start."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from ...formats.page_layout import PAGE_SIZE
from ...formats.spec import HEAD_DIMS, PageSpec
from . import NAME
from .impl import FP8AttentionImpl
from .metadata import FP8AttentionMetadataBuilder
from .specs import of_pages
from .supported import DTYPES, KV_CACHE_DTYPES, WHAT_TO_DO, unsupported_layer


class FP8AttentionBackend(AttentionBackend):
    """vLLM's `AttentionBackend` describes the methods."""

    # `append` needs sequences and lengths, which vLLM's separate update does not get.
    forward_includes_kv_cache_update = True
    supported_dtypes = DTYPES
    supported_kv_cache_dtypes = KV_CACHE_DTYPES

    @staticmethod
    def get_name() -> str:
        return NAME if hasattr(AttentionBackendEnum, "register") else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FP8AttentionImpl]:
        return FP8AttentionImpl

    @staticmethod
    def get_builder_cls() -> type[FP8AttentionMetadataBuilder]:
        return FP8AttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        """The tokens of a page. vLLM splits larger blocks: a layer and its tables get pages as blocks."""
        return [PAGE_SIZE]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return list(HEAD_DIMS)

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return not cls.is_mla()

    @classmethod
    def supports_sink(cls) -> bool:
        return not cls.is_mla()

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return not cls.is_mla()  # VLLM_BATCH_INVARIANT=1; `supported` says with which options

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True  # a page has its own scales, so a checkpoint's are not needed

    @classmethod
    def validate_configuration(cls, **options: Any) -> list[str]:
        """The reasons why these options are not supported. vLLM prints them and does not start."""
        reasons = [WHAT_TO_DO.get(reason, reason) for reason in super().validate_configuration(**options)]
        if options["use_mla"]:
            return reasons
        reason = unsupported_layer(options["head_size"], options["kv_cache_dtype"], options["attn_type"], None, {})
        return reasons if reason is None else [reason, *reasons]

    # The bytes of a block

    @staticmethod
    def get_kv_cache_shape(  # of vLLM 0.28
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, PageSpec.of(head_size).layout.token_bytes

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return of_pages(spec, PageSpec.of(spec.head_size))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[Any, ...]:  # from vLLM 0.29
        from vllm.v1.kv_cache_interface import KVCacheLayout

        return (KVCacheLayout.LBHNC,)
