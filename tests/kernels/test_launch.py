"""Launches of a kept kernel pass the same arguments to the driver as Triton's launches.
A stub of libcuda records them.
"""

import json

import pytest
import torch

from fp8attn.formats.spec import PageSpec
from fp8attn.kernels import append
from tests.support import compiling, libcuda

pytestmark = pytest.mark.triton36


@pytest.fixture(scope="module")
def launches(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stub")
    variables = libcuda.build(folder) | {"TRITON_CACHE_DIR": str(folder / "cache")}
    return json.loads(compiling.run("-m", "tests.kernels.run_launch", folder, **variables))


def test_launches_of_a_kept_kernel_equal_triton_s(launches):
    assert launches["learned"]
    for case in launches["same"]:
        row = launches["rows"][case]
        assert not row["direct"].pop("ordinary") and row["ordinary"].pop("ordinary")
        assert row["direct"] == row["ordinary"] and row["direct"]["grid"] == [3, 2, 1], case
        *_, attributes, kind, value = row["direct"]["config"]
        assert (attributes, kind, value) == ((1, 6, 1) if case == "begins early" else (0, 0, 0)), case


def test_other_arguments_are_bound_by_triton(launches):
    """Arguments that the kernel was not compiled for: another type, width or alignment, an argument that was None."""
    assert {"wide number", "integer for a float", "float for an integer"} <= set(launches["others"])
    for case in launches["others"]:
        row = launches["rows"][case]
        assert row["direct"] == row["ordinary"] and row["direct"]["ordinary"], case
    again = launches["rows"]["dtype again"]  # now it was
    assert not again["direct"].pop("ordinary") and again["direct"].items() <= again["ordinary"].items()


def test_hooks_see_every_launch(launches):
    """Triton calls a profiler's hooks; so every launch is Triton's own while there is one, or in debug mode."""
    assert launches["rows"]["watched"] == {
        "enter": {"ordinary": True, "hooks": 1}, "exit": {"ordinary": True, "hooks": 1},
        "before runs": {"ordinary": True, "hooks": 1},
        "debug": {"ordinary": True, "hooks": 0}, "nothing": {"ordinary": False, "hooks": 0},
    }  # fmt: skip


def test_a_launch_that_the_driver_refuses_is_triton_s(launches):
    """Triton makes a context for the thread, or says what is wrong."""
    row = launches["rows"]["refused"]
    assert "stub" in row.pop("message") and row == {"again": 1, "next": 1, "learned": 0}


def test_a_grid_without_programs_is_not_launched(launches):
    assert launches["rows"]["no programs"] == 0


def test_kernels_that_let_the_next_begin_do_not_begin_early():
    """Attention reads queries while pages are written: then the launches before the page writer must have ended."""
    stored = PageSpec.of(128).name, True, True, False, True
    _, page = append._page_plan(torch.device("cpu"), False, 8, *stored, dense=True)
    _, step = append._step_plan(torch.device("cpu"), 8, 1, 1, *stored)
    assert "OPTIONS" in page and "launch_pdl" not in page
    assert "OPTIONS" in step and "launch_pdl" not in step


def test_launches_are_recorded(launches):
    assert launches["rows"]["recorded"] == {"compiled": [True], "dry": [None], "equal": True, "made": 0}


@pytest.mark.parametrize(
    ("case", "made", "most"), [("1 query", 1, 22), ("256 queries", 1, 30), ("64 queries in parts", 2, 30)]
)
def test_attention_is_checks_a_plan_and_launches(launches, case, made, most):
    """This holds from the second call. Each Python function costs 0.1 to 0.3 us; those of fp8attn are counted. A tensor
    at a new address costs one more for each tensor map.
    """
    row = launches["rows"]["attended"][case]
    assert row["ordinary"] == 0 and row["launches"] == made
    assert {"out", "lse"} <= set(row["last takes"])
    assert row["calls"] <= most, (
        "ops.attention calls more Python than it did: benchmarks.overhead tells what that costs"
    )


def test_what_was_compiled_serves_other_sizes(launches):
    """Plans of other batch sizes and lengths than those met before have the same constants, of which the kernel is
    known.
    """
    assert launches["rows"]["attended"]["other sizes"] == {"ordinary": 0, "launches": 2}


@pytest.mark.parametrize("pool", ["grows", "fixed"])
def test_a_prompt_s_append_calls_little_python(launches, pool):
    """A new cache and its first append. Twenty of the calls find the kernels that a prompt of this cache needs."""
    row = launches["rows"]["prompted"][pool]
    assert row["ordinary"] == 0 and row["launches"] == 1
    assert row["calls"] <= 127 and row["tensors"] <= 7, row


@pytest.mark.parametrize(("case", "most"), [("own", 46), ("in a context", 56)])
def test_a_dense_call_is_checked_once(launches, case, most):
    """`scaled_dot_product_attention`, and torch's own inside `fp8_attention`."""
    row = launches["rows"]["dense"][case]
    assert row["ordinary"] == 0 and row["launches"] == 2
    assert row["calls"] <= most, row


def test_parts_are_put_together_by_the_last_launch(launches):
    rows = launches["rows"]["attended"]
    assert rows["64 queries in parts"]["last takes"] == ["out", "lse"]  # the parts are between
    assert rows["sinks, 64 queries in parts"]["last takes"] == ["sinks", "out", "lse"]


def test_plans_are_of_all_that_launches_depend_on(launches):
    rows = launches["rows"]["planned"]
    assert {name: row["among others"] for name, row in rows.items()} == {
        name: row["alone"] for name, row in rows.items()
    }
    different = {json.dumps(row["alone"]) for row in rows.values()}
    assert len(different) >= len(rows) - 1  # as launched, queries that TMA cannot take are plain ones, copied


def test_launches_find_what_was_compiled_ahead(launches):
    """They are found by the same key, with the C function that launches them:
    a launch adds nothing to Triton's cache.
    """
    row = launches["rows"]["warmed"]
    assert len(set(row["compiled"])) == 7 and row["looked up"] == [[kernel, True] for kernel in row["compiled"]]
    assert row["new"] == []
