"""The context manager `fp8_attention`, and how it sees a model's attention calls.

A `TorchFunctionMode` sees every call of `torch.nn.functional.scaled_dot_product_attention` on its thread until the
`with` block ends, however the function was imported. Nothing is patched. If a `model` is passed, it gets forward hooks
for the duration of the block, so that a call knows the module that makes it.

Dynamo traces through the mode, and guards on the active modes and on everything that the policy reads. So a model may
be compiled before or inside the context, whole or by blocks. Each decision is part of the graph; another decision
compiles another graph; and code that was compiled outside the context is what runs outside it.

How long things live:

- `_Mode` is one context. `outer` is the context around it on the same thread, `level` how many there are around it.
- `Site` (`sites.py`) is one module of the model inside one context. Its hooks set the `site` of the mode of the thread
  that runs it.
- A slot is the number of a context with hooks among those that have hooks at the time, in all threads. It is free again
  when the context ends. It names the hooks, so that the hooks of the next context have the same names and Dynamo need
  not compile again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from .._torch_ops import register
from ..dense.sdpa import attend_dense, autocast, fallback_reason, in_batches, log_fallback, run_dense, sdpa_fake
from ..errors import UsageError
from .policy import AttentionPolicy
from .report import AttentionReport, ModuleCalls
from .sites import Site, hooks_on, thread

SDPA = torch.nn.functional.scaled_dot_product_attention  # the same object as torch._C._nn's
MULTI_HEAD = torch.nn.functional.multi_head_attention_forward


@contextmanager
def fp8_attention(
    policy: AttentionPolicy | None = None, model: nn.Module | None = None, *, layers: Sequence[nn.Module] | None = None
) -> Iterator[AttentionReport]:
    """Run `torch.nn.functional.scaled_dot_product_attention` in FP8, on this thread, until the `with` block ends.

    Calls that cannot run in FP8 (`fallback_reason`), and calls that the policy skips, go to torch's own function
    unchanged. Other threads are not affected. Asyncio tasks that run on the thread inside the block are. `state_dict`
    and the types of modules do not change. In nested contexts, the innermost one that includes the call decides. So
    several models can have a context each.

    With `torch.compile`, two things remain in 16 bits:

    - The inference fast path of `torch.nn.TransformerEncoderLayer` and `MultiheadAttention` does not call SDPA. In
      compiled code the context cannot turn it off; `torch.backends.mha.set_fastpath_enabled(False)` does.
    - transformers' models make an explicit causal mask while they are traced (before torch 2.14, and during the capture
      of a CUDA graph), and calls with a mask go to torch. Compile their layers, not the whole model.

    Args:
        policy: default `AttentionPolicy()`.
        model: the context includes only calls inside this module. It gets forward hooks until the block ends, for the
            names and layers in the policy and in the report. None: the context includes every call, and none is in a
            layer.
        layers: the layers that `skip_first`, `skip_last` and numbers in `skip` count, in order; each is a module inside
            the model. Default: the contents of the model's outermost `ModuleList`s, one after another (`model.layers`,
            `transformer.blocks`, an encoder's and then a decoder's layers).
    Yields:
        The `AttentionReport`.
    Raises:
        TypeError: `policy` is no `AttentionPolicy`, or `model` is no module.
        UsageError: the policy names modules or layers that do not exist, or it needs a `model` and there is none.
        RuntimeError: contexts end out of order; or the model is copied or pickled inside the context, with its hooks.
    """
    policy = AttentionPolicy() if policy is None else policy
    if not isinstance(policy, AttentionPolicy):
        raise TypeError(
            f"policy must be an AttentionPolicy, as in fp8_attention(AttentionPolicy(), model); got "
            f"{type(policy).__name__}"
        )
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module (of a pipeline, pass its transformer); got {type(model).__name__}"
        )
    if model is None and (
        policy.skip_first or policy.skip_last or policy.layers or policy.patterns or layers is not None
    ):
        raise UsageError(
            "skip_first, skip_last, numbers and patterns in skip, and layers need the model: call "
            "fp8_attention(policy, model)"
        )
    mode = _Mode(policy, getattr(thread, "mode", None))
    with _entered(mode), nullcontext() if model is None else hooks_on(model, layers, policy) as mode.slot, mode:
        yield mode.report


@contextmanager
def _entered(mode: _Mode) -> Iterator[None]:
    """Make `mode` the innermost one of this thread. A context ends with all contexts inside of it: theirs do nothing
    more.
    """
    thread.mode = mode
    try:
        yield
    finally:
        innermost = inner = getattr(thread, "mode", None)
        while inner is not None and inner is not mode:
            inner = inner.outer
        if inner is mode:
            thread.mode = mode.outer
        if innermost is not mode:
            raise RuntimeError(
                "fp8_attention contexts of a thread must end in the reverse order of their begin, on that thread; one "
                "ended out of order. In asyncio tasks and generators, do not wait or yield inside a context"
            )


class _Mode(TorchFunctionMode):
    """One `fp8_attention` context."""

    def __init__(self, policy: AttentionPolicy, outer: _Mode | None) -> None:
        self.policy = policy
        self.report = AttentionReport(policy)
        self.outer = outer
        self.level: int = 0 if outer is None else outer.level + 1
        self.slot: int | None = None  # of `hooks_on`; None: there is no model
        self.site: Site | None = None  # the innermost module of the model that this thread runs

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if func is SDPA:
            return self.attend(*args, **kwargs) if self is _deciding() else func(*args, **kwargs)
        if func is MULTI_HEAD and self is _deciding():
            return _multi_head(*args, **kwargs)
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
            return torch.unflatten(*args, **kwargs)  # Dynamo cannot trace the method below a mode: it calls super()
        return func(*args, **kwargs)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """A call that this context decides about: in FP8, or by the next mode or torch."""
        reason = fallback_reason(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if reason is None:
            reason = self._reason(query, key, is_causal)
        if torch.compiler.is_compiling():
            _compiled(self.level, reason)
            if reason is not None:  # the graph runs under this mode: a call of SDPA in it would come back here
                return torch.ops.aten.scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
        else:
            self.row(reason).count(query, key)
            if reason is not None:
                log_fallback(reason, query, key, value)
                return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        options = is_causal, scale, self.policy.key_dtype, self.policy.rotate_keys, self.policy.backend
        query, key, value = autocast(query, key, value)
        if torch.compiler.is_compiling():  # a torch op of its own, so that the report counts its runs
            return in_batches(torch.ops.fp8attn.sdpa_of_context, query, key, value, *options, self.level)
        return in_batches(run_dense, query, key, value, None, None, *options)

    def row(self, reason: str | None) -> ModuleCalls:
        """The report's row of a call that is made now. In a graph, the module is the innermost that is not in it."""
        name, layer = ("", None) if self.site is None else (self.site.name, self.site.layer)
        return self.report.row(name, layer, reason)

    def _reason(self, query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> str | None:
        """Why the policy skips this call; None: it does not."""
        site = self.site
        if not self.report.step_runs:
            return "left out by steps"
        if site is not None and site.reason is not None:
            return site.reason
        name, layer = (None, None) if site is None else (site.name, site.layer)
        return self.policy.call_reason(name, layer, query, key, is_causal)


def _deciding() -> _Mode | None:
    """The innermost context of this thread that includes a call made now."""
    mode = getattr(thread, "mode", None)
    while mode is not None and mode.slot is not None and mode.site is None:
        mode = mode.outer
    return mode


def _sdpa(*args: Any, **kwargs: Any) -> torch.Tensor:
    mode = _deciding()
    assert mode is not None  # it runs `_multi_head`
    return mode.attend(*args, **kwargs)


# torch turns a mode off while it handles a function, so the mode would not see the SDPA inside nn.MultiheadAttention's
# function. Entering the mode again does not help: the function first checks for active modes, and would be passed to
# this one again. So a copy of the function runs, with two of its global names replaced. The copy has no `__name__`,
# because Dynamo would look names up in the module of that name.
_multi_head = FunctionType(
    MULTI_HEAD.__code__,
    {name: value for name, value in MULTI_HEAD.__globals__.items() if name != "__name__"}
    | {"scaled_dot_product_attention": _sdpa, "has_torch_function": lambda tensors: False},
    MULTI_HEAD.__name__,
    MULTI_HEAD.__defaults__,
)


def _of_level(level: int) -> _Mode | None:
    """This thread's context of that level. A context that is itself being traced is not there yet."""
    mode = getattr(thread, "mode", None)
    while mode is not None and mode.level != level:
        mode = mode.outer
    return mode


def _compiled(level: int, reason: str | None) -> None:
    """Count a call that is compiled into a graph.

    Dynamo calls this while it traces. It passes no module's name, because a name in the trace would give each block its
    own graph.
    """
    mode = _of_level(level)
    if mode is not None:
        mode.row(reason).compiled += 1


# As torch.compiler.assume_constant_result does, without importing all of Dynamo.
vars(_compiled)["_dynamo_marked_constant"] = True


def _sdpa_of_context(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any) -> torch.Tensor:
    *options, level = args
    mode = _of_level(level)
    if mode is not None:  # outside contexts, as in an exported program, nothing is counted
        mode.row(None).count(q, k)
    return attend_dense(q, k, v, None, None, *options)


register(
    "sdpa_of_context(Tensor q, Tensor k, Tensor v, bool is_causal, float? scale, str key_dtype, bool rotate_keys, str "
    "backend, int level) -> Tensor",
    _sdpa_of_context,
    sdpa_fake,
)
