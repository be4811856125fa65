"""fp8attn in vLLM: 8-bit pages instead of vLLM's KV cache.

    vllm serve MODEL --kv-cache-dtype fp8 --attention-backend CUSTOM

vLLM finds `register` by the entry point `vllm.general_plugins` of this package, and calls it in each of its processes. A block of vLLM is a
page of fp8attn: one run of bytes that depends on its 128 tokens alone. So prefix caching, offloading and transfers move blocks as bytes.

| file | what |
|---|---|
| `__init__.py` | `register` |
| `backend.py` | what vLLM asks before the start |
| `supported.py`, `refused.py` | which models and options are not supported, and why; other releases of vLLM |
| `specs.py` | the bytes of a block, which vLLM's releases are told in different ways |
| `metadata.py` | the sequences of a step, decodes first |
| `impl.py` | the step of a layer: append, then attention |
| `options.py` | options from `--additional-config` |
| `biases.py` | static means from a model's biases |
| `metrics.py` | counts of overflows among vLLM's metrics |
| `warm.py` | kernels, compiled before the first request |

Importing this module, `options.py` or `refused.py` does not import vLLM.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import re

from ...extras import needs

OLDEST, NEWEST = (0, 26), (0, 33)  # releases of vLLM that were run; docs/vllm.md says how
ON_CPU = "FP8ATTN_VLLM_CPU"  # an environment variable, see `register`

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the attention backend with vLLM: as `CUSTOM`, and as `FP8ATTN` in releases that take new names.

    vLLM's platform for CPUs has one attention backend and takes no other by name. If the environment variable `FP8ATTN_VLLM_CPU` is 1, this
    backend replaces it, with the slow backend `reference`; for tests.

    A release of vLLM that was not run is refused by name when the backend is chosen.
    """
    with needs("vllm"):
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = f"{__name__}.backend.FP8AttentionBackend"
    if (reason := unsupported_release(vllm_version())) is not None:
        logger.debug(reason)
        path = f"{__name__}.refused.RefusedBackend"
    register_backend(AttentionBackendEnum.CUSTOM, path)
    if hasattr(AttentionBackendEnum, "register"):  # from vLLM 0.32
        register_backend("FP8ATTN", path)
    if os.environ.get(ON_CPU) == "1":
        if reason is not None:
            raise RuntimeError(reason)
        register_backend(AttentionBackendEnum.CPU_ATTN, path)


def vllm_version() -> str:
    """The version of the installed vLLM."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # the build for CPUs has another name
        from vllm import __version__

        return __version__


def unsupported_release(version: str) -> str | None:
    """Why this release of vLLM is refused, or None.

    Newer ones are refused instead of warned about: what changes in vLLM (the order of a step's sequences, what a length or a table's entry
    means, who writes K and V) would give wrong answers without an error, and a warning in a server's log does not stop them.
    """
    found = re.match(r"(\d+)\.(\d+)(?!.*dev)", version)  # development versions are on the way to the next release
    if found is not None and OLDEST <= (int(found[1]), int(found[2])) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return f"fp8attn works in vLLM {oldest} to {newest}, and this is vLLM {version}: install one of these, or leave out --attention-backend"
