"""The options of attention and of appends, and the names of backends."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from .errors import UsageError

BackendName = Literal["auto", "hopper", "triton", "reference"]  # of calls over pages
DenseBackendName = Literal["auto", "hopper", "triton", "reference", "fa3"]  # of calls on dense tensors
BACKENDS: tuple[BackendName, ...] = ("hopper", "triton", "reference")
DENSE_BACKENDS: tuple[DenseBackendName, ...] = (*BACKENDS, "fa3")
MOST_DENSE = 256  # channels of a head in a dense call
LONG = 128  # new tokens of an engine's sequences; longer ones of one length are passed without their bounds


# What a layer's attention may have that changes its kernels.
AttentionOption = Literal["window", "softcap", "sinks", "exact", "batch_invariant"]


def options_of(
    *, window: object, softcap: object, sinks: object, exact: bool, batch_invariant: bool
) -> frozenset[AttentionOption]:
    """The options that attention has, of all their values: those that are neither None nor False."""
    values: dict[AttentionOption, object] = {
        "window": window, "softcap": softcap, "sinks": sinks, "exact": exact, "batch_invariant": batch_invariant
    }  # fmt: skip
    return frozenset(name for name, value in values.items() if value is not None and value is not False)


def check_backend(backend: str, names: tuple[str, ...] = BACKENDS) -> None:
    """Raise UsageError if `backend` is neither "auto" nor one of `names`. Whether it can run depends on the device and
    the dtype.
    """
    if backend not in ("auto", *names):
        raise UsageError(f"unknown backend {backend!r}; choose {', '.join(map(repr, ('auto', *names)))}")


class AttentionParams(NamedTuple):
    """The options of attention. `ops.attention` makes this tuple once, and passes it through the backend to the kernel.

        out = softmax(mask(softcap(softmax_scale * q k^T))) v

    Attributes:
        cu_seqlens_q: `[num_seqs + 1]` int32, the index in T of each sequence's first query, then T. None: every
            sequence has T / num_seqs.
        max_seqlen_q: the largest number of queries of a sequence. With a smaller number, a GPU leaves rows of the
            output unspecified.
        causal: query i of n sees the keys up to its own position, `cache_seqlens - n + i`. False: it sees all keys of
            its sequence.
        softmax_scale: the factor of the scores.
        window: number of positions that a query sees: its own and the `window - 1` before it. 0: no window.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2, arXiv:2408.00118). 0: no softcap.
        sinks: `[num_q_heads]` of any floating dtype, a logit that every softmax row of a head has in addition, without
            a value (gpt-oss).
        leftpad_k: `[num_seqs]` int32, number of first tokens of each sequence that are padding. No query sees them.
        return_lse: also return the natural logarithm of the softmax's denominator, sinks included.
        exact: multiply 16 bits of queries and of softmax weights for any number of rows, as decode steps always do.
            What remains is the error of stored K and V, and rounding no larger than BF16's. Otherwise a kernel may
            round them to 8 bits (`hopper`, in prompts).
        batch_invariant: the result of a query has the same bits whatever the number and lengths of the sequences, the
            number of queries of its sequence, and the number of keys that it does not see, over the same bytes. It
            takes longer, most of all with few queries. `triton` refuses it.
    """

    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int
    causal: bool
    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    return_lse: bool = False
    exact: bool = False
    batch_invariant: bool = False


# What the callers of attention choose: the fields from `causal` on. None: the default of `softmax_scale`, no window and
# no softcap.
AttentionArguments = tuple[
    bool, float | None, int | None, float | None, torch.Tensor | None, torch.Tensor | None, bool, bool, bool
]


class Append(NamedTuple):
    """The options of an append. `ops.append` makes this tuple once, and passes it through the backend to the kernel.

    Attributes:
        cu_seqlens: `[num_seqs + 1]` int32, the index in T of each sequence's first token, then T. None: every sequence
            has `max_seqlen`.
        max_seqlen: the largest number of new tokens of a sequence. With a smaller number, a GPU loses tokens.
        static_scales: the pages have calibrated scales, which do not grow. Larger values saturate.
        advance: `cache_seqlens` are the lengths before the new tokens, and the append adds the new tokens to them.
            False: they count the new tokens already, and do not change; a sequence that is shorter than its new tokens
            pads the batch, and gets none.
    """

    cu_seqlens: torch.Tensor | None
    max_seqlen: int
    static_scales: bool = False
    advance: bool = True
