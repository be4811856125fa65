"""An installed FlashAttention-3, for dense calls: E4M3 operands, with one scale for each sequence and KV head.

    out = softmax(softmax_scale * q_scale k_scale * q_fp8 k_fp8^T) v_fp8 * v_scale

It cannot read pages, because V is transposed there. So it is not a `Backend`, and `dense/strategies.py` calls it.

There are several builds of this kernel (arXiv:2407.08608). Each registers its own torch op with its own schema. The op
is found by its namespace and called by the names in its schema; nothing is registered or activated here. A build's
version does not determine how it sums. `fp8attn_tools/diagnostics/accumulation.py` measures this.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import UsageError
from ..formats import rotation
from ..formats.codec import E4M3, finite_amax
from ..kernels.machine import no_hopper_reason
from .base import refused_dtype

INSTALL = "pip install fa3-fwd, or build flash_attn_interface from flash-attention/hopper, or install vllm"

# By the name that users import, in order of preference: the op's namespace, and the library that registers the op.
BUILDS = {
    "flash_attn_interface": (
        "flash_attn_3",
        "flash_attn_3",
        "_C*.so",
    ),  # also what PyTorch runs once its "FA3" is activated
    "fa3_fwd_interface": ("fa3_fwd", "fa3_fwd", "_C*.so"),
    "vllm": ("_vllm_fa3_C", "vllm", "vllm_flash_attn/_vllm_fa3_C*.so"),
}

GIVEN = ("q", "k", "v", "softmax_scale", "is_causal")
# Values that switch a feature off, where a schema has no default.
NEUTRAL = {
    "window_size_left": -1, "window_size_right": -1, "attention_chunk": 0, "softcap": 0.0,
    "is_rotary_interleaved": False, "num_splits": 0,
    "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
}  # fmt: skip


class Build(NamedTuple):
    """An installed FlashAttention-3.

    Attributes:
        name: what users import.
        run: its torch op, which takes the arguments that its schema names. Every feature is off unless one is given.
    """

    name: str
    run: Callable[..., object]


def op_of(namespace: str, name: str, package: str, pattern: str) -> Any:
    """A torch op, from the library of an installed package that registers it.

    Raises:
        LookupError: the package is not installed or its library cannot be used; the message has the reason.
    """
    ops = getattr(torch.ops, namespace)
    if not hasattr(ops, name):  # not imported yet
        spec = importlib.util.find_spec(package)
        folders = (spec.submodule_search_locations if spec else None) or ()
        library = next((file for folder in folders for file in sorted(Path(folder).glob(pattern))), None)
        if library is None:
            raise LookupError("not installed")
        try:
            torch.ops.load_library(library)  # the library alone: an import of vllm, for example, changes more settings
        except OSError as problem:
            raise LookupError(f"{library} does not load with torch {torch.__version__}: {problem}") from problem
        if not hasattr(ops, name):
            raise LookupError(f"{library} registers no {namespace}::{name}")
    return getattr(ops, name)


@cache  # a build that was not found is searched again at the next call
def find(name: str) -> Build:
    """Load the library of a build of `BUILDS`.

    Raises:
        LookupError: the build is not installed or cannot be used; the message has the reason.
    """
    namespace, package, pattern = BUILDS[name]
    op = op_of(namespace, "fwd", package, pattern).default
    neutral = {}
    for argument in op._schema.arguments:
        if argument.has_default_value() or argument.name in GIVEN:
            continue
        if argument.name not in NEUTRAL and not isinstance(argument.type, torch.OptionalType):
            raise LookupError(
                f"{namespace}::fwd has an argument {argument.name!r} that this version of fp8attn cannot set; install "
                f"another build"
            )
        neutral[argument.name] = NEUTRAL.get(argument.name)
    return Build(name, partial(op, **neutral))


@cache
def default() -> Build:
    """The first build of `BUILDS` that is installed.

    Raises:
        LookupError: there is none; the message says how to install one.
    """
    problems = {}
    for name in BUILDS:
        try:
            return find(name)
        except LookupError as problem:
            problems[name] = str(problem)
    broken = "; ".join(f"{name}: {problem}" for name, problem in problems.items() if problem != "not installed")
    raise LookupError(broken or f"no FlashAttention-3 is installed ({INSTALL})")


def unsupported_reason(device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why no FlashAttention-3 can serve `dtype` inputs on `device`; None if one can."""
    reason = no_hopper_reason(torch.device(device), "FlashAttention-3 is") or refused_dtype(dtype)
    if reason is not None:
        return reason
    try:
        default()
    except LookupError as problem:
        return str(problem)
    return None


