"""fp8attn in SGLang: 8-bit pages instead of SGLang's KV cache.

    python -m sglang.launch_server --model-path MODEL --attention-backend fp8attn

SGLang finds `register` by the entry point `sglang.srt.plugins` of this distribution, `fp8attn-sglang`, and calls it in
each of its processes. What any engine needs is in `fp8attn.integrations.engine`.
A page of SGLang's allocator is a page of fp8attn for each KV head: one run of bytes that depends on its 128 tokens
alone. So the radix cache shares pages.

| file | what |
|---|---|
| `__init__.py` | `register`: what SGLang gets, and in which releases |
| `supported.py` | which models and options are not supported, and why |
| `options.py` | options from an environment variable |
| `pool.py` | the pages of all layers, and the bytes of a token |
| `layers.py` | SGLang's attention layers as layers of `fp8attn.integrations.engine` |
| `backend.py` | the attention backend: the sequences of a step, also of CUDA graphs, then append and attention |

Importing this module, `options.py` or `supported.py` does not import SGLang.
"""

from __future__ import annotations

import importlib.metadata
import logging
import re
from collections.abc import Callable
from typing import Any

from fp8attn import UsageError
from fp8attn.formats.page_layout import PAGE_SIZE
from fp8attn.formats.spec import PageSpec

from .options import environment_options
from .supported import NAME, is_chosen, unsupported_model, unsupported_options

RELEASE = "0.5.23"  # of SGLang, which was run; docs/sglang.md says how
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._resolve_kv_pool_class"
_CELL_SIZE = "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator._compute_cell_size"

logger = logging.getLogger(__name__)


def register() -> None:
    """Register the attention backend `fp8attn` with SGLang, its pool of pages, and what is refused. It may be called
    again.

    In a release of SGLang that was not run, nothing is registered and a warning says so. SGLang then refuses the name
    of the backend.
    """
    if (reason := unsupported_release(importlib.metadata.version("sglang"))) is not None:
        logger.warning(reason)
        return
    from sglang.srt.arg_groups.choices import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if NAME in ATTENTION_BACKEND_CHOICES:
        return
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_make_backend)
    register_resolution_hook("handle_attention_backend_compatibility")(_set_what_pages_need)
    register_resolution_hook("handle_other_validations")(_refuse)
    HookRegistry.register(_CONFIGURATOR, _pool_class, HookType.AROUND)
    HookRegistry.register(_CELL_SIZE, _cell_size, HookType.AROUND)


def unsupported_release(version: str) -> str | None:
    """Why this release of SGLang is refused, or None. What changes in SGLang could give wrong answers
    without an error.
    """
    if re.fullmatch(re.escape(RELEASE) + r"(\.post\d+|\+.*)?", version):
        return None
    return (
        f"fp8attn works in SGLang {RELEASE}, and this is SGLang {version}, where --attention-backend {NAME} is not "
        f"known: install {RELEASE}, or use another backend"
    )


def _make_backend(runner: Any) -> Any:
    from .backend import FP8AttentionBackend

    return FP8AttentionBackend(runner)


def _set_what_pages_need(server_args: Any, previous: Callable[[Any], None]) -> None:
    """While SGLang resolves its options: pages of 128 tokens if the user has chosen none, and no CUDA graphs of
    prompts.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolved_view

    previous(server_args)
    options = resolved_view(server_args)
    if not is_chosen(options):
        return
    if options.page_size is None:
        declare_resolution(server_args, NAME, page_size=PAGE_SIZE)
    if (
        options.cuda_graph_config is not None
        and (graphs := supported_graphs(options.cuda_graph_config)) != options.cuda_graph_config
    ):
        declare_resolution(server_args, NAME, cuda_graph_config=graphs)


def supported_graphs(graphs: Any) -> Any:
    """SGLang's options of CUDA graphs without those that fp8attn does not support, which a warning names."""
    from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, with_phase

    if graphs.decode.backend == Backend.FULL:
        logger.warning(
            "fp8attn: its CUDA graphs of decodes have never run on a GPU in SGLang; --disable-decode-cuda-graph turns "
            "them off"
        )
    for phase, supported in ((Phase.DECODE, (Backend.FULL, Backend.DISABLED)), (Phase.PREFILL, (Backend.DISABLED,))):
        if (backend := graphs[phase].backend) not in supported:
            logger.warning(
                f"fp8attn: CUDA graphs of the form {backend} are disabled for {phase}: fp8attn does not support them "
                f"in SGLang"
            )
            graphs = with_phase(graphs, phase, backend=Backend.DISABLED)
    return graphs


def _refuse(server_args: Any, previous: Callable[[Any], None]) -> None:
    """After SGLang has resolved its options, before it starts a process: raise UsageError if something is not
    supported.
    """
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view
    from sglang.srt.configs.hybrid_arch import mambaish_config

    previous(server_args)
    options = resolved_view(server_args)
    if not is_chosen(options):
        return
    environment_options()  # raises UsageError
    reason = unsupported_options(options)
    if reason is None:
        model = model_config_of(server_args)
        reason = unsupported_model(model, mambaish_config(model) is not None)
    if reason is not None:
        raise UsageError(f"fp8attn cannot serve this model: {reason}")


def _pool_class(original: Callable[..., type], configurator: Any, *, kind: str, default: type) -> type:
    """The class of SGLang's pool for keys and values of heads."""
    if kind != "mha" or not _is_chosen_here():
        return original(configurator, kind=kind, default=default)
    from .pool import FP8PagePool

    return FP8PagePool


def _cell_size(original: Callable[..., int], pool_configurator: Any, configurator: Any, num_layers: int) -> int:
    """The bytes of a token in all layers, by which SGLang divides its memory."""
    if not _is_chosen_here():
        return original(pool_configurator, configurator, num_layers)
    from sglang.srt.runtime_context import get_parallel

    model, parallel = configurator.model_config, get_parallel()
    return (
        num_layers
        * model.get_num_kv_heads(parallel.attn_tp_size, parallel.attn_dcp_size)
        * PageSpec.of(model.head_dim).layout.token_bytes
    )


def _is_chosen_here() -> bool:
    """Whether this process's SGLang runs with this backend. Other choices for prefill or decode are refused before."""
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().kernel.attention_backend == NAME)
