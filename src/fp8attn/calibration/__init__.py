"""Calibration without a model: observers of Q, K and V, the scales that follow from them, and how well scales cover a text.

`integrations/transformers/calibrate.py` runs a model and passes Q, K and V on.
"""

from .layer import LayerObserver, Options
from .mergeable import concatenate, select
from .observer import METHODS, Method
from .report import Coverage, ScalesReport, Worst, counters

__all__ = ["METHODS", "Coverage", "LayerObserver", "Method", "Options", "ScalesReport", "Worst", "concatenate", "counters", "select"]
