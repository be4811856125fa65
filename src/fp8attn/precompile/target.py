"""What kernels are compiled for: the backend, Triton's target, and the properties of the machine that plans use."""

from __future__ import annotations

from typing import Any

import torch

from ..backends import hopper, select_backend
from ..errors import UsageError
from ..formats.spec import PageSpec
from ..kernels.machine import Machine, machine
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


def aim(
    device: torch.device | str, dtype: torch.dtype, backend: BackendName, target: str | None, head_dim: int
) -> tuple[BackendName, tuple[Any, ...], Machine]:
    """The backend, the arguments of Triton's `GPUTarget`, and the properties of the machine that plans use."""
    spec = PageSpec.of(head_dim)
    if target is not None:
        if target not in TARGETS:
            raise UsageError(f"target must be one of {', '.join(TARGETS)}; got {target!r}")
        if backend == "auto":
            backend = "hopper" if target == "sm_90" and hopper.refusal(spec) is None else "triton"
        if backend not in ("hopper", "triton") or (backend == "hopper" and target != "sm_90"):
            raise UsageError(f"backend {backend!r} has no kernels for {target}; use 'auto'")
        if backend == "hopper" and (reason := hopper.refusal(spec)) is not None:
            raise UsageError(reason)
        return backend, ("cuda", int(target.removeprefix("sm_")), 32), TARGETS[target]
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available():
        found = f"{device} is not a GPU" if device.type != "cuda" else "PyTorch finds no GPU"
        raise UsageError(
            f"warmup compiles for a GPU, and {found}. Run it on the machine that will serve, or name the architecture "
            f"to compile for: target='sm_90' (fp8attn warmup --target sm_90)"
        )
    device = indexed(device)
    backend = select_backend(backend, device, dtype, head_dim)
    if backend == "reference":
        raise UsageError("the backend 'reference' has no kernels to compile; use 'auto'")
    if torch.version.hip is None:
        major, minor = torch.cuda.get_device_capability(device)
        return backend, ("cuda", 10 * major + minor, 32), machine(device)
    properties = torch.cuda.get_device_properties(device)
    return backend, ("hip", properties.gcnArchName.split(":")[0], properties.warp_size), machine(device)


def indexed(device: torch.device | str) -> torch.device:
    """A GPU's device with its index."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
