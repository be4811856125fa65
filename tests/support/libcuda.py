"""A libcuda for a machine without a GPU: it records the arguments of a launch (`stub_cuda.c`)."""

import shutil
import subprocess
from pathlib import Path

import pytest


def build(folder: Path) -> dict[str, str]:
    """Compile it into `folder`. Returns the environment variables of a process that loads it."""
    triton = pytest.importorskip("triton")
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    if shutil.which("gcc") is None:
        pytest.skip("the stub of libcuda needs gcc, as Triton's launchers do")
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    source = Path(__file__).with_name("stub_cuda.c")
    subprocess.run(
        ["gcc", "-shared", "-fPIC", f"-I{include}", source, "-o", folder / "libcuda.so.1", "-Wl,-soname,libcuda.so.1"],
        check=True,
    )
    return {"LD_LIBRARY_PATH": str(folder)}