def check(device: torch.device, dtype: torch.dtype) -> None:
    """Raise UsageError if no FlashAttention-3 can serve this; the message has the reason."""
    if (reason := unsupported_reason(device, dtype)) is not None:
        raise UsageError(f"backend 'fa3' cannot run here: {reason}")


def quantize(
    x: torch.Tensor, *, rotate_keys: bool, subtract_mean: bool, heads_per_scale: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The E4M3 codes of a dense `[B, H, S, D]` in its memory order, the scale of each sequence and group of heads, and
    the means of the channels `[B, H, D]`. PyTorch computes them in FP32, and reads the tensor several times."""
    y = rotation.rotate(x.float()) if rotate_keys else x.float()
    mean = None
    if subtract_mean:
        mean = y.mean(2)
        mean = torch.where(torch.isfinite(mean), mean, 0.0)
        y = y - mean[:, :, None]
    scale = E4M3.needed_scale(finite_amax(y.unflatten(1, (-1, heads_per_scale)), (2, 3, 4)))
    codes = E4M3.encode(y, (1.0 / scale).repeat_interleave(heads_per_scale, 1)[..., None, None]).to(E4M3.dtype)
    x_fp8 = torch.empty_like(x, dtype=E4M3.dtype)
    x_fp8.view(torch.uint8).copy_(codes.view(torch.uint8))
    return x_fp8, scale, mean


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_scale: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    *,
    causal: bool,
    softmax_scale: float,
    build: Build | None = None,
) -> torch.Tensor:
    """FlashAttention-3's forward on FP8 operands.

    Args:
        q: `[B, num_q_heads, S_q, head_dim]` float8_e4m3fn.
        k, v: `[B, num_kv_heads, S_kv, head_dim]` float8_e4m3fn.
        q_scale, k_scale, v_scale: `[B, num_kv_heads]` float32. The query heads of a GQA group share one. None: ones.
        causal: the last query is at the position of the last key.
        build: the build to call. None: `default()`.
    Returns:
        `[B, num_q_heads, S_q, head_dim]` bfloat16, in the memory order of q. Rows that see no key are zero.
    Raises:
        LookupError: none is installed.
    """
    build = build or default()
    result = torch.empty_like(q, dtype=torch.bfloat16)
    q, k, v, out = (x.transpose(1, 2) for x in (q, k, v, result))
    arguments = dict(
        q_descale=q_scale, k_descale=k_scale, v_descale=v_scale, softmax_scale=softmax_scale, is_causal=causal
    )
    if build.name != "vllm":
        build.run(q=q, k=k, v=v, out=out, **arguments)
        return result
    # vLLM's build takes only queries that are packed, sequence after sequence.
    batch, q_len, kv_len = *q.shape[:2], k.shape[1]
    bounds = {
        f"cu_seqlens_{name}": torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
        for name, length in (("q", q_len), ("k", kv_len))
    }
    q, k, v, flat = (x.flatten(0, 1) for x in (q, k, v, out))
    build.run(q=q, k=k, v=v, out=flat, **bounds, max_seqlen_q=q_len, max_seqlen_k=kv_len, **arguments)
    if flat.data_ptr() != out.data_ptr():  # a copy, because sequences are not contiguous
        out.copy_(flat.unflatten(0, (batch, q_len)))
    return result
