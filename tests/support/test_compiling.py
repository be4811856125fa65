"""Separate processes in which Triton compiles."""

import json
from pathlib import Path

import pytest

from tests.support import compiling


def test_calls_share_a_process_that_compiles():
    assert compiling.call("json", "loads", "[1, null]") == [1, None]
    assert compiling.call("os", "getenv", "TRITON_INTERPRET") is None
    assert compiling.call("os", "getenv", "TRITON_CACHE_DIR")
    assert compiling.call("os", "getpid") == compiling.call("os", "getpid")


def test_a_failed_call_says_how_and_the_next_one_works():
    with pytest.raises(AssertionError, match="JSONDecodeError: Expecting value"):
        compiling.call("json", "loads", "")
    with pytest.raises(AssertionError, match=r"os._exit\(3,\) crashed"):
        compiling.call("os", "_exit", 3)
    assert compiling.call("json", "loads", "2") == 2


def test_a_script_sees_the_repository():
    code = (
        "import fp8attn, benchmarks, json, os; print(json.dumps([os.getcwd(), fp8attn.__file__, os.getenv('GIVEN')]))"
    )
    folder, package, given = json.loads(compiling.run("-c", code, GIVEN="x"))
    assert Path(folder) == compiling.ROOT and Path(package).is_relative_to(compiling.ROOT) and given == "x"
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        compiling.run("-c", "1 / 0")
