"""Reports of this machine (`diagnose`), of a model (`served`), of its K and V (`examine`), and of an FP8 kernel's sums (`accumulation`)."""

from .doctor import Check, diagnose, examine, offset_checks, served

__all__ = ["Check", "diagnose", "examine", "offset_checks", "served"]
