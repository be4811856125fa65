"""Calls run_answers.py: an engine in a process of its own."""

import json
import os
import subprocess
import sys


def answers(way, variables=None, **options):
    """What an engine with these options, and environment variables, answers.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | (variables or {})
    command = [sys.executable, "-m", "tests.sglang.run_answers", way, json.dumps(options)]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900)
    lines = ended.stdout.splitlines()
    found = [line.removeprefix("ANSWERS ") for line in lines if line.startswith("ANSWERS ")]
    if ended.returncode or not found:
        raise RuntimeError("\n".join(lines[-60:]))
    return json.loads(found[0])
