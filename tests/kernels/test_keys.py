"""A kernel's key in Triton's cache; no GPU."""

import json

import pytest

from tests.support import compiling

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

pytestmark = pytest.mark.slow


def test_keys_do_not_depend_on_what_was_launched_before():
    """Otherwise `warmup` compiles kernels that no other process finds."""
    keys, others = (json.loads(compiling.run("-m", "tests.kernels.run_keys", *order)) for order in ([], ["reversed"]))
    assert {"prefill_kernel", "decode_kernel", "step_kernel", "page_kernel", "_combine_kernel", "portable_kernel"} <= keys.keys()
    assert keys == others


def test_a_child_compiles_with_the_ptxas_of_its_parents_keys(tmp_path):
    """torch.compile changes TRITON_PTXAS_PATH in the middle of a process, after which the version in a kernel's key is of another ptxas."""
    other = tmp_path / "ptxas"
    other.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.9, V13.9.1'\n")
    other.chmod(0o755)
    code = """
import sys
from triton.backends.compiler import GPUTarget
from fp8attn.kernels.compile import ptxas_version, use_ptxas
target = GPUTarget("cuda", 90, 32)
if len(sys.argv) > 1:
    use_ptxas(target, sys.argv[1])
print(ptxas_version(target), end="")
"""
    version = compiling.run("-c", code)
    assert "release" in version and "13.9.1" not in version
    assert compiling.run("-c", code, version, TRITON_PTXAS_PATH=str(other)) == version
