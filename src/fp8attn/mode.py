"""FP8 attention in any model: `with fp8_attention(policy): model(x)`.

A `TorchFunctionMode` sees every call of `torch.nn.functional.scaled_dot_product_attention` on its thread, however the function was
imported, until the `with` block ends. Nothing is patched; a `model` that is named gets forward hooks meanwhile, through which a call knows
the module it is made in.

Under `torch.compile` (2.11 and 2.13): Dynamo traces through the mode, and guards on the modes that are active and on what the policy read.
So a model may be compiled before or inside the context, whole or by its blocks: each decision is part of the graph, a graph is
compiled anew where a decision is another one, and code compiled outside the context is what runs outside it. One thing escapes, in
compiled code alone: the fast path that `torch.nn.TransformerEncoderLayer` and `MultiheadAttention` have for inference is no SDPA.
`torch.backends.mha.set_fastpath_enabled(False)` turns it off. And transformers' models make masks of causality alone while they are
traced (before torch 2.14, and while a CUDA graph is captured), and a call with a mask is torch's: compile their layers, not the whole.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from types import FunctionType

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from .dense.sdpa import fallback_reason, log_fallback, scaled_dot_product_attention
from .layout import DEFAULT_KEY_DTYPE, key_type
from .params import DENSE_BACKENDS

SDPA = torch.nn.functional.scaled_dot_product_attention  # and torch._C._nn's: they are one object
MULTI_HEAD = torch.nn.functional.multi_head_attention_forward
# Tokens, from results/h100/sdpa.json: at 8192 causal attention with as many KV heads as query heads is level with BF16, and everything else
# faster; at 4096 it is a sixth slower.
MIN_LENGTH = 8192


# The policy


@dataclass(frozen=True)
class AttentionCall:
    """One call of `scaled_dot_product_attention`, as the functions in `AttentionPolicy.skip` see it.

    Attributes:
        name: dotted name of the innermost module around it; None without a `model`.
        layer: the index of its layer; None outside of all.
        query_shape: `[..., Hq, L, E]`.
        key_shape: `[..., H, S, E]`.
        is_causal: as given.
    """

    name: str | None
    layer: int | None
    query_shape: torch.Size
    key_shape: torch.Size
    is_causal: bool


@dataclass(frozen=True)
class AttentionPolicy:
    """Which calls run in FP8. Every other call is torch's own, as it was made, and the report says why.

    Attributes:
        min_length: calls with fewer queries or fewer keys stay as they are: quantizing costs them more than it saves.
        skip_first, skip_last: so many of the model's first and last layers stay as they are; they need the `model`.
        skip: what else stays as it is. A string is a pattern (`fnmatch`: `"*.attn2"`) that names modules by their dotted name, with all
            that is inside them; it needs the `model`. A function takes an `AttentionCall` and says whether to skip it.
        steps: the diffusion steps that run in FP8, as a range, a set or a function of the step's index; None: all. `Report.step` counts.
        key_dtype, rotate_keys, backend: of `fp8attn.scaled_dot_product_attention`.
    """

    min_length: int = MIN_LENGTH
    skip_first: int = 0
    skip_last: int = 0
    skip: Sequence[str | Callable[[AttentionCall], bool]] = ()
    steps: Container[int] | Callable[[int], bool] | None = None
    key_dtype: str = DEFAULT_KEY_DTYPE
    rotate_keys: bool = True
    backend: str = "auto"

    def __post_init__(self) -> None:
        for name in ("min_length", "skip_first", "skip_last"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"{name} is a number of {'tokens' if name == 'min_length' else 'layers'}, 0 or more; got {value!r}")
        if isinstance(self.skip, str) or callable(self.skip):
            raise ValueError(f"skip is a sequence of patterns and functions: give ({self.skip!r},)")
        if not isinstance(self.skip, Collection) or not all(isinstance(item, str) or callable(item) for item in self.skip):
            raise ValueError(f"skip is a sequence of patterns (strings) and functions of a call; got {self.skip!r}")
        if isinstance(self.steps, str) or not (self.steps is None or callable(self.steps) or isinstance(self.steps, Container)):
            raise ValueError(f"steps is a range, a set or a function of a step's index, as in range(5, 45); got {self.steps!r}")
        key_type(self.key_dtype)  # raises ValueError
        if self.backend not in ("auto", *DENSE_BACKENDS):
            raise ValueError(f"unknown backend {self.backend!r}; choose {', '.join(map(repr, ('auto', *DENSE_BACKENDS)))}")

    @property
    def patterns(self) -> tuple[str, ...]:
        return tuple(item for item in self.skip if isinstance(item, str))

    @property
    def functions(self) -> tuple[Callable[[AttentionCall], bool], ...]:
        return tuple(item for item in self.skip if not isinstance(item, str))

    def takes_step(self, index: int) -> bool:
        """Whether a diffusion step runs in FP8."""
        if self.steps is None:
            return True
        return bool(self.steps(index)) if callable(self.steps) else index in self.steps


# The report


@dataclass
class ReportRow:
    """The calls of one module that went one way.

    Attributes:
        name: dotted name of the module; "" without a `model`, and in compiled code.
        layer: the index of its layer, or None.
        reason: why torch's own SDPA ran; None: FP8 did.
        calls: how often it was called, compiled code apart.
        compiled: how often it was compiled into a graph.
        queries, keys: the fewest and the most of a call; None if there were none but in graphs, or of nested tensors.
        heads: of query and key, in the last call.
    """

    name: str
    layer: int | None
    reason: str | None
    calls: int = 0
    compiled: int = 0
    queries: tuple[int, int] | None = None
    keys: tuple[int, int] | None = None
    heads: tuple[int, int] | None = None

    def count(self, query: torch.Tensor, key: torch.Tensor) -> None:
        self.calls += 1
        if query.is_nested or key.is_nested:  # of many lengths
            return
        self.queries = _widened(self.queries, query.shape[-2])
        self.keys = _widened(self.keys, key.shape[-2])
        self.heads = tuple(x.shape[-3] if x.dim() > 2 else 1 for x in (query, key))


@dataclass
class Report:
    """What ran where in one `fp8_attention` context, and why. Its size depends on the model, not on how often that runs.

    A graph of `torch.compile` is counted when it is compiled, not when it runs: one that was compiled earlier is not in here.
    """

    policy: AttentionPolicy
    current_step: int = 0
    step_runs: bool = field(init=False)  # whether the current step runs in FP8
    _rows: dict[tuple[str, str | None], ReportRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.step(self.current_step)

    def step(self, index: int | None = None) -> None:
        """The next diffusion step begins, or step `index`. A context begins with step 0."""
        self.current_step = self.current_step + 1 if index is None else index
        self.step_runs = self.policy.takes_step(self.current_step)

    @property
    def rows(self) -> list[ReportRow]:
        return list(self._rows.values())

    @property
    def fp8_calls(self) -> int:
        return sum(row.calls for row in self.rows if row.reason is None)

    @property
    def calls(self) -> int:
        return sum(row.calls for row in self.rows)

    def row(self, site: _Site | None, reason: str | None) -> ReportRow:
        """The row of these, which may be new."""
        name = "" if site is None else site.name
        if (name, reason) not in self._rows:
            self._rows[name, reason] = ReportRow(name, None if site is None else site.layer, reason)
        return self._rows[name, reason]

    def __str__(self) -> str:
        table = [("module", "layer", "calls", "compiled", "queries", "keys", "heads", "ran in")]
        for row in self.rows:
            heads = "" if row.heads is None else "/".join(str(n) for n in dict.fromkeys(row.heads))
            table.append((
                row.name or "-", "-" if row.layer is None else str(row.layer), str(row.calls), str(row.compiled), _span(row.queries),
                _span(row.keys), heads, "FP8" if row.reason is None else f"torch: {row.reason}",
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table]
        return "\n".join([f"{self.fp8_calls} of {self.calls} calls in FP8", *lines])


def _widened(span: tuple[int, int] | None, n: int) -> tuple[int, int]:
    return (n, n) if span is None else (min(span[0], n), max(span[1], n))


def _span(span: tuple[int, int] | None) -> str:
    return "" if span is None else "-".join(str(n) for n in dict.fromkeys(span))


# The context


@contextmanager
def fp8_attention(
    policy: AttentionPolicy | None = None, model: nn.Module | None = None, *, layers: Sequence[nn.Module] | None = None
) -> Iterator[Report]:
    """Run `torch.nn.functional.scaled_dot_product_attention` in FP8, on this thread, until the `with` block ends.

    Calls that cannot run in FP8 (`fallback_reason`) or that the policy leaves out go to torch's own function as they were made. Other
    threads are not affected, nor are other asyncio tasks (in compiled code they are: its guards know threads alone), `state_dict` and the
    modules' types. Where contexts are nested, the innermost that a call concerns decides; so several models may have one each.

    Args:
        policy: default `AttentionPolicy()`.
        model: only calls inside it are concerned. It gets forward hooks while this lasts, for the names and layers in the policy and the
            report. None: every call is concerned, and in no layer.
        layers: what `skip_first` and `skip_last` count, in order, each a module inside the model. Default: what the model's outermost
            `ModuleList`s hold, one list after another (`model.layers`, `transformer.blocks`, an encoder's and then a decoder's layers).
    Yields:
        The `Report`.
    Raises:
        TypeError: `policy` is no `AttentionPolicy`, or `model` no module.
        ValueError: the policy names modules or layers that there are none of, or no `model` is given for it.
    """
    policy = AttentionPolicy() if policy is None else policy
    if not isinstance(policy, AttentionPolicy):
        raise TypeError(f"policy must be an AttentionPolicy, as in fp8_attention(AttentionPolicy(), model); got {type(policy).__name__}")
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module (of a pipeline, pass its transformer); got {type(model).__name__}")
    if model is None and (policy.skip_first or policy.skip_last or policy.patterns or layers is not None):
        raise ValueError("skip_first, skip_last, patterns in skip, and layers need the model: call fp8_attention(policy, model)")
    mode = _Mode(policy, getattr(_thread, "mode", None))
    with _entered(mode), nullcontext() if model is None else _hooks(mode, model, layers), mode:
        try:
            yield mode.report
        finally:
            _move_to_top(mode)


_thread = threading.local()  # .mode: the innermost of this thread
# The modes that the running asyncio task has entered, or inherited from the task that started it. Tasks take turns on a thread, whose modes
# are those of all of them. Dynamo cannot trace a ContextVar: compiled code does not look.
_of_this_task: ContextVar[tuple[_Mode, ...]] = ContextVar("fp8attn.mode", default=())


@contextmanager
def _entered(mode: _Mode) -> Iterator[None]:
    """`mode` among those of this thread and this task. Contexts of tasks and of generators end in any order, and each takes itself out."""
    _thread.mode = mode
    if not torch.compiler.is_compiling():
        _of_this_task.set((*_of_this_task.get(), mode))
    try:
        yield
    finally:
        if _thread.mode is mode:
            _thread.mode = mode.outer
        else:
            inner = _thread.mode
            while inner.outer is not mode:
                inner = inner.outer
            inner.outer = mode.outer
        if not torch.compiler.is_compiling():
            _of_this_task.set(tuple(other for other in _of_this_task.get() if other is not mode))


def _move_to_top(mode: _Mode) -> None:
    """Put `mode` where its `__exit__` takes it off: on top of torch's stack, which others may have entered since."""
    if torch.compiler.is_compiling():
        return
    stack = _get_current_function_mode_stack()
    above = stack[stack.index(mode) + 1 :]
    if above:
        for _ in (mode, *above):
            _pop_mode()
        for other in (*above, mode):
            _push_mode(other)


