"""The greedy answers of engines to 20 prompts of this repository's model, each engine in a process of its own.

`tests.vllm.run_answers` and `tests.sglang.run_answers` are such processes:
`python -m MODULE WAY [ENGINE_OPTIONS_AS_JSON]`. The last line of the output is `ANSWERS` and a JSON object.
"""

import json
import lzma
import os
import random
import subprocess
import sys
from pathlib import Path

MODEL = str(Path(__file__).parents[2] / "models/stdlib-llama")
PROMPTS, ANSWER = 20, 48  # prompts, and tokens of an answer


def text_of(tokenizer):
    """Tokens of held-out text."""
    with lzma.open(f"{MODEL}/heldout.txt.xz", "rt") as file:
        return tokenizer(file.read()[:400_000])["input_ids"]


def prompts_of(tokenizer):
    """Prompts of 20 to 900 tokens of held-out text."""
    ids, draw = text_of(tokenizer), random.Random(0)
    return [ids[start : start + draw.randint(20, 900)] for start in range(0, PROMPTS * 1000, 1000)]


def environment_of(variables=None):
    """This process's environment, with other variables, for one with an engine. It has one thread: threads that wait
    for one another are slow where others use the cores. The number is given from the start, because vLLM may have set
    `LD_PRELOAD` in this process, and then OpenMP reads it before the other can set it. Threads that a library makes
    nevertheless (numba's, of n-gram drafts) sleep while they wait.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "LD_PRELOAD")}
    return kept | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"} | (variables or {})


def answers_of(module, way, options, variables=None, timeout=None):
    """What an engine with these options, and environment variables, answers.

    Raises:
        RuntimeError: it failed; the message has the end of its log.
    """
    command = [sys.executable, "-m", module, way, json.dumps(options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ended = subprocess.run(command, env=environment_of(variables), timeout=timeout, **pipes)
    lines = ended.stdout.splitlines()
    found = [line.removeprefix("ANSWERS ") for line in lines if line.startswith("ANSWERS ")]
    if ended.returncode or not found:
        raise RuntimeError("\n".join(lines[-60:]))
    return json.loads(found[0])
