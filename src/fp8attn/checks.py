"""Checks of the arguments of public functions: types, shapes, dtypes, devices, strides and numbers.

They read no values from a GPU, so they never wait for it. `contents` has the checks of what tensors contain.
"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any

import torch

from .derivatives import check_derivatives
from .errors import UsageError

LARGEST = 2**31 - 1  # kernels count tokens and pages in int32


def check_is_tensor(x: Any, name: str, wanted: str) -> None:
    """Raise ValueError if `x` is not a tensor. `wanted` is its shape, for the message."""
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a torch.Tensor {wanted}; got {_shown(x)}")


def check_tensor(
    x: torch.Tensor,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    contiguous: bool = True,
) -> None:
    """Raise ValueError, and say how to fix it, if a kernel cannot take the tensor's address. `dtype` None: any
    floating-point dtype.
    """
    if not isinstance(x, torch.Tensor):
        raise ValueError(f"{name} must be a tensor {tuple(shape)} on {device}; got {type(x).__name__}")
    right_dtype = x.is_floating_point() if dtype is None else x.dtype == dtype
    if x.shape != shape or not right_dtype or x.device != device:
        wanted, actual = ("floating point" if x is None else str(x).removeprefix("torch.") for x in (dtype, x.dtype))
        raise ValueError(
            f"{name} must be {tuple(shape)} {wanted} on {device}; got {tuple(x.shape)} {actual} on {x.device}"
        )
    if contiguous and not x.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous; got strides {x.stride()} for shape {tuple(x.shape)}: call .contiguous()"
        )


def check_tokens(x: torch.Tensor, name: str, device: torch.device) -> None:
    """Raise ValueError unless `x` is `[T, heads, head_dim]` on `device`, with the last dimension contiguous."""
    if not isinstance(x, torch.Tensor):
        check_is_tensor(x, name, "[T, heads, head_dim]")
    if x.dim() != 3 or x.stride(-1) != 1:
        raise ValueError(
            f"{name} must be [T, heads, head_dim] with the last dimension contiguous; got shape {tuple(x.shape)}, "
            f"strides {x.stride()}"
        )
    if x.device != device:
        raise ValueError(f"the cache is on {device} and {name} is on {x.device}; move one of them")


def check_dense(x: torch.Tensor, name: str) -> None:
    """Raise ValueError unless `x` is `[B, heads, S, head_dim]` with the last dimension contiguous."""
    check_is_tensor(x, name, "[B, heads, S, head_dim]")
    if x.dim() != 4 or x.stride(3) != 1:
        raise ValueError(
            f"{name} must be [B, heads, S, head_dim] with the last dimension contiguous; got shape {tuple(x.shape)}, "
            f"strides {x.stride()}"
        )
    check_derivatives(x)


def check_mean(mean: torch.Tensor | None, name: str, shape: tuple[int, int], device: torch.device) -> None:
    """Raise ValueError unless `mean` is `[num_kv_heads, head_dim]` float32, finite where that can be read on the CPU;
    None: zero.
    """
    if mean is not None:
        check_tensor(mean, name, shape, torch.float32, device)
        check_finite(mean, name)


def check_finite(x: torch.Tensor, name: str) -> None:
    """Raise ValueError if a tensor on the CPU has an element that is not finite. A GPU is not waited for."""
    if type(x) is torch.Tensor and x.is_cpu and not torch.compiler.is_compiling() and not torch.isfinite(x).all():
        raise ValueError(
            f"{name} must be finite; it has {int((~torch.isfinite(x)).sum())} elements that are NaN or infinite"
        )


def is_whole(x: Any) -> bool:
    """Whether `x` is a whole number. A bool is not."""
    return type(x) is int or (isinstance(x, Integral | torch.SymInt) and not isinstance(x, bool))


def check_size(x: Any, name: str, least: int = 1) -> None:
    """Raise UsageError unless `x` is a whole number from `least` to what kernels count."""
    if not is_whole(x) or not least <= x <= LARGEST:
        raise UsageError(f"{name} must be a whole number from {least:,} to {LARGEST:,}; got {_shown(x)}")


def check_flags(**flags: Any) -> None:
    """Raise UsageError for an option that is neither True nor False, such as the string "no"."""
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise UsageError(f"{name} must be True or False; got {_shown(flag)}")


def check_number(x: Any, name: str, hint: str = "") -> None:
    """Raise ValueError unless `x` is a finite number."""
    if not (isinstance(x, Real | torch.SymFloat) and not isinstance(x, bool) and math.isfinite(x)):
        raise ValueError(f"{name} must be a finite number{hint}; got {_shown(x)}")


def _shown(x: Any) -> str:
    """A value that was given, for an error."""
    return f"a tensor {tuple(x.shape)}" if isinstance(x, torch.Tensor) else f"{type(x).__name__} {repr(x)[:80]}"
