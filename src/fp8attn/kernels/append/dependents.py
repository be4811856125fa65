"""Lets attention begin while pages are written."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def launch_dependents():
    """Allow the next launch, if it is programmatic, to begin once all programs are here. It waits for the end of this launch by itself.

    A kernel that calls this must not be programmatic itself: attention reads queries, of earlier launches, before that wait.
    """
    asm: tl.constexpr = "griddepcontrol.launch_dependents; mov.b32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
