"""How a command reports an error."""

from __future__ import annotations

import sys


def fail(error: str) -> None:
    """Show an error in one line on stderr."""
    print("fp8attn:", " ".join(error.split()), file=sys.stderr)
