"""Tools around fp8attn: they run, measure and convert models, and import the library, which never imports them.

| package | what |
|---|---|
| `calibration` | static scales and means from text, and how well scales cover another text |
| `checkpoints` | calibrated scales in checkpoints, for engines without fp8attn |
| `evaluation` | a model with a BF16 cache and with 8-bit caches, on the same tokens |
| `diagnostics` | what can run on this machine, and how exactly FP8 kernels sum |
| `plan`, `shape` | how much fits into memory; the sizes of a transformers model |
| `cli` | the command `fp8attn` |
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8attn.extras import needs

if TYPE_CHECKING:
    from .calibration.calibrate import calibrate as calibrate
    from .calibration.calibrate import check_scales as check_scales
    from .calibration.pack import context_of as context_of
    from .calibration.pack import pack_tokens as pack_tokens

_CALIBRATE, _PACK = "fp8attn_tools.calibration.calibrate", "fp8attn_tools.calibration.pack"
_PLACES = {"calibrate": _CALIBRATE, "check_scales": _CALIBRATE, "context_of": _PACK, "pack_tokens": _PACK}
__all__ = ["calibrate", "check_scales", "context_of", "pack_tokens"]


def __getattr__(name: str) -> Any:
    """Import the functions when they are first used, because they need transformers."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needs("hf"):
        return getattr(import_module(_PLACES[name]), name)
