"""The properties of a GPU that plans of launches depend on."""

from __future__ import annotations

import os
from functools import lru_cache
from typing import NamedTuple

import torch


class Machine(NamedTuple):
    """The properties of one GPU.

    Attributes:
        shared_memory: bytes of shared memory that one program may have.
        native_e4m3: whether kernels may use Triton's own E4M3 conversions.
        name: the GPU's name, with which `devices` finds its measured numbers.
        hopper: whether it runs the kernels for Hopper.
    """

    num_sms: int
    shared_memory: int
    native_e4m3: bool
    name: str = ""
    hopper: bool = False


_planned: Machine | None = None


def plan_for(planned: Machine) -> None:
    """Make `planned` the machine of tensors on the device "meta", for the rest of this process. Plans are kept, so call
    it once, first.
    """
    global _planned
    _planned = planned


def plans_are_for(planned: Machine) -> bool:
    """Whether plans for the device "meta" are plans for this machine. If there is none yet, this becomes it."""
    if _planned is None:
        plan_for(planned)
    return _planned == planned


@lru_cache
def machine(device: torch.device) -> Machine:
    """The machine of `device`; for "meta", the one given to `plan_for`."""
    if device.type == "meta":
        if _planned is None:
            raise ValueError(
                'launches of tensors on the device "meta" can be planned once fp8attn.kernels.machine.plan_for(...) is '
                "called"
            )
        return _planned
    if device.type == "cpu":  # the interpreter
        return Machine(1, 1 << 30, False)
    properties = torch.get_device_module(device).get_device_properties(device)
    native = device.type == "cuda" and torch.version.hip is None and os.environ.get("TRITON_INTERPRET") != "1"
    return Machine(
        getattr(properties, "multi_processor_count", 64),
        getattr(properties, "shared_memory_per_block_optin", 64 << 10),
        native and torch.cuda.get_device_capability(device) >= (8, 9),
        getattr(properties, "name", ""),
        native and torch.cuda.get_device_capability(device) == (9, 0),
    )


def no_hopper_reason(device: torch.device, subject: str) -> str | None:
    """Why `device` is not a Hopper GPU, as a text that begins with `subject` ("the kernels are"); None if it is one."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"{subject} for NVIDIA GPUs, not {'ROCm' if device.type == 'cuda' else device.type}"
    if not torch.cuda.is_available():
        return "PyTorch finds no GPU"
    if (capability := torch.cuda.get_device_capability(device)) != (9, 0):
        return f"{subject} for Hopper (compute capability 9.0), not {capability[0]}.{capability[1]}"
    return None
