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
        and (name != "OffloadingConnector" or own.get("spec_name", to_the_cpu) != to_the_cpu)
        for name, own in connectors(config)
    )
