"""Blocks of other engines: the mark that tells formats apart.

The bytes of a block depend on its tokens, and on what is static in an engine: the type of keys, means, static scales.
Engines compare none of these when they exchange blocks. So every page has a mark of them in its header, which is
written once at the start and moves with the page. A step whose pages have another mark ends the engine.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import torch

from ...formats.page_layout import engine_marks_of
from .options import Options
from .static import ServedModel

FORMAT = 1  # of pages; another layout of their bytes has another number


@lru_cache(maxsize=1)
def mark_of(options: Options, model: ServedModel) -> int:
    """The mark of an engine's pages: 63 bits, not zero.

    Args:
        model: which determines the means if there is no file of scales.
    """
    if options.scales is None:
        from .biases import means_digest  # it needs transformers

        means = means_digest(model.name, model.revision, model.context)
    else:
        means = Path(options.scales).read_bytes()
    digest = hashlib.sha256(repr((FORMAT, options.key_dtype, options.static_scales)).encode() + means).digest()
    return int.from_bytes(digest[:8], "little") >> 1 or 1


def check_marks(pool: torch.Tensor, page_table: torch.Tensor, mark: int) -> None:
    """Raise RuntimeError if a page of the table has another mark.

    A GPU raises it later, by an assertion on the device, because the check does not wait. No result of the step arrives
    then.

    Args:
        pool: a layer's pages, as of `KVPages`.
        page_table: `[num_seqs, max_pages]` int32. Entries past a sequence's length name any page, or none (-1).
    """
    taken = engine_marks_of(pool)[:, 0].index_select(0, page_table.clamp_min(0).flatten())
    # No public function of torch asserts without waiting for the device.
    torch._assert_async(
        (taken == mark).all(),
        "fp8attn: a KV connector brought blocks of another format. Engines that exchange blocks must have the same "
        "options of fp8attn (key_dtype, static_scales, scales), model, context length and page format; give this "
        "engine another store, or equal options",
    )
