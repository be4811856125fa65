"""The mask function that is registered in transformers as `fp8_kv`, and `CompactMask`, which it returns.

A model makes one mask for all its layers of a type. Some of them are in FP8 and some in 16 bits, so the mask must serve
both. A mask that is causal, with padding on the left at most, is one of two:

- None: causal without padding, and no longer than the window, in models without layers that share K and V.
- `CompactMask`: the first and the last token that each sequence's queries may see, and the window.

FP8 layers take the first token as `leftpad_k`; 16-bit layers expand blocks of the mask. Masks of windows that no FP8
layer has (`config.SHORTEST_WINDOW`), and of chunks, are what `sdpa` gets. Any other mask is what `sdpa` would get, and
FP8 layers refuse it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch.utils._pytree import tree_map
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
    sliding_window_causal_mask_function,
)

from .config import SHORTEST_WINDOW

QUERY_BLOCK = 1024  # queries whose mask or scores are expanded at a time
_aten = torch.ops.aten
_KEEPS = (_aten.detach.default, _aten._to_copy.default, _aten.clone.default, _aten.alias.default)

_OTHER = (
    "fp8_kv: in compiled code an attention mask must have padding on the left only (none between or after tokens), and "
    "be as long as the cache and the new tokens together. Pad on the left (tokenizer.padding_side = 'left'), or call "
    "model.set_attn_implementation('sdpa')"
)


class CompactMask(torch.Tensor):
    """A causal mask with padding on the left, as an int32 tensor `[1, 1, n, B]` of a type that no caller makes by
    accident.

    transformers passes a tensor of four dimensions through unchanged. A copy (to another device) is a `CompactMask`,
    too, and so are the last queries, `mask[:, :, -n:]`, to which a mask says the same: Gemma 4 computes layers that
    share K and V for these alone. The result of any other operation is a plain tensor, which FP8 layers refuse.

    Attributes:
        window: number of tokens that a query sees; None: all up to its own.
        rows: int32 `[n, B]`. For each sequence the last row is the number of tokens up to the last query. If n is 2,
            the first row is the first token that is not padding.
    """

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, rows: torch.Tensor, window: int | None = None) -> CompactMask:
        return torch.Tensor._make_wrapper_subclass(cls, (1, 1, *rows.shape), dtype=rows.dtype, device=rows.device)

    def __init__(self, rows: torch.Tensor, window: int | None = None) -> None:
        self.rows, self.window = rows, window

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's has no types
        return f"CompactMask({self.rows!r}, {self.window})"

    def __tensor_flatten__(self) -> tuple[list[str], int | None]:
        return ["rows"], self.window

    @classmethod
    def __tensor_unflatten__(
        cls, inner: dict[str, torch.Tensor], context: int | None, outer_size: Sequence[int], outer_stride: Sequence[int]
    ) -> CompactMask:
        return cls(inner["rows"], context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares the default, which is no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _aten.slice.Tensor and _takes_last_queries(*args[1:], **(kwargs or {})):
            return cls(args[0].rows, args[0].window)
        plain = tree_map(lambda x: x.rows[None, None] if isinstance(x, CompactMask) else x, (args, kwargs or {}))
        out = func(*plain[0], **plain[1])
        return cls(out[0, 0], args[0].window) if func in _KEEPS and out.dtype == torch.int32 else out


def _takes_last_queries(dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> bool:
    """Whether `aten.slice` with these arguments is `mask[:, :, -n:]`."""
    return dim == 2 and start is not None and start < 0 and (end is None or end == sys.maxsize) and step == 1


def fp8_kv_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> torch.Tensor | None:
    """The mask of one type of layers: None, a `CompactMask`, or what `sdpa` gets (see the module).

    Args:
        batch_size, q_length, kv_length, q_offset, kv_offset: the part of the scores that the mask is for. A tensor
            `q_offset` (static caches) is read back only to check an `attention_mask`, and not in compiled code, which
            checks it on the device.
        mask_function: which query sees which key.
        attention_mask: bool `[B, tokens]`, False where a token is padding.
        local_size: the window of sliding and chunked layers, which differ in their mask functions.
    Raises:
        ValueError: `attention_mask` is shorter than the cache and the new tokens together, or there are no sequences.
        RuntimeError: in compiled code, if `attention_mask` has holes or is too short. On a GPU the error is raised
            later.
    """
    if not batch_size:
        raise ValueError("a batch of no sequences: give the model one sequence of tokens or more")
    sdpa_arguments = dict(
        batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
        mask_function=mask_function, attention_mask=attention_mask, local_size=local_size, device=device, **kwargs,
    )  # fmt: skip
    # Gemma 4 takes the last queries of a mask for layers that share K and V. None would not say that they are the last.
    sliced = bool(getattr(kwargs.get("config"), "num_kv_shared_layers", 0))
    if sliced:
        sdpa_arguments["allow_is_causal_skip"] = False
    if (local_size is None and kv_offset) or (local_size is not None and local_size < SHORTEST_WINDOW):
        return sdpa_mask(**sdpa_arguments)
    if not _is_plain(mask_function, local_size, kwargs) and not _has_plain_values(sdpa_arguments):
        return sdpa_mask(**sdpa_arguments)
    end = q_offset + q_length
    start, padded = None, False
    if attention_mask is not None:
        width = attention_mask.shape[1]
        real = attention_mask.bool() & (torch.arange(width, device=attention_mask.device) < end)
        start = (real.cumsum(-1) == 0).sum(-1).clamp_max(end)
        last = (real * torch.arange(1, width + 1, device=real.device)).amax(-1)
        # Compiled, `end` may be a symbolic integer, of which as_tensor makes no tensor.
        short = last.new_zeros(()) + end > width
        other = (real.sum(-1) != (last - start).clamp_min(0)).any() | short  # holes, or too short
        padded = True
        if torch.compiler.is_compiling():
            torch._assert_async(~other, _OTHER)
        else:  # the one wait for the device in a step, as in sdpa_mask
            padded, other, short = torch.stack([start.amax(), other.long(), short.long()]).tolist()
            if short:
                raise ValueError(
                    f"attention_mask is of {width} tokens, and the cache holds {int(q_offset)} and gets {q_length} new "
                    f"ones: pass a mask of all of them. For another prompt make a new cache, or call reset(); to drop "
                    f"the last n tokens call crop(-n)"
                )
            if other:
                return sdpa_mask(**sdpa_arguments)
    in_window = local_size is None or kv_length <= local_size
    begins_or_ends = isinstance(q_offset, int) and (kv_offset + kv_length == end if q_length == 1 else q_offset == 0)
    if not (padded or sliced) and in_window and begins_or_ends:
        return None
    ends = (
        torch.full((batch_size,), end, dtype=torch.int32, device=device)
        if isinstance(end, int)
        else end.int().expand(batch_size)
    )
    return CompactMask(torch.stack([ends] if start is None or not padded else [start.int(), ends]), local_size)


def _plain_function(window: int | None) -> Callable:
    return causal_mask_function if window is None else sliding_window_causal_mask_function(window)


def _is_plain(mask_function: Callable, window: int | None, keywords: dict[str, Any]) -> bool:
    """Whether a mask function is transformers' own for a window, or, without one, the causal one."""
    if window is None:
        return mask_function is causal_mask_function
    # Dynamo cannot look into functions of tensors: into those of chunks, and of models that add something.
    if torch.compiler.is_compiling() and (
        keywords.get("use_vmap") or getattr(keywords.get("config"), "sliding_window", window) != window
    ):  # fmt: skip
        return False
    return _is_windows(mask_function, window)


