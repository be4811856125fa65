"""Compiles the peers that have no wheel for the GPU machine: HPC-Ops, SageAttention's SM90 kernel, two modules of FlashInfer.

It needs nvcc of CUDA 13, and no GPU. Headers come from wheels, so torch need not be installed. A library names what it needs (torch's
libraries, libcuda), and finds it where it is loaded. Only the kernels that the benchmarks call are compiled: the other functions that a
library's entry points name are null.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.11.0"
TVM_FFI = "apache-tvm-ffi==0.1.15.post2"
FLASHINFER = "flashinfer-python==0.7.2.post1"
FMHA_DIMS = (128, 256)  # the head_dims that FlashInfer tests in FP8 on SM90
HEADERS = {TORCH: "torch/include/", "nvidia-cublas==13.0.2.14": "nvidia/cu13/include/", TVM_FFI: "tvm_ffi/include/"}  # and where in a wheel
TORCH_LIBRARIES = ("torch", "torch_cpu", "torch_cuda", "c10", "c10_cuda")
ARCHITECTURE = "-gencode=arch=compute_90a,code=sm_90a"
# Headers of torch that ask for all of CUDA's libraries or Python's headers, of which the sources need little.
STAND_INS = {
    "ATen/cuda/CUDAContext.h": "#include <c10/cuda/CUDAStream.h>\nnamespace at::cuda { using c10::cuda::getCurrentCUDAStream; }\n",
    "torch/extension.h": "#include <torch/types.h>\n",
}


@dataclass(frozen=True)
class Library:
    """What `FOLDER/NAME.so.xz` is made of.

    Attributes:
        source: a repository and a commit, or a release.
        files: what is compiled, relative to the source; those of `prepare` come before.
        includes: folders of headers in the source.
        flags: of nvcc.
        needs: libraries, by soname without `lib` and `.so`.
        missing: the beginning of the mangled names of functions that are not compiled.
        prepare: makes more files, `prepare(source, folder)`.
        keep: a file of the source, and its name in FOLDER.
    """

    source: str
    files: tuple[str, ...]
    includes: tuple[str, ...]
    flags: tuple[str, ...]
    needs: tuple[str, ...]
    missing: str = "none"
    prepare: Callable[[Path, Path], list[Path]] = lambda source, folder: []
    keep: tuple[str, str] | None = None


def fmha_sources(source: Path, folder: Path) -> list[Path]:
    """The files that FlashInfer's generator writes for a kernel a head_dim: FP8 in, BF16 out, over pages."""
    made = subprocess.run([sys.executable, "-c", GENERATE, source, folder, *map(str, FMHA_DIMS)], capture_output=True, text=True)
    if made.returncode:
        raise LookupError(f"FlashInfer's generator: {made.stderr.strip().splitlines()[-1]}")
    return sorted(folder.glob("*.cu"))


# FlashInfer's packages import all of its dependencies: this imports the generator alone.
GENERATE = """
import sys, types
from pathlib import Path
root, folder = Path(sys.argv[1]) / "flashinfer", Path(sys.argv[2])
def module(name, **contents):
    made = sys.modules[name] = types.ModuleType(name)
    vars(made).update(contents)
for name in ("flashinfer", "flashinfer.jit", "flashinfer.jit.attention", "flashinfer.jit.attention.fmha_v2"):
    module(name, __path__=[str(root.joinpath(*name.split(".")[1:]))])
module("flashinfer.jit.env", FLASHINFER_CSRC_DIR=root / "data/csrc")
sys.modules["flashinfer.jit"].env = sys.modules["flashinfer.jit.env"]
module("flashinfer.compilation_context", CompilationContext=object)
module("flashinfer.jit.utils", write_if_different=lambda path, text: path.write_text(text))
from flashinfer.jit.attention.fmha_v2 import fmha_library as made
specs = []
for dim in map(int, sys.argv[3:]):
    spec = made.generate_kernel_spec(90, dim, "e4m3", alibi=False, input_layout=made.InputLayout.Q_PAGED_KV, output_dtype="bf16")
    file, launcher, kernel = made.encode_name(spec)
    folder.joinpath(file).write_text(made.get_kernel_code(spec, kernel, launcher))
    specs.append((spec, file, launcher, kernel))
folder.joinpath("fmha_v2_api.h").write_text(made.get_api_code(specs))
"""

