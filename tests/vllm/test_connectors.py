"""vLLM engines on a CPU that exchange blocks through KV connectors. Each engine takes half a minute."""

import json
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("vllm")

from tests.support.answers import answers_of, environment_of
from tests.support.near_ties import check_near_ties
from tests.vllm.engines import answers

ANOTHER_FORMAT = {"additional_config": {"fp8attn": {"key_dtype": "e4m3"}}}
REFUSAL = r"a KV connector brought blocks of another format"


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def process(module, *arguments, log):
    """A process that runs a module until the end of the block, and a function that waits until something
    is true of it.
    """
    with open(log, "w") as file:
        started = subprocess.Popen(
            [sys.executable, "-m", module, *arguments], env=environment_of(), stdout=file, stderr=file
        )

    def wait_for(condition):
        until = time.time() + 300
        while not condition():
            assert started.poll() is None and time.time() < until, log.read_text(errors="replace")[-4000:]
            time.sleep(0.5)

    try:
        yield wait_for
    finally:
        started.terminate()
        started.wait(60)


def test_an_example_of_files(tmp_path):
    """vLLM's example of a KV connector writes blocks to files. The second engine computes none of them, and its answers
    are the first's. An engine with another format ends; without the marks of pages its answers were empty."""
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    connector["kv_connector_extra_config"] = {"shared_storage_path": str(tmp_path)}
    options = {"kv_transfer_config": connector, "max_num_batched_tokens": 16384}  # the example takes whole prompts only
    first, second = (answers("plain", **options) for _ in range(2))
    assert first["cached"] == 0
    assert second["cached"] > 8000
    check_near_ties(second, first)
    with pytest.raises(Exception, match=REFUSAL):
        answers("plain", **ANOTHER_FORMAT, **options)


NEEDS = {"NixlConnector": "nixl", "MooncakeConnector": "mooncake.engine"}
PROCESSES = {1: {}, 2: {"tensor_parallel_size": 2, "disable_custom_all_reduce": True}}


@contextmanager
def prompts_in_memory(tmp_path, connector, processes=1):
    """An engine that holds the blocks of prompts, until the end of the block, and the options by which another one
    finds it.
    """
    pytest.importorskip(NEEDS[connector], exc_type=ImportError)  # Mooncake's needs the system's libibverbs.so.1
    (tmp_path / "port").write_text(str(free_port()))
    own = {"connector": connector, "folder": str(tmp_path)}
    with process(
        "tests.vllm.run_pair", "prefill", json.dumps(own | PROCESSES[processes]), log=tmp_path / "log"
    ) as wait_for:
        wait_for((tmp_path / "blocks.json").exists)
        yield own


@pytest.mark.parametrize(("first", "second"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("connector", NEEDS)
def test_from_the_memory_of_another_engine(plain, tmp_path, connector, first, second):
    """The second engine gets the blocks of prompts from the first one's memory. With other numbers of processes, a
    block's bytes are cut
    between its KV heads, or put together: they are pages, one for each head."""
    with prompts_in_memory(tmp_path, connector, first) as own:
        check_near_ties(answers_of("tests.vllm.run_pair", "decode", own | PROCESSES[second]), plain)


@pytest.mark.parametrize("connector", NEEDS)
def test_an_engine_with_another_format(tmp_path, connector):
    """Connectors compare the models, versions and backends of engines, but no options of fp8attn: the second engine
    ends by the marks. It is the first to ask, because Mooncake gives the blocks of a prompt away once, and vLLM
    computes the prompt if none come.
    """
    with prompts_in_memory(tmp_path, connector) as own, pytest.raises(RuntimeError, match=REFUSAL):
        answers_of("tests.vllm.run_pair", "decode", own | ANOTHER_FORMAT)


@pytest.mark.parametrize(("heads", "parts"), [(1, 1), (3, 2)])
def test_lmcache_copies_whole_blocks(heads, parts):
    """Blocks of one page and of two. LMCache's own view of two would copy pages 4 and 1 instead of blocks 4 and 1."""
    pytest.importorskip("lmcache")
    from lmcache.v1.multiprocess.transfer_context.base import gather_paged_kv_to_cpu, scatter_cpu_to_paged_kv

    from fp8attn.integrations.vllm.lmcache import whole_blocks

    theirs, ours = (torch.randint(256, (6 * parts, heads, 128, 129), dtype=torch.uint8) for _ in range(2))
    views = [whole_blocks({"layer": pages}, 6) for pages in (theirs, ours)]
    assert all(view["layer"].shape[3] % 16 == 0 for view in views)  # what LMCache's kernels for GPUs copy at once
    expected = ours.clone().unflatten(0, (6, parts))
    expected[[2, 5]] = theirs.unflatten(0, (6, parts))[[4, 1]]
    chunks = gather_paged_kv_to_cpu(views[0], [4, 1], 1, layout_hints={"kv_layout": "HND"})
    scatter_cpu_to_paged_kv(
        kv_caches=views[1], block_ids=[2, 5], chunks=chunks, blocks_per_chunk=1, layout_hints={"kv_layout": "HND"}
    )
    assert torch.equal(ours, expected.flatten(0, 1))


def test_lmcache(plain, tmp_path):
    """A server of LMCache keeps the blocks of the first engine. The second computes the rest of the prompts, and its
    answers are the first's. LMCache knows blocks by model and tokens: an engine with another format gets them, too, and
    ends by the marks.
    """
    pytest.importorskip("lmcache")
    port, others = free_port(), free_port()
    server = [
        "server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--http-host",
        "127.0.0.1",
        "--http-port",
        str(others),
    ]
    server += [
        "--chunk-size",
        "128",
        "--l1-size-gb",
        "1",
        "--l1-init-size-gb",
        "1",
        "--eviction-policy",
        "LRU",
    ]
    server += ["--supported-transfer-mode", "auto", "--disable-observability"]
    connector = {
        "kv_connector": "LMCachePagesConnector",
        "kv_connector_module_path": "fp8attn.integrations.vllm.lmcache",
    }
    connector |= {
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port},
    }
    options = {"kv_transfer_config": connector}
    with process("lmcache.cli.main", *server, log=tmp_path / "log") as wait_for:
        wait_for(lambda: answers_at(port))
        first, second = (answers_of("tests.vllm.run_lmcache", "plain", options) for _ in range(2))
        assert first["cached"] == 0 and second["cached"] > 7000
        check_near_ties(
            first, plain
        )  # LMCache is asked for a prompt before it is computed, so that steps have other prompts
        check_near_ties(second, first)
        with pytest.raises(RuntimeError, match=REFUSAL):
            answers_of("tests.vllm.run_lmcache", "plain", options | ANOTHER_FORMAT)


def answers_at(port):
    with socket.socket() as asked:
        return asked.connect_ex(("127.0.0.1", port)) == 0