class _Mode(TorchFunctionMode):
    def __init__(self, policy: AttentionPolicy, outer: _Mode | None) -> None:
        self.policy = policy
        self.report = Report(policy)
        self.outer = outer
        self.level: int = 0 if outer is None else outer.level + 1
        self.slot: int | None = None  # of `_hooks`; None: there is no model
        self.site: _Site | None = None  # where in the model this thread is

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = {} if kwargs is None else kwargs
        if func is SDPA:
            return self.attend(*args, **kwargs) if self is _concerned() else func(*args, **kwargs)
        if func is MULTI_HEAD and self is _concerned():
            return _multi_head(*args, **kwargs)
        if func is torch.Tensor.unflatten and torch.compiler.is_compiling():
            return torch.unflatten(*args, **kwargs)  # Dynamo cannot trace the method below a mode: it calls super()
        return func(*args, **kwargs)

    def attend(self, query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False) -> torch.Tensor:
        """The call, which concerns this context, by FP8 or by the next mode or torch."""
        reason = fallback_reason(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if reason is None:
            reason = self._reason(query, key, is_causal)
        if torch.compiler.is_compiling():
            _compiled(self.level, reason)
            if reason is not None:  # a graph that runs as it stands, under this mode, would call SDPA: and be here again
                return torch.ops.aten.scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
                )
        else:
            self.report.row(self.site, reason).count(query, key)
            if reason is not None:
                log_fallback(reason, query, key, value)
                return SDPA(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        return scaled_dot_product_attention(
            query, key, value, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, key_dtype=self.policy.key_dtype,
            rotate_keys=self.policy.rotate_keys, backend=self.policy.backend,
        )  # fmt: skip

    def _reason(self, query: torch.Tensor, key: torch.Tensor, is_causal: bool) -> str | None:
        """Why the policy leaves this call out; None: it does not."""
        site, policy = self.site, self.policy
        if not self.report.step_runs:
            return "left out by steps"
        if site is not None and site.reason is not None:
            return site.reason
        if query.shape[-2] < policy.min_length or key.shape[-2] < policy.min_length:
            return f"shorter than {policy.min_length} tokens"
        if policy.functions:
            name, layer = (None, None) if site is None else (site.name, site.layer)
            call = AttentionCall(name, layer, query.shape, key.shape, is_causal)
            for function in policy.functions:
                if function(call):
                    return f"left out by {getattr(function, '__name__', type(function).__name__)}"
        return None


def _concerned() -> _Mode | None:
    """The innermost context of this thread and task that decides about a call made now."""
    mode = getattr(_thread, "mode", None)
    entered = None if torch.compiler.is_compiling() else _of_this_task.get()
    while mode is not None and ((mode.slot is not None and mode.site is None) or (entered is not None and mode not in entered)):
        mode = mode.outer
    return mode


def _sdpa(*args, **kwargs) -> torch.Tensor:
    return _concerned().attend(*args, **kwargs)


# A mode is off while it handles a function, and would see nothing of what nn.MultiheadAttention's calls. So that one runs in a copy, in
# which two names mean something else; and which names no module, in which Dynamo would look them up instead.
_multi_head = FunctionType(
    MULTI_HEAD.__code__,
    {name: value for name, value in MULTI_HEAD.__globals__.items() if name != "__name__"}
    | {"scaled_dot_product_attention": _sdpa, "has_torch_function": lambda tensors: False},
    MULTI_HEAD.__name__,
    MULTI_HEAD.__defaults__,
)


def _compiled(level: int, reason: str | None) -> None:
    """Count a call in the report of this thread's context of that level; one that is itself traced has no report yet.

    Dynamo calls it while it traces. No module's name is noted: a name in the trace would make each block a graph of its own.
    """
    mode = getattr(_thread, "mode", None)
    while mode is not None and mode.level != level:
        mode = mode.outer
    if mode is not None:
        mode.report.row(None, reason).compiled += 1


_compiled._dynamo_marked_constant = True  # what torch.compiler.assume_constant_result sets; that imports all of Dynamo


# Where a call is made


class _Site:
    """A module of the model, whose hooks tell the mode that it is entered and left.

    The hooks write to the mode of their thread alone, so whoever else runs the model is not concerned. What they read they reach through
    the module, so what Dynamo compiled for one block or context holds for the next one, if its decision is the same.

    `copies` collects the modules that `copy.deepcopy` made of those of the model, with hooks and all.
    """

    def __init__(
        self,
        name: str,
        layer: int | None,
        reason: str | None,
        parent: _Site | None,
        slot: int,
        module: nn.Module | None,
        copies: list[weakref.ref],
    ) -> None:
        self.name, self.layer, self.reason, self.parent, self.slot = name, layer, reason, parent, slot
        self.module, self.copies = module, copies

    def __deepcopy__(self, memo: dict) -> _Site:
        """Of a copy of the module, whose hooks do nothing, as it is outside of the context, and go when that ends."""
        module = memo.get(id(self.module))
        if module is not None:
            self.copies.append(weakref.ref(module))
        return _Site(self.name, self.layer, self.reason, None, NO_SLOT, module, self.copies)

    def __reduce__(self) -> tuple:
        """A pickled module's hooks do nothing."""
        return _Site, (self.name, self.layer, self.reason, None, NO_SLOT, None, [])

    def enter(self, module: nn.Module, args: tuple) -> None:
        self._move(self)

    def leave(self, module: nn.Module, args: tuple, output) -> None:
        self._move(self.parent)

    def _move(self, site: _Site | None) -> None:
        mode = getattr(_thread, "mode", None)
        while mode is not None and mode.slot != self.slot:
            mode = mode.outer
        if mode is not None:
            mode.site = site


NO_SLOT = -1
_slots: set[int] = set()  # of the contexts that have hooks now, in all threads
_slots_lock = threading.Lock()


@contextmanager
def _hooks(mode: _Mode, model: nn.Module, layers: Sequence[nn.Module] | None) -> Iterator[None]:
    """Hooks on the model and on its modules that may call attention: those with children, and those that the policy names."""
    with _slots_lock:
        mode.slot = next(slot for slot in range(len(_slots) + 1) if slot not in _slots)
        _slots.add(mode.slot)
    # The handles of register_forward_hook have a new number each time, which Dynamo guards on: every block would be compiled for itself.
    hook = f"fp8attn-{mode.slot}"
    sites: dict[nn.Module, _Site] = {}
    copies: list[weakref.ref] = []
    try:
        sites = _sites(mode, getattr(model, "_orig_mod", model), layers, copies)  # torch.compile wraps a model
        for module, site in sites.items():
            module._forward_pre_hooks[hook] = site.enter
            module._forward_hooks[hook] = site.leave
            module._forward_hooks_always_called[hook] = True
        yield
    finally:
        for module in (*sites, *(module for copied in copies if (module := copied()) is not None)):
            for hooks in (module._forward_pre_hooks, module._forward_hooks, module._forward_hooks_always_called):
                hooks.pop(hook, None)
        with _slots_lock:
            _slots.discard(mode.slot)


def _sites(mode: _Mode, model: nn.Module, layers: Sequence[nn.Module] | None, copies: list[weakref.ref]) -> dict[nn.Module, _Site]:
    policy = mode.policy
    names = {module: name for name, module in model.named_modules()}
    layers = _layers(model) if layers is None else [getattr(layer, "_orig_mod", layer) for layer in layers]
    if (policy.skip_first or policy.skip_last) and not layers:
        raise ValueError(
            f"skip_first and skip_last count layers, and {type(model).__name__} has none in a ModuleList: name them, "
            "fp8_attention(policy, model, layers=[...])"
        )
    for i, layer in enumerate(layers):
        if layer not in names:
            raise ValueError(f"layers[{i}], a {type(layer).__name__}, is not inside the model: pass modules from model.modules()")
    for pattern in policy.patterns:
        if not any(fnmatchcase(name, pattern) for name in names.values()):
            raise ValueError(
                f"no module of the model is called {pattern!r}: patterns match whole dotted names, as {list(names.values())[-1]!r}"
            )
    index = {layer: i for i, layer in enumerate(layers)}
    sites: dict[nn.Module, _Site] = {}
    by_name: dict[str, _Site] = {}
    for module, name in names.items():
        matched = next((pattern for pattern in policy.patterns if fnmatchcase(name, pattern)), None)
        if name and module not in index and matched is None and not any(True for _ in module.children()):
            continue
        parent = None
        above = name
        while above and parent is None:
            above = above.rpartition(".")[0]
            parent = by_name.get(above)
        layer = index.get(module, None if parent is None else parent.layer)
        reason = None if parent is None else parent.reason
        if module in index and layer < policy.skip_first:
            reason = "left out by skip_first"
        elif module in index and layer >= len(layers) - policy.skip_last:
            reason = "left out by skip_last"
        elif matched is not None:
            reason = f"left out by name ({matched})"
        sites[module] = by_name[name] = _Site(name, layer, reason, parent, mode.slot, module, copies)
    return sites


def _layers(model: nn.Module) -> list[nn.Module]:
    """What the outermost `ModuleList`s hold."""
    found: list[nn.Module] = []
    for child in model.children():
        found += list(child) if isinstance(child, nn.ModuleList) else _layers(child)
    return found
