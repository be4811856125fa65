"""The functions on dense tensors `[B, H, S, D]`, contiguous or transposed: `from_dense` (public as `KVPages.from_dense`) and `apply_rope`.

Each checks its arguments, chooses a backend and runs it, as the functions on pages do (`ops`).
"""

from __future__ import annotations

import torch

from .._torch_ops import resolve, unobserved
from ..backends import find, load
from ..checks import check_dense, check_flags, check_mean
from ..formats.codec import FP8, KeyDtype, key_type
from ..formats.rope import both, check_device, dense_tables
from ..layout import HEAD_DIMS
from ..pages import KVPages, stored_mean
from ..params import BackendName


def from_dense(
    k: torch.Tensor,
    v: torch.Tensor,
    rope_cos: torch.Tensor | None,
    rope_sin: torch.Tensor | None,
    rope_interleaved: bool,
    k_mean: torch.Tensor | None,
    v_mean: torch.Tensor | None,
    key_dtype: KeyDtype,
    rotate_keys: bool,
    backend: BackendName,
) -> KVPages:
    """`KVPages.from_dense`, which describes the arguments."""
    check_dense(k, "k")
    check_dense(v, "v")
    if k.shape != v.shape or k.dtype != v.dtype or k.device != v.device or k.shape[3] not in HEAD_DIMS or not k.numel():
        raise ValueError(
            f"k and v must be of one shape [B, num_kv_heads, S, head_dim], dtype and device, not empty, head_dim one of {HEAD_DIMS}; "
            f"got {tuple(k.shape)} {k.dtype} on {k.device} and {tuple(v.shape)} {v.dtype} on {v.device}"
        )
    for name, mean in (("k_mean", k_mean), ("v_mean", v_mean)):
        check_mean(mean, name, (k.shape[1], k.shape[3]), k.device)
    check_flags(rotate_keys=rotate_keys, rope_interleaved=rope_interleaved)
    if k.dtype == FP8:
        raise ValueError(
            f"k and v are {FP8} already: pass them in 16 bits, before they are rounded, or attend over them as they are with "
            "fp8attn.scaled_dot_product_attention_quantized"
        )
    cos, sin = _tables_if_any(k, rope_cos, rope_sin, rope_interleaved)
    return run_from_dense(
        resolve(backend, k), k, v, rope_cos=cos, rope_sin=sin, rope_interleaved=rope_interleaved,
        stored_k_mean=stored_mean(k_mean, rotate_keys), v_mean=v_mean, key_dtype=key_type(key_dtype), rotate_keys=rotate_keys,
    )  # fmt: skip


def run_from_dense(
    name: BackendName, k: torch.Tensor, v: torch.Tensor, *, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None,
    rope_interleaved: bool, stored_k_mean: torch.Tensor | None, v_mean: torch.Tensor | None, key_dtype: torch.dtype, rotate_keys: bool,
) -> KVPages:  # fmt: skip
    """`from_dense` with checked arguments, the resolved backend `name` and tables that `rope.dense_tables` made."""
    if unobserved(k):
        return load(name).from_dense(
            k, v, rope_cos=rope_cos, rope_sin=rope_sin, rope_interleaved=rope_interleaved, stored_k_mean=stored_k_mean,
            v_mean=v_mean, key_dtype=key_dtype, rotate_keys=rotate_keys,
        )  # fmt: skip
    pool, table, lengths = torch.ops.fp8attn.from_dense(
        k, v, rope_cos, rope_sin, rope_interleaved, stored_k_mean, v_mean, key_dtype, rotate_keys, name
    )
    return KVPages(pool, table, lengths, stored_k_mean, v_mean, key_dtype, rotate_keys)


def apply_rope(
    x: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, *, rope_interleaved: bool = False, backend: BackendName = "auto"
) -> torch.Tensor:
    """Apply RoPE to a dense tensor (`rope.apply_rope` has the equation).

    Args:
        x: `[B, H, S, D]` bfloat16 or float16. The last dimension is contiguous.
        rope_cos, rope_sin, rope_interleaved: as `KVPages.from_dense` takes them.
        backend: `"auto"`, `"hopper"`, `"triton"` or `"reference"`.
    Returns:
        `[B, H, S, D]` in the dtype and memory order of `x`.
    Raises:
        ValueError: a shape, dtype or backend does not fit; the message says what would.
        RuntimeError: an input requires a gradient.
    """
    check_dense(x, "x")
    cos, sin = _tables(x, *both(rope_cos, rope_sin), rope_interleaved)
    if unobserved(x):
        return find(backend, x.device, x.dtype).apply_rope(x, cos, sin, rope_interleaved)
    return torch.ops.fp8attn.apply_rope(x, cos, sin, rope_interleaved, resolve(backend, x))


def _tables_if_any(
    x: torch.Tensor, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, rope_interleaved: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """`_tables`; None without tables."""
    if rope_cos is None and rope_sin is None:
        return None, None
    return _tables(x, *both(rope_cos, rope_sin), rope_interleaved)


def _tables(x: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, rope_interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables of RoPE for a dense `x`, in the form that kernels take: `[B, S, R / 2]`."""
    check_device(x, rope_cos, rope_sin)
    batch, _, length, head_dim = x.shape
    return dense_tables(rope_cos, rope_sin, batch, length, head_dim, rope_interleaved)
