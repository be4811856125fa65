"""fp8attn: an 8-bit KV cache and 8-bit attention for PyTorch.

docs/architecture.md has the modules, floor by floor. Each package's docstring says what its files do.
"""

from typing import TYPE_CHECKING, Any

from .backends import BACKENDS, select_backend, unsupported_reason
from .cache import OutOfPagesError, PagedKVCache
from .dense import (
    fallback_reason,
    rope_scaled_dot_product_attention,
    scaled_dot_product_attention,
    scaled_dot_product_attention_quantized,
)
from .errors import UsageError
from .formats.page_layout import PAGE_SIZE
from .formats.rope import apply_rope
from .formats.spec import PageSpec
from .integrations.warmup import warmup
from .mode import AttentionCall, AttentionPolicy, AttentionReport, fp8_attention
from .ops import append, attention, from_dense
from .pages import KVPages
from .params import AttentionParams
from .scales import KVScales, LayerScales
from .straight_through import fake_quantize

if TYPE_CHECKING:
    from .integrations.transformers import FP8Cache as FP8Cache

__version__ = "0.3.0"
__all__ = [
    "BACKENDS",
    "PAGE_SIZE",
    "AttentionCall",
    "AttentionParams",
    "AttentionPolicy",
    "AttentionReport",
    "KVPages",
    "KVScales",
    "LayerScales",
    "OutOfPagesError",
    "PageSpec",
    "PagedKVCache",
    "UsageError",
    "append",
    "apply_rope",
    "attention",
    "fake_quantize",
    "fallback_reason",
    "fp8_attention",
    "from_dense",
    "rope_scaled_dot_product_attention",
    "scaled_dot_product_attention",
    "scaled_dot_product_attention_quantized",
    "select_backend",
    "unsupported_reason",
    "warmup",
]


def __getattr__(name: str) -> Any:
    """Import `FP8Cache` when it is first used, because it needs transformers."""
    if name == "FP8Cache":
        from .integrations.transformers import FP8Cache

        return FP8Cache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
