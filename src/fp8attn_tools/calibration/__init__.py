"""Calibration: observers of Q, K and V, the scales that follow from them, and how well scales cover a text.

| file | what |
|---|---|
| `calibrate.py` | `calibrate` and `check_scales`, of a transformers model and text |
| `run.py`, `pack.py` | running the model while Q, K and V are observed; long sequences of text |
| `observer.py`, `layer.py` | what is observed of one tensor; the scales of a layer that follow |
| `moments.py`, `rotation.py` | sums of channels, for means; the rotation as a matrix product |
| `report.py` | how well scales cover a text |

Only `calibrate.py` and `run.py` need a model.
"""

from .layer import LayerObserver
from .report import Coverage, ScalesReport, Worst, counters

__all__ = ["Coverage", "LayerObserver", "ScalesReport", "Worst", "counters"]
