"""One of two engines on a CPU, each in a process of its own, that exchange blocks through NIXL.

    python -m tests.vllm.run_nixl prefill|decode OPTIONS_AS_JSON

The option "folder" is not vLLM's: the two find each other in this folder, whose file `port` has the first of two free ports. `prefill`
computes the prompts of `tests.support.answers`, writes `blocks.json`, which says where their blocks are, and keeps them until a file `done`
exists. `decode` reads the blocks from the memory of the first, and prints answers as `run_answers` does.
"""

import json
import os
import sys
import time
from pathlib import Path

from tests.support.answers import PROMPTS
from tests.vllm.run_answers import ENVIRONMENT, answers_of, ask, make_engine

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}


def main(role, options):
    options = json.loads(options)
    folder = Path(options.pop("folder"))
    port = int((folder / "port").read_text()) + (role == "decode")
    os.environ |= ENVIRONMENT | {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
    llm = make_engine("plain", {"kv_transfer_config": CONNECTOR} | options)
    where = folder / "blocks.json"
    if role == "decode":
        print("ANSWERS " + json.dumps(answers_of(llm, transfers=json.loads(where.read_text()))), flush=True)
        return
    asked = ask(llm, tokens=1, transfers=[{"do_remote_decode": True, "do_remote_prefill": False}] * PROMPTS)
    where.with_suffix(".part").write_text(json.dumps([one.kv_transfer_params for one in asked]))
    where.with_suffix(".part").rename(where)  # the other finds all of it or nothing
    while not (folder / "done").exists():
        time.sleep(0.1)


if __name__ == "__main__":
    main(*sys.argv[1:])
