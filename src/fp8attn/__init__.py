"""fp8attn: an FP8 KV cache and FP8 attention for PyTorch."""

from .cache import OutOfPagesError, PagedKVCache
from .calibrate import calibrate
from .layout import PAGE_SIZE, KVPages
from .ops import append, attention
from .scales import KVScales, LayerScales

__version__ = "0.1.0"
__all__ = [
    "PAGE_SIZE",
    "KVPages",
    "KVScales",
    "LayerScales",
    "OutOfPagesError",
    "PagedKVCache",
    "append",
    "attention",
    "calibrate",
]
