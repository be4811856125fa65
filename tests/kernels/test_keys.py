"""A kernel's key in Triton's cache; no GPU."""

import json

import pytest

from tests.support import compiling

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.slow


def test_keys_do_not_depend_on_what_was_launched_before():
    """Otherwise `warmup` compiles kernels that no other process finds."""
    keys, others = (json.loads(compiling.run("-m", "tests.kernels.run_keys", *order)) for order in ([], ["reversed"]))
    assert {
        "prefill_kernel",
        "decode_kernel",
        "step_kernel",
        "page_kernel",
        "_combine_kernel",
        "portable_kernel",
    } <= keys.keys()
    assert keys == others
