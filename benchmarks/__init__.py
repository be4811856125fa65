"""The benchmarks. They measure the `src` folder of this checkout, or the one that FP8ATTN_SRC names (`base`), not an
installed one.

They run with the Triton of the folder FP8ATTN_TRITON, if there is one, and not with the installed one
(`benchmarks/triton.py` sets it for its processes).
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ.get("FP8ATTN_SRC") or str(Path(__file__).resolve().parent.parent / "src"))
if os.environ.get("FP8ATTN_TRITON"):
    sys.path.insert(0, os.environ["FP8ATTN_TRITON"])