# As `flashinfer.jit.core.gen_jit_spec`.
FLASHINFER_FLAGS = (
    "-use_fast_math", "-DNDEBUG",
    *(f"-DFLASHINFER_ENABLE_{name}" for name in ("F16", "BF16", "FP8_E4M3", "FP8_E5M2", "FP8_E8M0", "FP4_E2M1")),
)  # fmt: skip
# As `flashinfer.jit.xqa.gen_xqa_module` for BF16 queries, FP8 pages of 64 tokens, head_dim 128 and 4 query heads a KV head.
XQA_FLAGS = tuple(
    f"-D{name}"
    for name in (
        "BEAM_WIDTH=1", "USE_INPUT_KV=0", "USE_CUSTOM_BARRIER=1", "TOKENS_PER_PAGE=64", "HEAD_ELEMS=128", "INPUT_FP16=0",
        "DTYPE=__nv_bfloat16", "CACHE_ELEM_ENUM=2", "HEAD_GRP_SIZE=4", "SLIDING_WINDOW=0", "LOW_PREC_OUTPUT=0", "SPEC_DEC=0",
        "MLA_WRAPPER=0", "USE_SM90_MHA=1",
    )
)  # fmt: skip
DATA = "flashinfer/data"
ATTENTION = "src/attention"
LIBRARIES = {
    "hpc_ops": Library(
        source="https://github.com/Tencent/hpc-ops@6e2eced",
        files=(
            *(f"{ATTENTION}/{name}" for name in ("entry.cc", "prefill/prefill.cc", "decode/decode.cc", "decode/assign_task.cu")),
            "src/utils/utils.cc", f"{ATTENTION}/prefill/warp_spec_with_kvcache_fp8_dim128.cu",
            f"{ATTENTION}/decode/sm90/dynamic/smallm_fp8_qpertoken_perhead_kvpertensor_dim128_dynamic.cu",
        ),
        includes=(".", "3rd/cutlass/include"),
        flags=("-DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED", "-DNDEBUG"),
        needs=(*TORCH_LIBRARIES, "cuda"),
        missing="_ZN3hpc9attention",
        keep=("hpc/attention.py", "hpc_attention.py"),
    ),
    "sage_sm90": Library(
        source="https://github.com/thu-ml/SageAttention@d1a57a5",
        files=(str(Path(__file__).with_name("peers") / "sage.cu"),),
        includes=(".",),
        flags=("--use_fast_math",),
        needs=(*TORCH_LIBRARIES, "cuda"),
    ),
    "flashinfer_fmha": Library(
        source=FLASHINFER,
        files=(f"{DATA}/csrc/fmha_v2_run.cu", f"{DATA}/csrc/fmha_v2_jit_binding.cu"),
        includes=(f"{DATA}/csrc/fmha_v2", f"{DATA}/include", f"{DATA}/csrc"),
        flags=("-static-global-template-stub=false", *FLASHINFER_FLAGS),
        needs=("tvm_ffi", "cuda"),
        prepare=fmha_sources,
    ),
    "flashinfer_xqa": Library(
        source=FLASHINFER,
        files=tuple(
            f"{DATA}/csrc/{name}" for name in ("xqa/mha_sm90.cu", "xqa/xqa_wrapper.cu", "xqa/tensorMap.cpp", "flashinfer_xqa_binding.cu")
        ),
        includes=(f"{DATA}/include", f"{DATA}/csrc", f"{DATA}/cutlass/include"),
        flags=(*FLASHINFER_FLAGS, *XQA_FLAGS),
        needs=("tvm_ffi", "cuda"),
        missing="_Z19launchMHAFlashInfer",
    ),
}  # fmt: skip


def build(library: Library, source: Path, headers: Iterable[Path], folder: Path) -> Path:
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


def linked(library: Library, objects: list[Path], folder: Path) -> Path:
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
