"""Measurements. They measure the `src` beside this folder, whichever fp8attn is installed."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
