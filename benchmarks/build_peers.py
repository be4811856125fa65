"""Compiles the peers that have no wheel for the GPU machine: HPC-Ops, SageAttention's SM90 kernel, two modules of FlashInfer.

It needs nvcc of CUDA 13, and no GPU. Headers come from wheels, so torch need not be installed. A library names what it needs (torch's
libraries, libcuda), and finds it where it is loaded. Only the kernels that the benchmarks call are compiled: the other functions that a
library's entry points name are null.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .peers.peer import TVM_FFI, Source

TORCH = "torch==2.11.0"
HEADERS = {TORCH: "torch/include/", "nvidia-cublas==13.0.2.14": "nvidia/cu13/include/", TVM_FFI: "tvm_ffi/include/"}  # and where in a wheel
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
# Headers of torch that ask for all of CUDA's libraries or Python's headers, of which the sources need little.
STAND_INS = {
    "ATen/cuda/CUDAContext.h": "#include <c10/cuda/CUDAStream.h>\nnamespace at::cuda { using c10::cuda::getCurrentCUDAStream; }\n",
    "torch/extension.h": "#include <torch/types.h>\n",
}


def build(library: Source, source: Path, headers: Iterable[Path], folder: Path) -> Path:
    """The path of a library.

    Args:
        source: the folder of its source.
        headers: the folders of `HEADERS`.
        folder: for what is made.
    Raises:
        LookupError: it does not compile, with the first error.
    """
    made = library.prepare(source, folder)
    for name, text in STAND_INS.items():
        path = folder / "include" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#pragma once\n{text}")
    includes = [folder / "include", folder, *(source / name for name in library.includes)]
    for path in headers:
        includes += [path, path / "torch/csrc/api/include"] if (path / "torch").exists() else [path]
    flags = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-Xcompiler", "-fPIC", ARCHITECTURE, *library.flags]
    flags += [f"-I{path}" for path in includes]

    def compiled(file: Path) -> Path:
        run("nvcc", *flags, "-x", "cu", "-c", file, "-o", target := folder / f"{file.name}.o")
        return target

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [*made, *(source / name for name in library.files)]))
    return linked(library, objects, folder)


def linked(library: Source, objects: list[Path], folder: Path) -> Path:
    """A shared library that needs those of `library.needs`, which are not here: empty ones with their names are linked."""
    for name in library.needs:
        soname = f"lib{name}.so" + ".1" * (name == "cuda")
        run("gcc", "-shared", "-x", "c", "/dev/null", f"-Wl,-soname,{soname}", "-o", folder / f"lib{name}.so")
    names = {kind: set(run("nm", f"--{kind}-only", "-P", *objects).split()) for kind in ("undefined", "defined")}
    absent = sorted(name for name in names["undefined"] - names["defined"] if name.startswith(library.missing))
    run(
        "nvcc", "-shared", "-o", target := folder / "made.so", *objects, f"-L{folder}", "-Xlinker", "--no-as-needed,--strip-all",
        *(f"-l{name}" for name in library.needs), *(x for name in absent for x in ("-Xlinker", f"--defsym={name}=0")),
    )  # fmt: skip
    return target


def run(*command: str | Path) -> str:
    """The output of a command.

    Raises:
        LookupError: it is not installed, or failed; with the first error.
    """
    try:
        ended = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as problem:
        raise LookupError(f"{command[0]} is not installed") from problem
    if ended.returncode:
        lines = (ended.stderr + ended.stdout).strip().splitlines()
        raise LookupError(f"{command[0]}: {next((line for line in lines if 'error' in line), lines[-1] if lines else 'failed')}")
    return ended.stdout
