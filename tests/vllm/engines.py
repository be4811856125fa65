"""Calls run_engine.py: an engine in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path


def engine(folder, windows, out, variables=None, **options):
    """What an engine with these options, and environment variables, found for a checkpoint and a file of windows."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("run_engine.py")), str(folder), str(windows), str(out), json.dumps(options)]
    subprocess.run(command, check=True, env=environment | (variables or {}), stderr=subprocess.PIPE, text=True)
    return json.loads(out.read_text())
