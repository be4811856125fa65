"""The modules of a model inside a context, and the hooks by which the context knows which of them runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from torch import nn

from ..errors import UsageError
from .policy import AttentionPolicy

thread = threading.local()  # its attribute `mode` is the innermost mode of this thread


class Site:
    """A module of the model, with hooks that record in the mode when it is entered and left.

    The hooks write only to the mode of their own thread, so other threads can run the model at the same time. They
    reach what they read through the module. So what Dynamo compiled for one block or context is valid for the next one,
    if the decision is the same.

    Attributes:
        name, layer: the module's dotted name, and the index of its layer.
        reason: why the policy skips calls in this module; None: it does not.
        parent: the site around this one.
    """

    def __init__(self, name: str, layer: int | None, reason: str | None, parent: Site | None, slot: int) -> None:
        self.name, self.layer, self.reason, self.parent, self.slot = name, layer, reason, parent, slot

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse copies, whose hooks would stay after the context."""
        raise RuntimeError(
            "a model inside an fp8_attention context cannot be copied or pickled, because it has the context's hooks: "
            "do it outside of the `with` block, or save its state_dict"
        )

    def enter(self, module: nn.Module, args: tuple) -> None:
        """The module's forward begins."""
        self._move(self)

    def leave(self, module: nn.Module, args: tuple, output: Any) -> None:
        """The module's forward ends."""
        self._move(self.parent)

    def _move(self, site: Site | None) -> None:
        mode = getattr(thread, "mode", None)
        while mode is not None and mode.slot != self.slot:
            mode = mode.outer
        if mode is not None:
            mode.site = site


slots: set[int] = set()  # of the contexts with hooks, in all threads
slots_lock = threading.Lock()


@contextmanager
def hooks_on(model: nn.Module, layers: Sequence[nn.Module] | None, policy: AttentionPolicy) -> Iterator[int]:
    """Hooks on the model, and on its modules that may call attention: those with children, and those that the policy
    names. Yields their slot, by which they find the mode.
    """
    with slots_lock:
        slot = next(slot for slot in range(len(slots) + 1) if slot not in slots)
        slots.add(slot)
    # A handle of register_forward_hook has a new number each time. Dynamo guards on it, so every block would be
    # compiled separately.
    hook: Any = f"fp8attn-{slot}"  # torch declares int, the handles' numbers
    sites: dict[nn.Module, Site] = {}
    try:
        sites = _sites(policy, slot, getattr(model, "_orig_mod", model), layers)  # torch.compile wraps a model
        for module, site in sites.items():
            module._forward_pre_hooks[hook] = site.enter
            module._forward_hooks[hook] = site.leave
            module._forward_hooks_always_called[hook] = True
        yield slot
    finally:
        for module in sites:
            module._forward_pre_hooks.pop(hook, None)
            module._forward_hooks.pop(hook, None)
            module._forward_hooks_always_called.pop(hook, None)
        with slots_lock:
            slots.discard(slot)


def _sites(
    policy: AttentionPolicy, slot: int, model: nn.Module, layers: Sequence[nn.Module] | None
) -> dict[nn.Module, Site]:
    """The modules that get hooks, and the policy's decision for each."""
    names = {module: name for name, module in model.named_modules()}
    layers = _layers(model) if layers is None else [getattr(layer, "_orig_mod", layer) for layer in layers]
    if (policy.skip_first or policy.skip_last or policy.layers) and not layers:
        raise UsageError(
            f"skip_first, skip_last and numbers in skip count layers, and {type(model).__name__} has none in a "
            f"ModuleList; pass them: fp8_attention(policy, model, layers=[...])"
        )
    if wrong := [number for number in policy.layers if not -len(layers) <= number < len(layers)]:
        raise UsageError(f"skip names layers {wrong}, and the model has layers 0 to {len(layers) - 1} (-1 is the last)")
    for i, layer in enumerate(layers):
        if layer not in names:
            raise UsageError(
                f"layers[{i}], a {type(layer).__name__}, is not inside the model; pass modules from model.modules()"
            )
    for pattern in policy.patterns:
        if not any(fnmatchcase(name, pattern) for name in names.values()):
            raise UsageError(
                f"no module of the model is called {pattern!r}; patterns match whole dotted names, such as "
                f"{list(names.values())[-1]!r}"
            )
    index = {layer: i for i, layer in enumerate(layers)}
    sites: dict[nn.Module, Site] = {}
    by_name: dict[str, Site] = {}
    for module, name in names.items():
        matched = next((pattern for pattern in policy.patterns if fnmatchcase(name, pattern)), None)
        if name and module not in index and matched is None and not any(True for _ in module.children()):
            continue
        parent = None
        above = name
        while above and parent is None:
            above = above.rpartition(".")[0]
            parent = by_name.get(above)
        number, reason = (None, None) if parent is None else (parent.layer, parent.reason)
        if matched is not None:
            reason = f"left out by name ({matched})"
        if module in index:
            number = index[module]
            reason = policy.layer_reason(number, len(layers)) or reason
        sites[module] = by_name[name] = Site(name, number, reason, parent, slot)
    return sites


def _layers(model: nn.Module) -> list[nn.Module]:
    """The contents of the outermost `ModuleList`s."""
    layers: list[nn.Module] = []
    for child in model.children():
        layers += list(child) if isinstance(child, nn.ModuleList) else _layers(child)
    return layers
