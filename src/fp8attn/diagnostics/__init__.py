"""Reports of what this machine can run (`diagnose`), of a model's K and V (`examine`), and of an FP8 kernel's sums (`accumulation`)."""

from .doctor import Check, diagnose, examine, offset_checks

__all__ = ["Check", "diagnose", "examine", "offset_checks"]
