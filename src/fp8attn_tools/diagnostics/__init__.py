"""Reports of this machine (`diagnose`), of a model (`served`), of its K and V (`examine`), of pages whose calibrated scales cut values off
(`saturation`), and of an FP8 kernel's sums (`accumulation`)."""

from .doctor import Check, diagnose, examine, offset_checks, served
from .saturation import LayerSaturation, saturation

__all__ = ["Check", "LayerSaturation", "diagnose", "examine", "offset_checks", "saturation", "served"]
