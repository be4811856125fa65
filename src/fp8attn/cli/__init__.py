"""The command line: `fp8attn generate | evaluate | calibrate | plan | warmup | doctor | demo`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run a command. What the user can correct ends in one line on stderr and exit code 2. Anything else is a bug and shows a traceback."""
    try:
        from .app import app

        app(prog_name="fp8attn")
    except ModuleNotFoundError as error:
        if (error.name or "fp8attn").startswith("fp8attn"):
            raise
        sys.exit(_fail(f"{error.name} is not installed; pip install 'fp8attn[cli]'"))
    except (ValueError, OSError) as error:  # OSError: files, and models that transformers does not find
        sys.exit(_fail(str(error)))


def _fail(message: str) -> int:
    print("fp8attn:", " ".join(message.split()), file=sys.stderr)
    return 2
