"""Calls run_engine.py and run_answers.py: an engine in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

from tests.support.answers import answers_of, environment_of

# Options of `run_answers` and `run_small_pool`: a trained model with the attention of DeepSeek V3.
LATENTS = {"model": str(Path(__file__).parents[2] / "models/stdlib-latent"), "latents": True}


def engine(folder, windows, out, variables=None, **options):
    """What an engine with these options, and environment variables, found for a checkpoint and a file of windows."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("run_engine.py")),
        str(folder),
        str(windows),
        str(out),
        json.dumps(options),
    ]
    subprocess.run(command, check=True, env=environment_of(variables), stderr=subprocess.PIPE, text=True)
    return json.loads(out.read_text())


def answers(way, **options):
    """What an engine answers to 20 prompts, as `answers_of`."""
    return answers_of("tests.vllm.run_answers", way, options)
