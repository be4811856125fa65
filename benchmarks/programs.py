"""Runs programs that a model wrote: one process each, with limits of time and memory, and without network, processes
and files to write.

The limits are for mistakes of a small model. They do not hold a program that looks for a way out.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from typing import Literal

Ending = Literal["passed", "failed", "timed out"]
SECONDS = 10.0  # HumanEval's own limit is 3 s, on an idle machine
MEMORY = 2 << 30  # bytes of address space

GUARD = f"""
def guard():
    import ctypes, resource, sys
    for what, most in ((resource.RLIMIT_AS, {MEMORY}), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        resource.setrlimit(what, (most, most))
    new_user, new_network = 0x10000000, 0x40000000
    ctypes.CDLL(None).unshare(new_user | new_network)  # where the kernel allows it; the hook below refuses in any case
    refused = ("ctypes.", "os.exec", "os.fork", "os.kill", "os.posix_spawn", "os.remove", "os.rename", "os.rmdir",
               "os.spawn", "os.system", "shutil.", "socket.", "subprocess.")

    def hook(event, args):
        if event.startswith(refused) or (event == "open" and isinstance(args[1], str) and set(args[1]) & set("wax+")):
            raise PermissionError(event)

    sys.addaudithook(hook)
guard()
del guard
"""


def run(program: str, seconds: float = SECONDS) -> Ending:
    """Run a program in Python. It has passed if its last line was reached in time: one that ends early, with any
    status, has failed.
    """
    word = secrets.token_hex(16)
    command = [
        sys.executable,
        "-I",
        "-B",
        "-c",
        "import sys; exec(compile(sys.stdin.read(), 'program', 'exec'), {'__name__': 'program'})",
    ]
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            command, cwd=folder, env={"OMP_NUM_THREADS": "1"}, start_new_session=True, text=True, errors="replace",
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            said, _ = process.communicate(f"{GUARD}\n{program}\nprint('\\n{word}')\n", timeout=seconds)
        except subprocess.TimeoutExpired:
            return "timed out"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    return "passed" if said.rstrip().endswith(word) else "failed"
