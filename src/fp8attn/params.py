"""What a call of attention is made of, besides its queries and pages; the names of backends."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch

BackendName = Literal["auto", "hopper", "triton", "reference"]  # of calls over pages
DenseBackendName = Literal["auto", "hopper", "triton", "reference", "fa3"]  # of calls on dense tensors
BACKENDS: tuple[str, ...] = get_args(BackendName)[1:]
DENSE_BACKENDS: tuple[str, ...] = get_args(DenseBackendName)[1:]


class AttentionParams(NamedTuple):
    """The options of attention: `ops.attention` makes them once, and backends and kernels take them whole.

    A new option is one field more, at the end, because kernels unpack this tuple; an argument of `ops.attention`; one of the torch op's
    schema (`_torch_ops.py`); and the code of the kernels that serve it.

        out = softmax(mask(softcap(softmax_scale * q k^T))) v

    Attributes:
        cu_seqlens_q: `[num_seqs + 1]` int32, where each sequence's queries begin among all T. None: every sequence has T / num_seqs.
        max_seqlen_q: the most queries of any sequence. It must not be less: rows would stay unwritten.
        causal: query i of n sees the keys up to its own position, `cache_seqlens - n + i`; otherwise all keys of its sequence.
        softmax_scale: what scores are multiplied by.
        window: a query sees its own position and the `window - 1` positions before it; 0: no window.
        softcap: scores become `softcap * tanh(score / softcap)` (Gemma 2); 0: no cap.
        sinks: `[num_q_heads]` logits, one more column of every row's softmax, without a value (gpt-oss).
        leftpad_k: `[num_seqs]` int32, how many of a sequence's first tokens are padding, which no query sees.
        rope_cos, rope_sin: `[T, R / 2]`: apply RoPE to the queries first, and round them to their dtype.
        rope_interleaved: channel pairs are `(0, 1), (2, 3), ...`; otherwise `(0, R/2), (1, R/2 + 1), ...`.
        return_lse: also return the natural logarithm of the softmax's denominator, sinks included.
    """

    cu_seqlens_q: torch.Tensor | None
    max_seqlen_q: int
    causal: bool
    softmax_scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    leftpad_k: torch.Tensor | None = None
    rope_cos: torch.Tensor | None = None
    rope_sin: torch.Tensor | None = None
    rope_interleaved: bool = False
    return_lse: bool = False
