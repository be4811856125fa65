"""fp8attn in vLLM: 8-bit pages instead of vLLM's KV cache.

    vllm serve MODEL --kv-cache-dtype fp8 --attention-backend CUSTOM        # FP8ATTN_MLA for models with latents

vLLM finds `register` by the entry point `vllm.general_plugins` of this package, and calls it in each of its processes.
A block of vLLM is a page of fp8attn, or several: one run of bytes that depends on its tokens alone. So prefix caching,
offloading and transfers move blocks as bytes.

| file | what |
|---|---|
| `__init__.py` | `register`, and the releases of vLLM that are refused |
| `backend.py` | what vLLM asks before the start |
| `supported.py` | which models and options are not supported, and why |
| `connectors.py` | blocks of other engines: which KV connectors |
| `lmcache.py` | LMCache's KV connector, with whole blocks |
| `specs.py` | the bytes of a block |
| `metadata.py` | the sequences of a step |
| `impl.py` | a layer |
| `k_eq_v.py` | layers whose keys follow from their values (Gemma 4) |
| `latent.py` | latent attention (MLA): its backend, metadata and layers |
| `options.py` | options from `--additional-config` |

What another engine would need, too, is in `integrations/engine/`. Importing this module or `options.py` does not
import vLLM.
"""

from __future__ import annotations

import copyreg
import importlib.metadata
import logging
import os
import re
from functools import cache
from typing import Any

from ...extras import needs
from .. import engine

OLDEST, NEWEST = (0, 28), (0, 33)  # releases of vLLM that were run; docs/vllm.md says how
ON_CPU = "FP8ATTN_VLLM_CPU"  # an environment variable, see `register`

# In releases of vLLM that take new names, from 0.32 on; the others have CUSTOM, which is for keys and values.
NAME = "FP8ATTN"
LATENT_NAME = "FP8ATTN_MLA"

logger = logging.getLogger(f"vllm.{__name__}")  # vLLM shows the messages of its own loggers only


def register() -> None:
    """Register the attention backends with vLLM: that of keys and values as `CUSTOM`, and in releases that take new
    names as `FP8ATTN`, and that of latents as `FP8ATTN_MLA`. It may be called again.

    vLLM's platform for CPUs takes no attention backend by name. If the environment variable `FP8ATTN_VLLM_CPU` is 1,
    these replace its own, with the slow backend `reference`; for tests. Otherwise a warning says that fp8attn is not
    used there.

    A release of vLLM that was not run is refused by name when the backend is chosen.
    """
    with needs("vllm"):
        from vllm.platforms import current_platform
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    path = latents = f"{__name__}.backend.FP8AttentionBackend"
    takes_names = hasattr(AttentionBackendEnum, "register")  # from vLLM 0.32
    if takes_names:
        latents = f"{__name__}.latent.FP8LatentBackend"
    if (reason := unsupported_release(vllm_version())) is not None:
        logger.debug(reason)
        path = latents = f"{__name__}.RefusedBackend"
    _show_messages()
    register_backend(AttentionBackendEnum.CUSTOM, path)
    if takes_names:
        for name, backend in ((NAME, path), (LATENT_NAME, latents)):
            # A name can be made once, and replaced any time.
            register_backend(AttentionBackendEnum.__members__.get(name, name), backend)
        copyreg.pickle(AttentionBackendEnum, _pickled)
    if not current_platform.is_cpu():
        return
    on_cpu = os.environ.get(ON_CPU) == "1"
    if on_cpu:
        if reason is not None:
            raise RuntimeError(reason)
        for name, backend in (("CPU_ATTN", path), ("CPU_MLA", latents), ("AMX_MLA", latents)):
            if name in AttentionBackendEnum.__members__:
                register_backend(AttentionBackendEnum[name], backend)
    _say_what_cpus_use(on_cpu)


class _ToVLLM(logging.Handler):
    """Passes messages on to loggers of vLLM, which shows no others. It may configure them later than plugins are
    loaded.
    """

    def emit(self, record: logging.LogRecord) -> None:
        theirs = logging.getLogger(f"vllm.{record.name}")
        if theirs.isEnabledFor(record.levelno):
            theirs.handle(record)


def _show_messages() -> None:
    """Show what `integrations/engine` logs."""
    ours = logging.getLogger(engine.__name__)
    ours.handlers, ours.propagate = [_ToVLLM()], False
    ours.setLevel(logging.DEBUG)


def _pickled(member: Any) -> Any:
    """How `AttentionBackendEnum` is pickled for a new process. The process reads vLLM's config before it calls
    `register`.
    """
    return (_registered, (member.name,)) if member.name in (NAME, LATENT_NAME) else member.__reduce_ex__(2)


def _registered(name: str) -> Any:
    """A member of `AttentionBackendEnum` that `register` makes."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if name not in AttentionBackendEnum.__members__:
        register()
    return AttentionBackendEnum[name]


@cache  # once in a process
def _say_what_cpus_use(on_cpu: bool) -> None:
    if on_cpu:
        logger.warning(
            "fp8attn: %s=1, so attention runs in fp8attn's backend reference, which is slow and made for tests", ON_CPU
        )
    else:
        logger.warning(
            "fp8attn is installed and not used: vLLM ignores --attention-backend on a CPU, and its own FP8 cache has a "
            "scale of 1.0, which loses accuracy. For a test of fp8attn set %s=1; otherwise leave out --kv-cache-dtype "
            "fp8", ON_CPU,
        )  # fmt: skip


def vllm_version() -> str:
    """The version of the installed vLLM."""
    try:
        return importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:  # the build for CPUs has another name
        from vllm import __version__

        return __version__


def unsupported_release(version: str) -> str | None:
    """Why this release of vLLM is refused, or None.

    Newer ones are refused instead of warned about: what changes in vLLM (the order of a step's sequences, what a length
    or a table's entry means, who writes K and V) would give wrong answers without an error, and a warning in a server's
    log does not stop them.
    """
    release = re.match(r"(\d+)\.(\d+)(?!.*dev)", version)  # development versions are on the way to the next release
    if release is not None and OLDEST <= (int(release[1]), int(release[2])) <= NEWEST:
        return None
    oldest, newest = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    return (
        f"fp8attn works in vLLM {oldest} to {newest}, and this is vLLM {version}: install one of these, or leave out "
        f"--attention-backend"
    )


class RefusedBackend:
    """The attention backend in a release of vLLM that is refused. It has no base class of vLLM, whose parts may have
    moved.
    """

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        return cls.__module__, cls.__qualname__

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        """The reason, whatever the options are. vLLM prints it and does not start."""
        return [unsupported_release(vllm_version()) or "this release of vLLM is supported; import fp8attn again"]
