"""Reports of this machine, of a model and its K and V, of pages, and of an FP8 kernel's sums.

| file | what |
|---|---|
| `doctor.py` | what this machine can run (`diagnose`); models (`served`), with their K and V (`examine`) or `latents` |
| `compiler.py` | what is known of the installed Triton and ptxas |
| `saturation.py` | how many values of pages calibrated scales cut off |
| `accumulation.py` | how exactly kernels sum, by length and batch |
| `flashmla.py` | vLLM's kernel over latents, which `accumulation` measures |
"""

from .doctor import Check, diagnose, examine, latents, offset_checks, served
from .saturation import LayerSaturation, saturation

__all__ = ["Check", "LayerSaturation", "diagnose", "examine", "latents", "offset_checks", "saturation", "served"]
