"""Long sequences without padding, to calibrate on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from transformers import PreTrainedConfig

from fp8attn.errors import UsageError
from fp8attn.integrations.transformers.config import decoder_config

LONGEST = 32768  # tokens of a sequence, at most, if the model's context is longer


def pack_tokens(
    documents: Iterable[Sequence[int] | torch.Tensor], length: int, *, separator: int | None = None
) -> Iterator[torch.Tensor]:
    """Concatenate token ids of documents, and cut them into sequences of one length: batches for `calibrate`, without
    padding.

    Args:
        documents: token ids of each; any iterable. Only one sequence is in memory.
        length: tokens of a sequence (`context_of`).
        separator: a token id between two documents, such as `tokenizer.eos_token_id`; None: no token.
    Returns:
        `input_ids [1, length]`, one after another; the last one has the tokens that are left.
    Raises:
        UsageError: the length is less than 1, or a document is no sequence of ids.
    """
    if length < 1:
        raise UsageError(f"length must be a positive number of tokens; got {length}")
    held: list[int] = []
    for number, document in enumerate(documents):
        ids = document.tolist() if hasattr(document, "tolist") else document
        if not isinstance(ids, Sequence) or not all(isinstance(each, int) for each in ids):
            what = f"a tensor {list(document.shape)}" if isinstance(document, torch.Tensor) else type(document).__name__
            raise UsageError(
                f"document {number} must be token ids, one after another; got {what}. Pass each text's ids: "
                f"[tokenizer(text).input_ids for text in texts]"
            )
        held += ids if separator is None or not number else [separator, *ids]
        whole = len(held) - len(held) % length
        for begin in range(0, whole, length):
            yield torch.tensor(held[begin : begin + length])[None]
        del held[:whole]
    if held:
        yield torch.tensor(held)[None]


def context_of(config: PreTrainedConfig, longest: int = LONGEST) -> int:
    """Tokens of a sequence to calibrate on: the model's context, at most `longest`."""
    return min(getattr(decoder_config(config), "max_position_embeddings", None) or longest, longest)
