"""What this machine can run (`diagnose`), what 8 bits mean for a model (`examine`), and how exactly an FP8 kernel sums (`accumulation`)."""

from .doctor import Check, diagnose, examine, offset_checks

__all__ = ["Check", "diagnose", "examine", "offset_checks"]
