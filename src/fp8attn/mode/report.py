"""Which attention calls ran in FP8, and why the others did not."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from .policy import AttentionPolicy


@dataclass
class ModuleCalls:
    """The calls of one module that ran in FP8, or that did not for one reason.

    Attributes:
        name: dotted name of the module; "" without a `model`. Of a call in a graph: of the module that was compiled, or
            the innermost around it; "" if the whole model was.
        layer: the index of its layer, or None.
        reason: why torch's own SDPA ran; None: FP8 ran.
        calls: the number of calls. In compiled code, calls in FP8 are counted when their graph runs, except in replays
            of CUDA graphs; torch's own are not.
        compiled: how often a call was compiled into a graph, for the module that ran then. Later modules may run the
            same graph.
        queries, keys: the fewest and the most of a call; None if no call was counted, or all had nested tensors.
        heads: the heads of query and key in the last call.
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
        """Add a call with this query and key."""
        self.calls += 1
        if query.is_nested or key.is_nested:  # nested: it has many lengths
            return
        self.queries = _widened(self.queries, query.shape[-2])
        self.keys = _widened(self.keys, key.shape[-2])
        self.heads = _heads(query), _heads(key)


@dataclass
class AttentionReport:
    """Which calls ran in FP8 in one `fp8_attention` context, and why the others did not. Its size does not grow with
    the number of calls.

    Calls in graphs of `torch.compile` are counted when the graph runs if they are in FP8. Those that go to torch are
    counted only when they are compiled, and not in a graph that was compiled before the context.

    Attributes:
        current_step: the index of the current diffusion step.
        step_runs: whether the current diffusion step runs in FP8.
    """

    policy: AttentionPolicy
    current_step: int = 0
    step_runs: bool = field(init=False)
    _stepped: bool = False  # whether `step` was called
    _rows: dict[tuple[str, str | None], ModuleCalls] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.step_runs = self.policy.takes_step(self.current_step)

    def step(self, index: int | None = None) -> None:
        """Begin the next diffusion step, or step `index`. A context begins with step 0."""
        self._stepped = True
        self.current_step = self.current_step + 1 if index is None else index
        self.step_runs = self.policy.takes_step(self.current_step)

    @property
    def rows(self) -> list[ModuleCalls]:
        """One row for each module and reason."""
        return list(self._rows.values())

    @property
    def fp8_calls(self) -> int:
        """The number of calls that ran in FP8."""
        return sum(row.calls for row in self.rows if row.reason is None)

    @property
    def calls(self) -> int:
        """The number of all calls, except those in compiled code that went to torch."""
        return sum(row.calls for row in self.rows)

    def row(self, name: str, layer: int | None, reason: str | None) -> ModuleCalls:
        """The row of this module and reason; it is made if there is none."""
        if (name, reason) not in self._rows:
            self._rows[name, reason] = ModuleCalls(name, layer, reason)
        return self._rows[name, reason]

    def __str__(self) -> str:
        if not self._rows:
            return "0 of 0 calls in FP8: no call of scaled_dot_product_attention reached this context on its thread"
        table = [("module", "layer", "calls", "compiled", "queries", "keys", "heads", "ran in")]
        for row in self.rows:
            heads = "" if row.heads is None else "/".join(str(n) for n in dict.fromkeys(row.heads))
            table.append((
                row.name or "-", "-" if row.layer is None else str(row.layer), str(row.calls), str(row.compiled),
                _span(row.queries),
                _span(row.keys), heads, "FP8" if row.reason is None else f"torch: {row.reason}",
            ))  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table
        ]
        in_graphs = sum(row.compiled for row in self.rows if row.reason is not None)
        uncounted = f"; {in_graphs} compiled with torch's own SDPA, whose runs are not counted" if in_graphs else ""
        unstepped = self.policy.steps is not None and not self._stepped
        stuck = "; all at step 0: call the report's step after each (in diffusers: on_step_end)" if unstepped else ""
        return "\n".join([f"{self.fp8_calls} of {self.calls} calls in FP8{uncounted}{stuck}", *lines])


def _heads(x: torch.Tensor) -> int:
    return x.shape[-3] if x.dim() > 2 else 1


def _widened(span: tuple[int, int] | None, n: int) -> tuple[int, int]:
    return (n, n) if span is None else (min(span[0], n), max(span[1], n))


def _span(span: tuple[int, int] | None) -> str:
    return "" if span is None else "-".join(str(n) for n in dict.fromkeys(span))
