"""Calibration: observers of Q, K and V, the scales that follow from them, and how well scales cover a text.

`calibrate.py` and `run.py` run a transformers model and pass Q, K and V on. The other files need no model.
"""

from .layer import LayerObserver
from .report import Coverage, ScalesReport, Worst, counters

__all__ = ["Coverage", "LayerObserver", "ScalesReport", "Worst", "counters"]
