"""Compiling a recorded launch without a GPU, and what the fingerprint of PTX depends on."""

import json

import pytest
import torch

from tests.support import compiling

pytestmark = pytest.mark.triton36


@pytest.fixture(scope="module")
def printed(tmp_path_factory) -> dict:
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    return json.loads(compiling.run("-m", "tests.support.run_ptx", tmp_path_factory.mktemp("kernels")))


def test_specialized_as_at_a_launch(printed):
    """Strides that are 1, multiples of 16 and neither, addresses that are aligned and not, two targets; tensors of
    "meta" give the same.
    """
    assert set(printed["different"].values()) == {True}, printed["different"]
    assert printed["identical"]["meta"]
    assert min(printed["targets"]) > 0
    assert printed["driver"] in ("builtins", "triton.backends.nvidia.driver"), "Triton's driver must be as it was"


def test_locations_and_names_are_no_part_of_a_fingerprint(printed):
    assert set(printed["same as plain"].values()) == {True}, printed["same as plain"]
    assert not printed["identical"]["moved"] and not printed["identical"]["renamed"]
    text = printed["normalized"]
    assert (
        "kernel" not in text
        and "//" not in text
        and ".loc" not in text
        and ".version" not in text
        and "debug" not in text
    )
    for kept in (".target sm_90", ".reqntid 128", "cp.async.bulk.tensor", "bra", "label0:", ".entry function0("):
        assert kept in text, kept


def test_a_kernel_of_the_interpreter_is_refused():
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from fp8attn.kernels.compile import compiled

    if torch.cuda.is_available():
        pytest.skip("with a GPU, kernels are compiled")
    from fp8attn.kernels import combine

    with pytest.raises(TypeError, match="Unset TRITON_INTERPRET"):
        compiled(combine._combine_kernel, (), {})
