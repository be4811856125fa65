"""The kernels of a cache's first prompt and of the decode steps after it are prepared together, and nothing else is. No
GPU is needed.
"""

import json

import pytest
import torch

from fp8attn import PagedKVCache
from fp8attn.precompile import first
from tests.support import compiling

pytest.importorskip("triton")


@pytest.fixture(scope="module", params=["sm_90", "sm_80"])
def cases(request):
    if request.param == "sm_90":
        pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    return json.loads(compiling.run("-m", "tests.precompile.run_first", request.param))


@pytest.mark.slow
def test_all_kernels_of_a_prompt_and_of_decode_steps_are_prepared_before_it(cases):
    """Prompts of 1 to 9,000 tokens, with static means, exact, softcap, sinks, window, calibrated, counted, E4M3,
    padded, ragged, static.
    """
    assert {name: case["missing"] for name, case in cases.items() if case["missing"]} == {}
    assert all(case["launched"] >= case["kernels"] - len(case["unused"]) > 0 for case in cases.values())


@pytest.mark.slow
def test_layers_with_some_means_share_their_kernels(cases):
    """Each layer has another combination of static means, and the model has as many kernels as one without means."""
    counts = {name: case["kernels"] for name, case in cases.items()}
    assert all(counts[f"means {tokens}"] == counts[f"without {tokens}"] for tokens in (1, 40, 300, 9000))


@pytest.mark.slow
def test_no_kernel_is_prepared_that_is_not_launched(cases):
    """Except: `FP8Cache` does not see whether a batch has padding, and the portable kernels cut other windows into
    other parts.
    """
    unused = {name.split()[0]: case["unused"] for name, case in cases.items() if case["unused"]}
    assert unused.keys() <= {"batch", "static", "window"}
    assert all(len(case["unused"]) <= 2 for case in cases.values())


@pytest.mark.slow
def test_kernels_are_compiled_in_threads_and_one_that_fails_is_left_to_its_launch():
    found = json.loads(compiling.run("-m", "tests.precompile.run_side_by_side"))
    assert sorted(found["names"]) == ["_combine_kernel", "portable_kernel", "step_kernel"]
    assert sorted(found["compiled"]) == sorted(found["names"])  # each once: the failed one by the second call
    assert all(name.startswith("fp8attn-compile") for name in found["threads"])
    assert found["left"] == ["_combine_kernel"] and found["at last"] == [] and found["alive"] == 1
    assert (
        "WARNING _combine_kernel did not compile before it was needed (OSError: no space left). Its launch compiles it"
        in found["logged"]
    )
    assert found["logged"].count("INFO") in (2, 4)  # the second call may end before anything is said
    for line in found["shown"].splitlines():
        assert line.startswith("fp8attn: compiling ") and line.endswith("once; Triton's cache keeps them")
    assert len(found["shown"].splitlines()) in (1, 2)


def test_a_cache_on_a_cpu_compiles_nothing(monkeypatch):
    monkeypatch.setattr(first, "record", lambda *_: pytest.fail("launches were recorded"))
    cache = PagedKVCache(2, 64)
    x = torch.randn(5, 2, 64)
    cache.append(0, x, x)
    cache.attention(0, torch.randn(5, 4, 64))


def test_nothing_is_prepared_in_compiled_code_or_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(first, "record", lambda *_: pytest.fail("launches were recorded"))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    first.prepare(torch.device("cuda", 0), [])
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_current_stream_capturing", lambda: pytest.fail("Dynamo cannot query the stream")
    )
    first.prepare(torch.device("cuda", 0), [])


def test_each_step_is_prepared_once(monkeypatch):
    """Decode steps, and a prompt of a length that was there, record nothing; another length does."""
    pytest.importorskip("triton")
    prepared = []
    monkeypatch.setattr(first, "prepare", lambda device, calls: prepared.append(len(list(calls))))
    monkeypatch.setattr("fp8attn.cache.ahead.REFERENCE", "")
    cache = PagedKVCache(2, 64, num_layers=2)
    steps = []
    for tokens in (300, 1, 1, 300, 40, 40):
        prepared.clear()
        for layer in range(2):
            x = torch.randn(tokens, 2, 64).bfloat16()
            cache.append(layer, x, x)
            cache.attention(layer, torch.randn(tokens, 4, 64).bfloat16())
        steps.append(list(prepared))
    # Appends, then attention, of which the cache did not know; then both together.
    assert steps == [[2, 2], [4], [], [4], [4], []]
