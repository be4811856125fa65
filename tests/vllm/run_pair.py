"""One of two engines on a CPU, each in a process of its own, that exchange blocks through a KV connector.

    python -m tests.vllm.run_pair prefill|decode OPTIONS_AS_JSON

Two options are not vLLM's: "connector", NixlConnector or MooncakeConnector, and "folder". The two engines find each
other in this folder, whose file `port` has the first of two free ports. `prefill` computes the prompts of
`tests.support.answers`, writes `blocks.json`, which says where their blocks are, and keeps them until the process is
ended. `decode` gets the blocks from the memory of the first, and prints answers as `run_answers` does.
"""

import json
import os
import signal
import sys
from pathlib import Path

from tests.support.answers import PROMPTS
from tests.vllm.run_answers import ENVIRONMENT, answers_of, ask, make_engine

os.environ |= ENVIRONMENT  # the number of threads, before torch reads it

import torch

torch.accelerator.current_device_index = lambda: (
    0
)  # Mooncake's connector asks for it, also in vLLM's processes, which import this module

CONNECTORS = {
    "NixlConnector": {"kv_buffer_device": "cpu"},
    "MooncakeConnector": {
        "kv_connector_extra_config": {"mooncake_protocol": "tcp"}
    },  # its default, RDMA, needs a network card
}
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def main(role, options):
    options = json.loads(options)
    name, folder = options.pop("connector"), Path(options.pop("folder"))
    port = int((folder / "port").read_text())
    os.environ |= {"VLLM_HOST_IP": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    os.environ |= {
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + (role == "decode")),
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
    }
    connector = {"kv_connector": name, "kv_role": ROLES[role], "engine_id": role} | CONNECTORS[name]
    llm = make_engine("plain", {"kv_transfer_config": connector} | options)
    where = folder / "blocks.json"
    if role == "decode":
        print("ANSWERS " + json.dumps(answers_of(llm, transfers=json.loads(where.read_text()))), flush=True)
        return
    asked = [
        {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": str(number)} for number in range(PROMPTS)
    ]
    found = [one.kv_transfer_params for one in ask(llm, tokens=1, transfers=asked)]
    if name == "MooncakeConnector":  # it says nothing: its second engine asks an address for a prompt by its number
        address = {"remote_engine_id": role, "remote_bootstrap_addr": f"http://127.0.0.1:{port}"}
        found = [
            address | {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": one["transfer_id"]}
            for one in asked
        ]
        llm.generate(
            {"prompt_token_ids": [2]}, use_tqdm=False
        )  # a step more, in which the connector learns of the last blocks
    where.with_suffix(".part").write_text(json.dumps(found))
    where.with_suffix(".part").rename(where)  # the other finds all of it or nothing
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
