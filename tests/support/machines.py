"""Architectures whose kernels are planned and compiled without a GPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

from fp8attn import precompile
from fp8attn.kernels.machine import Machine

TARGETS = {
    "sm_80": Machine(108, 166912, False),
    "sm_90": Machine(132, 232448, True, hopper=True),
}


@contextmanager
def pretended(name: str) -> Iterator[None]:
    """`warmup` finds a GPU of this architecture, for which Triton compiles."""
    from triton.backends.compiler import GPUTarget

    from fp8attn.kernels.compile import compiling_for

    backend = "hopper" if name == "sm_90" else "triton"
    given = {"_gpu": lambda _: torch.device("cuda"), "machine": lambda _: TARGETS[name]}
    with (
        patch.multiple(precompile, select_backend=lambda *_: backend, **given),
        compiling_for(GPUTarget("cuda", int(name.removeprefix("sm_")), 32)),
    ):
        yield
