"""The command line: `fp8attn generate | evaluate | calibrate | sensitivity | export | plan | warmup | doctor | demo`.

| file | what |
|---|---|
| `app.py` | all commands; the short ones are here |
| `generate.py`, `evaluate.py`, `sensitivity.py`, `doctor.py`, `export.py`, `demo.py` | the others, one in each |
| `shared.py`, `options.py`, `failure.py` | what commands share: loading, progress, options, how errors are reported |
| `tables.py`, `plots.py` | results in the terminal, as pictures |
"""

from __future__ import annotations

import sys

from fp8attn.extras import MissingPackageError, needs

from .failure import fail


def main() -> None:
    """Run a command.

    A `UsageError` ends in one line on stderr and exit code 2. Every other exception is a bug and shows its traceback.
    """
    try:
        with needs("cli"):
            from .app import app
    except MissingPackageError as error:
        fail(str(error))
        sys.exit(2)
    app(prog_name="fp8attn")
