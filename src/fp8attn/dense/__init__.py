"""Dense tensors `[B, H, S, D]`: attention with torch's signatures.

| file | what |
|---|---|
| `sdpa.py` | `scaled_dot_product_attention` of 16-bit tensors, with and without RoPE; `fallback_reason` |
| `quantized.py` | `scaled_dot_product_attention_quantized` on operands that are FP8 already |
| `strategies.py` | how both are computed: over pages, or over rows by FlashAttention-3 |
"""

from .quantized import scaled_dot_product_attention_quantized
from .sdpa import fallback_reason, rope_scaled_dot_product_attention, scaled_dot_product_attention

__all__ = [
    "fallback_reason",
    "rope_scaled_dot_product_attention",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_quantized",
]
