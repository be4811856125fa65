"""fp8attn: an FP8 KV cache and FP8 attention for PyTorch."""

from .backends import BACKENDS, select_backend, unsupported_reason
from .cache import OutOfPagesError, PagedKVCache
from .calibrate import calibrate
from .dense import (
    fallback_reason,
    rope_scaled_dot_product_attention,
    scaled_dot_product_attention,
    scaled_dot_product_attention_quantized,
)
from .fake_quantize import fake_quantize
from .layout import PAGE_SIZE, KVPages
from .mode import AttentionPolicy, fp8_attention
from .ops import append, attention
from .params import AttentionParams
from .scales import KVScales, LayerScales
from .warmup import warmup

__version__ = "0.1.0"
__all__ = [
    "BACKENDS",
    "PAGE_SIZE",
    "AttentionParams",
    "AttentionPolicy",
    "KVPages",
    "KVScales",
    "LayerScales",
    "OutOfPagesError",
    "PagedKVCache",
    "append",
    "attention",
    "calibrate",
    "fake_quantize",
    "fallback_reason",
    "fp8_attention",
    "rope_scaled_dot_product_attention",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_quantized",
    "select_backend",
    "unsupported_reason",
    "warmup",
]
