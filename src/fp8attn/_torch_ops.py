"""The torch ops, for `torch.compile` and other code that traces or intercepts calls: schemas, implementations, fakes.

`torch.library.custom_op` would wrap each op in Python kernels for autograd, aliasing and version counters, which cost 25 to 90 us for each
call. The ops do not need these kernels: `ops` refuses gradients, no output is an alias, and no graph saves pages for a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .backends import find
from .contents import at_hand, check_appended, check_attended
from .formats.page_layout import PAGE_SIZE, PageLayout
from .pages import FIELDS, KVPages
from .params import AttentionParams, BackendName

_LIBRARY = torch.library.Library("fp8attn", "DEF")


def unobserved(x: torch.Tensor) -> bool:
    """Whether torch ops are neither traced nor intercepted now. Then `ops` calls the backend directly, which saves 12 us for each call."""
    return not torch.compiler.is_compiling() and type(x) is torch.Tensor and not is_in_torch_dispatch_mode()


def resolve(backend: BackendName, x: torch.Tensor) -> BackendName:
    """The backend's name, as an argument of an op. Dynamo cannot query the machine, so while it traces, the op gets the name unresolved."""
    return backend if torch.compiler.is_compiling() else find(backend, x.device, x.dtype).name


def register(schema: str, implementation: Callable, fake: Callable) -> None:
    """Define `torch.ops.fp8attn.NAME`: its schema, its implementation on every device, and its fake, which makes empty outputs."""
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8attn::{name}", fake, lib=_LIBRARY)


# The arguments that all ops on pages have: the fields of `KVPages.state`, in its order.
_STATE = (
    "Tensor pool, Tensor page_table, Tensor cache_seqlens, Tensor? stored_k_mean, Tensor? v_mean, ScalarType key_dtype, bool rotate_keys"
)
_CHANGED_STATE = _STATE.replace("Tensor pool", "Tensor(a!) pool").replace("Tensor cache_seqlens", "Tensor(b!) cache_seqlens")


def _append(k: torch.Tensor, v: torch.Tensor, *args: Any) -> None:
    pages = KVPages.trusted(*args[: len(FIELDS)])
    q, q_out, cu_seqlens, max_seqlen, rope_cos, rope_sin, rope_interleaved, static_scales, advance, overflows, backend = args[len(FIELDS) :]
    found = find(backend, k.device, k.dtype)
    if at_hand(k, found.name):
        check_appended(pages, k.shape[0], cu_seqlens, max_seqlen, advance)
    found.append(
        pages, k, v, q=q, q_out=q_out, cu_seqlens=cu_seqlens, max_seqlen=max_seqlen, rope_cos=rope_cos, rope_sin=rope_sin,
        rope_interleaved=rope_interleaved, static_scales=static_scales, advance=advance, overflows=overflows,
    )  # fmt: skip


register(
    f"append(Tensor k, Tensor v, {_CHANGED_STATE}, Tensor? q, Tensor(c!)? q_out, Tensor? cu_seqlens, SymInt max_seqlen, Tensor? rope_cos, "
    "Tensor? rope_sin, bool rope_interleaved, bool static_scales, bool advance, Tensor(d!)? overflows, str backend) -> ()",
    _append,
    lambda *args: None,
)


def _attention(q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *options, backend = args[len(FIELDS) :]
    params = AttentionParams(*options)
    found, pages = find(backend, q.device, q.dtype), KVPages.trusted(*args[: len(FIELDS)])
    if at_hand(q, found.name):
        check_attended(pages, q.shape[0], params)
    out, lse = found.attention(q, pages, params)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None or not params.return_lse else lse


def _attention_fake(q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    params = AttentionParams(*args[len(FIELDS) : -1])
    return q.new_empty(q.shape), q.new_empty(q.shape[:-1] if params.return_lse else 0, dtype=torch.float32)


register(  # after the pages, the fields of `AttentionParams`
    f"attention(Tensor q, {_STATE}, Tensor? cu_seqlens_q, SymInt max_seqlen_q, bool causal, float softmax_scale, SymInt window, "
    "float softcap, Tensor? sinks, Tensor? leftpad_k, Tensor? rope_cos, Tensor? rope_sin, bool rope_interleaved, bool return_lse, "
    "bool exact, str backend) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)


def _from_dense(
    k: torch.Tensor, v: torch.Tensor, rope_cos: torch.Tensor | None, rope_sin: torch.Tensor | None, rope_interleaved: bool,
    stored_k_mean: torch.Tensor | None, v_mean: torch.Tensor | None, key_dtype: torch.dtype, rotate_keys: bool, backend: BackendName,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    pages = find(backend, k.device, k.dtype).from_dense(
        k, v, rope_cos=rope_cos, rope_sin=rope_sin, rope_interleaved=rope_interleaved, stored_k_mean=stored_k_mean, v_mean=v_mean,
        key_dtype=key_dtype, rotate_keys=rotate_keys,
    )  # fmt: skip
    return pages.pool, pages.page_table, pages.cache_seqlens


def _from_dense_fake(k: torch.Tensor, v: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, length, head_dim = k.shape
    columns = -(-length // PAGE_SIZE)
    pool = k.new_empty((batch * columns, heads, PageLayout.of(head_dim).nbytes), dtype=torch.uint8)
    return pool, k.new_empty((batch, columns), dtype=torch.int32), k.new_empty(batch, dtype=torch.int32)


register(
    "from_dense(Tensor k, Tensor v, Tensor? rope_cos, Tensor? rope_sin, bool rope_interleaved, Tensor? stored_k_mean, Tensor? v_mean, "
    "ScalarType key_dtype, bool rotate_keys, str backend) -> (Tensor, Tensor, Tensor)",
    _from_dense,
    _from_dense_fake,
)


def _apply_rope(
    x: torch.Tensor, rope_cos: torch.Tensor, rope_sin: torch.Tensor, rope_interleaved: bool, backend: BackendName
) -> torch.Tensor:
    return find(backend, x.device, x.dtype).apply_rope(x, rope_cos, rope_sin, rope_interleaved)


register(
    "apply_rope(Tensor x, Tensor rope_cos, Tensor rope_sin, bool rope_interleaved, str backend) -> Tensor",
    _apply_rope,
    lambda x, *args: torch.empty_like(x),
)
