"""Calls run_engine.py and run_answers.py: an engine in a process of its own."""

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


def answers(way, **options):
    """What an engine answers to 20 prompts.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.vllm.run_answers", way, json.dumps(options)]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = ended.stdout.splitlines()
    if ended.returncode:
        raise RuntimeError("\n".join(lines[-60:]))
    return next(json.loads(line.removeprefix("ANSWERS ")) for line in lines if line.startswith("ANSWERS "))
