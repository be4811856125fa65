"""Python in a process of its own, where Triton compiles: in a test's it may be the interpreter (`conftest.py`), which is chosen once."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
PATH = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]


def run(*arguments: str | Path, timeout: float | None = None, **environment: str) -> str:
    """What `python *arguments` prints, in the repository; it must end well, within `timeout` seconds."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=inherited | {"PYTHONPATH": os.pathsep.join(PATH)} | environment,
        capture_output=True, text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout
