"""Reports of this machine, of a model and its K and V, of pages, and of an FP8 kernel's sums.

| file | what |
|---|---|
| `doctor.py` | what this machine can run (`diagnose`), and which models (`served`); K and V in 8 bits (`examine`) |
| `compiler.py` | what is known of the installed Triton and ptxas |
| `saturation.py` | how many values of pages calibrated scales cut off |
| `accumulation.py` | how exactly an FP8 kernel sums |
"""

from .doctor import Check, diagnose, examine, offset_checks, served
from .saturation import LayerSaturation, saturation

__all__ = ["Check", "LayerSaturation", "diagnose", "examine", "offset_checks", "saturation", "served"]
