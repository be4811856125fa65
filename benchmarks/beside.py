"""Runs a function in a separate process."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context


class Beside:
    """`function` in a separate process. If a kernel hangs or crashes, it ends with that process."""

    def __init__(self, function: Callable, seconds: float) -> None:
        self.function, self.seconds, self.process = function, seconds, None

    def __call__(self, *arguments):
        """The result of the function. None if it raised, crashed or gave no answer within `seconds`; the next call then
        begins a new process."""
        if self.process is None:
            context = get_context("spawn")
            self.pipe, theirs = context.Pipe()
            self.process = context.Process(target=_serve, args=(self.function, theirs), daemon=True)
            self.process.start()
            theirs.close()
        self.pipe.send(arguments)
        try:
            if self.pipe.poll(self.seconds):
                return self.pipe.recv()
        except EOFError:
            pass
        self.end()
        return None

    def end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def _serve(function: Callable, pipe) -> None:
    while True:
        pipe.send(function(*pipe.recv()))
