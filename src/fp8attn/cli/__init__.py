"""The command line: `fp8attn generate | evaluate | calibrate | sensitivity | export | plan | warmup | doctor | demo`."""

from __future__ import annotations

import sys

EXTRA = {"huggingface_hub", "matplotlib", "rich", "transformers", "typer"}  # packages of the extra `cli`


def main() -> None:
    """Run a command.

    A `UsageError` ends in one line on stderr and exit code 2. Every other exception is a bug and shows its traceback.
    """
    try:
        from .app import app
    except ModuleNotFoundError as error:
        if not is_optional(error):
            raise
        fail(error)
        sys.exit(2)
    app(prog_name="fp8attn")


def is_optional(error: ModuleNotFoundError) -> bool:
    """Whether the missing package is one that the extra `cli` installs."""
    return (error.name or "").partition(".")[0] in EXTRA


def fail(error: Exception) -> None:
    """Show an error in one line on stderr."""
    message = f"{error.name} is not installed; pip install 'fp8attn[cli]'" if isinstance(error, ModuleNotFoundError) else str(error)
    print("fp8attn:", " ".join(message.split()), file=sys.stderr)