@torch.compiler.assume_constant_result
def _is_windows(mask_function: Callable, window: int) -> bool:
    return _same(mask_function, _plain_function(window))


def _same(a: Any, b: Any) -> bool:
    """Whether two functions have the same code and the same variables: transformers makes a new one for every mask."""
    if a is b:
        return True
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    if not isinstance(a, FunctionType) or not isinstance(b, FunctionType):
        return isinstance(a, int) and isinstance(b, int) and a == b
    variables = (tuple(cell.cell_contents for cell in function.__closure__ or ()) for function in (a, b))
    return a.__code__ is b.__code__ and _same(*variables)


def _has_plain_values(sdpa_arguments: dict[str, Any]) -> bool:
    """Whether an unknown mask function has the values of the plain one, as in an image model that gets text only."""
    if torch.compiler.is_compiling() or sdpa_arguments["mask_function"] is bidirectional_mask_function:
        return False
    length, plain = sdpa_arguments["q_length"], _plain_function(sdpa_arguments["local_size"])
    for begin in range(0, length, QUERY_BLOCK):
        block = {
            **sdpa_arguments,
            "q_length": min(QUERY_BLOCK, length - begin),
            "q_offset": sdpa_arguments["q_offset"] + begin,
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
        if not torch.equal(sdpa_mask(**block), sdpa_mask(**{**block, "mask_function": plain})):
            return False
    return True


def block_of(
    mask: torch.Tensor | None, causal: bool, q_length: int, kv_length: int, begin: int, stop: int, device: torch.device
) -> torch.Tensor | None:
    """Queries `begin` to `stop` of a mask, expanded to `[B or 1, 1, stop - begin, kv_length]`; None if they see every
    key.
    """
    if mask is not None and not isinstance(mask, CompactMask):
        return mask[:, :, begin:stop] if mask.shape[2] > 1 else mask
    queries, keys = torch.arange(begin, stop, device=device), torch.arange(kv_length, device=device)
    if mask is None:
        # Keys after the queries' own are memory that a static cache has not filled yet.
        return (keys <= queries[:, None])[None, None] if causal and q_length > 1 else None
    rows = mask.rows
    queries = queries + rows[-1][:, None] - q_length
    if mask.window is not None:  # the keys end with the last query's, unless a static window is not full yet
        keys = keys + (rows[-1] - kv_length).clamp_min(0)[:, None, None]
    seen = keys <= queries[..., None]
    if mask.window is not None:
        seen = seen & (keys > queries[..., None] - mask.window)
    if rows.shape[0] == 2:
        seen = seen & (keys >= rows[0][:, None, None])
    return seen[:, None]
