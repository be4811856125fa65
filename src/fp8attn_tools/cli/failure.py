"""How a command ends that cannot do what it was asked for."""

from __future__ import annotations

import sys


def fail(error: str) -> None:
    """Show an error in one line on stderr."""
    print("fp8attn:", " ".join(error.split()), file=sys.stderr)
