"""fp8attn: an FP8 KV cache and FP8 attention for PyTorch."""

from .cache import OutOfPagesError, PagedKVCache
from .calibrate import calibrate
from .fake_quantize import fake_quantize
from .layout import PAGE_SIZE, KVPages
from .mode import AttentionPolicy, fp8_attention
from .ops import append, attention, quantize
from .scales import KVScales, LayerScales
from .sdpa import fallback_reason, rope_scaled_dot_product_attention, scaled_dot_product_attention
from .sdpa_quantized import scaled_dot_product_attention_quantized
from .warmup import warmup

__version__ = "0.1.0"
__all__ = [
    "PAGE_SIZE",
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
    "quantize",
    "rope_scaled_dot_product_attention",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_quantized",
    "warmup",
]
