"""Which devices can run the kernels for Hopper."""

from __future__ import annotations

import torch


def no_hopper_reason(device: torch.device, what: str) -> str | None:
    """Why `device` is not a Hopper GPU, as a text that begins with `what` ("the kernels are"); None if it is one."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{what} for NVIDIA GPUs, not {'ROCm' if device.type == 'cuda' else device.type}"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        return f"{what} for Hopper (compute capability 9.0), not {capability[0]}.{capability[1]}"
    return None
