"""The benchmarks. They measure the `src` folder of this checkout, or the one that FP8ATTN_SRC names (`base`), not an installed one."""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ.get("FP8ATTN_SRC") or str(Path(__file__).resolve().parent.parent / "src"))
