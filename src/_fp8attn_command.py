"""The entry point of the command `fp8attn`.

It is outside the package because importing the package imports torch, which takes seconds, and Ctrl-C must be silent in
that time too.
"""

from __future__ import annotations

import os
import signal
from types import FrameType


def main() -> None:
    """Run the command line. Ctrl-C ends it without a message, with exit code 130."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where a shell or nohup ignores Ctrl-C
        signal.signal(signal.SIGINT, _interrupt)
    from fp8attn_tools.cli import main as run

    run()


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, but end the process at once during an import: numpy swallows the exception there, and
    torch aborts.
    """
    above = frame
    while above is not None:
        if above.f_code.co_filename.startswith("<frozen importlib"):
            os._exit(130)
        above = above.f_back
    signal.default_int_handler(number, frame)
