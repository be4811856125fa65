"""What kernels are compiled for: a GPU of this machine, or a target, an architecture without one."""

from __future__ import annotations

import torch

from ..backends import hopper
from ..errors import UsageError
from ..formats.spec import PageSpec
from ..kernels.machine import Machine
from ..params import BackendName

# The properties of a GPU that plans use, for targets that are compiled for without a GPU.
TARGETS = {
    "sm_80": Machine(108, 166912, False),
    "sm_86": Machine(84, 101376, False),
    "sm_89": Machine(142, 101376, True),
    "sm_90": Machine(132, 232448, True, hopper=True),
    "sm_100": Machine(148, 232448, True),
    "sm_120": Machine(188, 101376, True),
}


def gpu(device: torch.device | str) -> torch.device:
    """The device with its index.

    Raises:
        UsageError: it is not a GPU, or there is none.
    """
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        reason = f"{device} is not a GPU" if device.type != "cuda" else "PyTorch finds no GPU"
        raise UsageError(
            f"warmup compiles for a GPU, and {reason}. Run it on the machine that will serve, or name the architecture "
            f"to compile for: target='sm_90' (fp8attn warmup --target sm_90)"
        )
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def backend_for(target: str, backend: BackendName, head_dim: int) -> BackendName:
    """The backend of a layer, which may be `"auto"`, on a target.

    Raises:
        UsageError: it has no kernels for the target or for head_dim.
    """
    refusal = hopper.refusal(PageSpec.of(head_dim))
    if backend == "auto":
        return "hopper" if target == "sm_90" and refusal is None else "triton"
    if backend not in ("hopper", "triton") or (backend == "hopper" and target != "sm_90"):
        raise UsageError(f"backend {backend!r} has no kernels for {target}; use 'auto'")
    if backend == "hopper" and refusal is not None:
        raise UsageError(refusal)
    return backend
