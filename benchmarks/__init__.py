"""Measurements. They measure the `src` beside this folder, whichever fp8attn is installed; or the one that FP8ATTN_SRC names (`base`)."""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ.get("FP8ATTN_SRC") or str(Path(__file__).resolve().parent.parent / "src"))
