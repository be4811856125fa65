"""Which attention calls run in FP8."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Sequence
from dataclasses import dataclass

import torch

from ..checks import is_whole
from ..errors import UsageError
from ..formats.codec import DEFAULT_KEY_DTYPE, KeyDtype, codec_of
from ..params import DENSE_BACKENDS, DenseBackendName, check_backend

# Tokens. On an H200 calls of 4,096 are 1.04 to 1.38 times as fast as BF16's in CUDA graphs, and 1.00 to 1.31 times from
# Python. But 2 x 10 heads of 64 are slower in both. From here on no measured call is (docs/lab/2026-11-host.md).
MIN_LENGTH = 4608


@dataclass(frozen=True)
class AttentionCall:
    """One call of `scaled_dot_product_attention`: the argument of the functions in `AttentionPolicy.skip`.

    Attributes:
        name: dotted name of the innermost module that makes the call; None without a `model`.
        layer: the index of its layer; None outside all layers.
        query_shape: `[..., Hq, L, E]`.
        key_shape: `[..., H, S, E]`.
    """

    name: str | None
    layer: int | None
    query_shape: torch.Size
    key_shape: torch.Size
    is_causal: bool


@dataclass(frozen=True)
class AttentionPolicy:
    """Which calls run in FP8. Every other call goes to torch unchanged, and the report has the reason.

    Attributes:
        min_length: calls with fewer queries or fewer keys are skipped, because quantizing them costs more time than it
            saves.
        skip_first, skip_last: numbers of the model's first and last layers that are skipped; these need the `model`.
        skip: what else is skipped. A number is that of a layer (negative ones count from the end), and a string is a
            pattern (`fnmatch`: `"*.attn2"`) of dotted module names, which includes all modules inside; these need the
            `model`. A function takes an `AttentionCall` and returns whether to skip it.
        steps: the diffusion steps that run in FP8: a range, a set, or a function of the step's index. None: all.
            `AttentionReport.step` counts them.
        key_dtype, rotate_keys, backend: as `fp8attn.scaled_dot_product_attention` takes them.
    Raises:
        UsageError: a value that is not one of these.
    """

    min_length: int = MIN_LENGTH
    skip_first: int = 0
    skip_last: int = 0
    skip: Sequence[int | str | Callable[[AttentionCall], bool]] = ()
    steps: Container[int] | Callable[[int], bool] | None = None
    key_dtype: KeyDtype = DEFAULT_KEY_DTYPE
    rotate_keys: bool = True
    backend: DenseBackendName = "auto"

    def __post_init__(self) -> None:
        for name in ("min_length", "skip_first", "skip_last"):
            value = getattr(self, name)
            if not is_whole(value) or value < 0:
                raise UsageError(
                    f"{name} is a number of {'tokens' if name == 'min_length' else 'layers'}, 0 or more; got {value!r}"
                )
        if isinstance(self.skip, int | str) or callable(self.skip):
            raise UsageError(f"skip is a sequence of layers, patterns and functions: pass ({self.skip!r},)")
        if not isinstance(self.skip, Collection) or not all(
            callable(item) or (isinstance(item, int | str) and not isinstance(item, bool)) for item in self.skip
        ):
            raise UsageError(
                f"skip is a sequence of layers (whole numbers), patterns (strings) and functions of a call; got "
                f"{self.skip!r}"
            )
        if isinstance(self.steps, str) or not (
            self.steps is None or callable(self.steps) or isinstance(self.steps, Container)
        ):
            raise UsageError(
                f"steps is a range, a set or a function of a step's index, as in range(5, 45); got {self.steps!r}"
            )
        codec_of(self.key_dtype)  # raises UsageError
        check_backend(self.backend, DENSE_BACKENDS)

    @property
    def layers(self) -> tuple[int, ...]:
        """The numbers in `skip`."""
        return tuple(item for item in self.skip if isinstance(item, int))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The strings in `skip`."""
        return tuple(item for item in self.skip if isinstance(item, str))

    def layer_reason(self, layer: int, total: int) -> str | None:
        """Why a layer, of `total`, is skipped by its number; None: it is not."""
        if layer < self.skip_first:
            return "left out by skip_first"
        if layer >= total - self.skip_last:
            return "left out by skip_last"
        named = not {layer, layer - total}.isdisjoint(self.layers)
        return f"left out by number ({layer})" if named else None

    def call_reason(
        self, name: str | None, layer: int | None, query: torch.Tensor, key: torch.Tensor, is_causal: bool
    ) -> str | None:
        """Why a call is skipped by its length or by a function; None: it is not."""
        if query.shape[-2] < self.min_length or key.shape[-2] < self.min_length:
            return f"shorter than {self.min_length} tokens"
        for item in self.skip:
            if callable(item) and item(AttentionCall(name, layer, query.shape, key.shape, is_causal)):
                return f"left out by {getattr(item, '__name__', type(item).__name__)}"
        return None

    def takes_step(self, index: int) -> bool:
        """Whether a diffusion step runs in FP8."""
        if self.steps is None:
            return True
        return bool(self.steps(index)) if callable(self.steps) else index in self.steps
