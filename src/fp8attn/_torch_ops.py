"""The torch ops, for `torch.compile` and other code that traces or intercepts calls: schemas, implementations, fakes.

`torch.library.custom_op` would wrap each op in Python kernels for autograd, aliasing and version counters, which cost
25 to 90 us for each call. The ops do not need these kernels: `ops` refuses gradients, no output is an alias, and no
graph saves pages for a backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_type_hints

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from .backends import Backend, find
from .contents import at_hand, check_appended, check_attended
from .formats.kv_format import KVFormat
from .formats.page_layout import PAGE_SIZE
from .pages import KVPages
from .params import Append, AttentionParams, BackendName

_LIBRARY = torch.library.Library("fp8attn", "DEF")


# What serves a call: a backend, or its name as an argument of a torch op.
Target = Backend | BackendName


def unobserved(x: torch.Tensor) -> bool:
    """Whether torch ops are neither traced nor intercepted now."""
    return not torch.compiler.is_compiling() and type(x) is torch.Tensor and not is_in_torch_dispatch_mode()


def resolve(backend: BackendName, x: torch.Tensor, spec_name: str) -> Target:
    """The backend for a call, to call it directly, which saves 12 us. While torch ops are traced or intercepted: its
    name. Dynamo cannot query the machine, so while it traces, the name stays unresolved.
    """
    if torch.compiler.is_compiling():
        return backend
    chosen = find(backend, x.device, x.dtype, spec_name)
    return chosen if type(x) is torch.Tensor and not is_in_torch_dispatch_mode() else chosen.name


def register(schema: str, implementation: Callable, fake: Callable) -> None:
    """Define `torch.ops.fp8attn.NAME`: its schema, its implementation on every device, and its fake, which makes empty
    outputs.
    """
    name = schema[: schema.index("(")]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fp8attn::{name}", fake, lib=_LIBRARY)


_ARGUMENTS = {
    torch.Tensor: "Tensor", torch.Tensor | None: "Tensor?", int: "SymInt", float: "float", bool: "bool",
}  # fmt: skip

# The arguments of `KVFormat` and of `KVPages` in schemas, as `flatten_format` and `flatten_pages` give them.
_FORMAT = "str spec, bool rotate, Tensor? stored_k_mean, Tensor? v_mean, Tensor? factor"
_PAGES = f"Tensor pool, Tensor page_table, Tensor cache_seqlens, {_FORMAT}"
_CHANGED_PAGES = _PAGES.replace("Tensor pool", "Tensor(a!) pool").replace(
    "Tensor cache_seqlens", "Tensor(b!) cache_seqlens"
)


def flatten_format(format: KVFormat) -> tuple[Any, ...]:
    """A format as arguments of a torch op."""
    return format.name, format.rotate, *format.tensors


def flatten_pages(pages: KVPages) -> tuple[Any, ...]:
    """Pages as arguments of a torch op."""
    return (pages.pool, pages.page_table, pages.cache_seqlens, *flatten_format(pages.format))


def _with_pages(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a torch op from the pages on, with `KVPages` as the first."""
    pool, page_table, cache_seqlens, *format = args[:8]
    return KVPages.trusted(pool, page_table, cache_seqlens, KVFormat(*format)), *args[8:]


def _schema(kind: type[Append | AttentionParams]) -> str:
    """The options as arguments in a torch op's schema, in their order."""
    return ", ".join(f"{_ARGUMENTS[hint]} {name}" for name, hint in get_type_hints(kind).items())


def _append(k: torch.Tensor, v: torch.Tensor, *args: Any) -> None:
    pages, *options, backend = _with_pages(args)
    append, writer = Append(*options), find(backend, k.device, k.dtype, pages.format.name)
    if at_hand(k, writer.name):
        check_appended(pages, k.shape[0], append)
    writer.append(pages, k, v, append)


register(
    f"append(Tensor k, Tensor v, {_CHANGED_PAGES}, {_schema(Append)}, str backend) -> ()",
    _append,
    lambda *args: None,
)


def _attention(q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pages, *options, backend = _with_pages(args)
    params = AttentionParams(*options)
    reader = find(backend, q.device, q.dtype, pages.format.name)
    if at_hand(q, reader.name):
        check_attended(pages, q.shape[0], params)
    out, lse = reader.attention(q, pages, params)
    return out, q.new_empty(0, dtype=torch.float32) if lse is None or not params.return_lse else lse


def _attention_fake(q: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    pages, *options, _ = _with_pages(args)
    rows, lse = q.shape[:-1], AttentionParams(*options).return_lse
    return q.new_empty((*rows, pages.spec.v_dim)), q.new_empty(rows if lse else 0, dtype=torch.float32)


register(
    f"attention(Tensor q, {_PAGES}, {_schema(AttentionParams)}, str backend) -> (Tensor, Tensor)",
    _attention,
    _attention_fake,
)


def _from_dense(k: torch.Tensor, v: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *arguments, backend = args
    format = KVFormat(*arguments)
    pages = find(backend, k.device, k.dtype, format.name).from_dense(k, v, format)
    return pages.pool, pages.page_table, pages.cache_seqlens


def _from_dense_fake(k: torch.Tensor, v: torch.Tensor, *args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch, heads, length, _ = k.shape
    columns = -(-length // PAGE_SIZE)
    pool = k.new_empty((batch * columns, heads, KVFormat(*args[:-1]).layout.nbytes), dtype=torch.uint8)
    return pool, k.new_empty((batch, columns), dtype=torch.int32), k.new_empty(batch, dtype=torch.int32)


register(
    f"from_dense(Tensor k, Tensor v, {_FORMAT}, str backend) -> (Tensor, Tensor, Tensor)",
    _from_dense,
    _from_dense_fake,
)

# Inductor computes an expression when its value is used, even if `append` has changed what it reads by then (in torch
# 2.15). What an op returns is computed where the op is called.
register("lengths(Tensor cache_seqlens) -> Tensor", torch.Tensor.long, torch.Tensor.long)
