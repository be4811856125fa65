"""Makes the key of a kernel in Triton's cache the same in every process.

The key covers the functions that a kernel calls and the constexpr globals that they read. Triton 3.6 adds a callee's
globals to those of its caller before it has collected them, so it finds them only if the callee's key was computed
earlier, for example for another kernel. Then a kernel has another key in a process that launches the same kernels in
another order, and is compiled again. If the keys of callees are computed before those of their callers, the key is
always the same. (Triton 3.9 does this itself.)
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from triton.runtime.jit import JITCallable

# The `id` of functions, which live as long as their modules; a JITCallable's own hash is the key.
_done: set[int] = set()


def compute_key(function: Any) -> None:
    """Compute the key of a `triton.jit` or `gluon.jit` function after the keys of all functions that it calls."""
    if not isinstance(function, JITCallable) or id(function) in _done:  # the interpreter's functions have no key
        return
    _done.add(id(function))
    for callee in _callees(function):
        compute_key(callee)
    _ = function.cache_key


def _callees(function: JITCallable) -> Iterator[Any]:
    """The objects that the names in a function refer to, which it may call."""
    nodes = list(ast.walk(function.parse()))
    attributes = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for name in {node.id for node in nodes if isinstance(node, ast.Name)}:
        value = function.fn.__globals__.get(name)
        if isinstance(value, ModuleType) and value.__name__.startswith(__package__):
            yield from (vars(value).get(attribute) for attribute in attributes)
        else:
            yield value
            yield from getattr(value, "hash_attrs", ())  # of an aggregate: its methods
