"""Blocks of other engines, which a KV connector brings: which connectors, and the mark that tells formats apart.

The bytes of a block depend on its tokens, and on what is static in an engine: the type of keys, means, static scales. vLLM compares none of
these when engines exchange blocks. So every page has a mark of them in its header, which is written once at the start and moves with the
page. A step whose pages have another mark ends the engine.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ...formats.page_layout import engine_marks_of
from .biases import identity
from .options import Options

FORMAT = 1  # of pages; another layout of their bytes has another number


def connectors(config: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """The name and the own options of each KV connector in vLLM's configuration."""
    given = config.kv_transfer_config
    if given is None or given.kv_connector is None:
        return []
    own = given.kv_connector_extra_config or {}
    if given.kv_connector != "MultiConnector":
        return [(given.kv_connector, own)]
    return [(one.get("kv_connector"), one.get("kv_connector_extra_config") or {}) for one in own.get("connectors", ())]


def unsupported_connector(config: Any) -> str | None:
    """Why a KV connector cannot move pages, or None."""
    if any(name == "LMCacheConnectorV1" for name, _ in connectors(config)):
        return (
            "LMCacheConnectorV1 moves tokens of 2 * head_dim values, and a page is one run of bytes for 128 tokens and their scales. Use "
            "LMCacheMPConnector, which moves whole blocks"
        )
    return None


def exchanges_blocks(config: Any) -> bool:
    """Whether blocks may be of another engine. What is offloaded to the own CPU's memory is not."""
    to_the_cpu = "CPUOffloadingSpec"
    return any(
        name != "SimpleCPUOffloadConnector" and (name != "OffloadingConnector" or own.get("spec_name", to_the_cpu) != to_the_cpu)
        for name, own in connectors(config)
    )


@lru_cache(maxsize=1)
def mark_of(options: Options, model: str, revision: str | None, context: int) -> int:
    """The mark of an engine's pages: 63 bits, not zero.

    Args:
        options: of the engine.
        model, revision, context: as of `biases.means_of`, which determine the means if there is no file of scales.
    """
    means = identity(model, revision, context) if options.scales is None else Path(options.scales).read_bytes()
    found = hashlib.sha256(repr((FORMAT, options.key_dtype, options.static_scales)).encode() + means).digest()
    return int.from_bytes(found[:8], "little") >> 1 or 1


def check_marks(pool: torch.Tensor, page_table: torch.Tensor, mark: int) -> None:
    """Raise RuntimeError if a page of the table has another mark.

    A GPU raises it later, by an assertion on the device, because the check does not wait. No result of the step arrives then.

    Args:
        pool: a layer's pages, as of `KVPages`.
        page_table: `[num_seqs, max_pages]` int32. Entries past a sequence's length name any page, or none (-1).
    """
    taken = engine_marks_of(pool)[:, 0].index_select(0, page_table.clamp_min(0).flatten())
    # No public function of torch asserts without waiting for the device.
    torch._assert_async(
        (taken == mark).all(),
        "fp8attn: a KV connector brought blocks of another format. Engines that exchange blocks must have the same options of fp8attn "
        "(key_dtype, static_scales, scales), model, --max-model-len and page format; give this engine another store, or equal options",
    )
