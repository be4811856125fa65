"""KV connectors, which bring blocks of other engines: which are refused, and with which pages need a mark
(`engine/marks.py`).
"""

from __future__ import annotations

from typing import Any

from ...formats.page_layout import PAGE_SIZE

LMCACHE = (
    'pass "kv_connector": "LMCachePagesConnector", "kv_connector_module_path": "fp8attn.integrations.vllm.lmcache"'
)


def connectors(config: Any) -> list[tuple[str | None, dict[str, Any]]]:
    """The name and the options of each KV connector in vLLM's configuration."""
    transfer = config.kv_transfer_config
    if transfer is None or transfer.kv_connector is None:
        return []
    options = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector != "MultiConnector":
        return [(transfer.kv_connector, options)]
    parts = options.get("connectors", ())
    return [(part.get("kv_connector"), part.get("kv_connector_extra_config") or {}) for part in parts]


def unsupported_connector(config: Any) -> str | None:
    """Why a KV connector cannot move pages, or None."""
    names = [name for name, _ in connectors(config)]
    if "LMCacheConnectorV1" in names:
        return (
            f"LMCacheConnectorV1 moves tokens of 2 * head_dim values, and a page is one run of bytes for 128 tokens: "
            f"{LMCACHE}"
        )
    if "LMCacheMPConnector" in names:
        return (
            f"LMCacheMPConnector moves 2 * head_dim + 1 bytes of a token apart, which its kernels for GPUs cannot: "
            f"{LMCACHE}"
        )
    if "ExampleConnector" in names and config.cache_config.block_size > PAGE_SIZE:
        return (
            f"ExampleConnector cannot move blocks that a kernel reads in parts of {PAGE_SIZE} tokens: leave out "
            f"--block-size"
        )
    return None


def exchanges_blocks(config: Any) -> bool:
    """Whether another engine may have written blocks. Those offloaded to the CPU's memory come from this one."""
    to_the_cpu = "CPUOffloadingSpec"
    return any(
        name != "SimpleCPUOffloadConnector"
        and (name != "OffloadingConnector" or options.get("spec_name", to_the_cpu) != to_the_cpu)
        for name, options in connectors(config)
    )
