"""An engine of `vllm`, in a process of its own."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import re
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from .vllm_models import MODELS, SMALL, TINY, VOCABULARY, prepare

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "2", "VLLM_CPU_KVCACHE_SPACE": "1",
}  # fmt: skip
OPTIONS = {
    "vllm-bf16": {}, "vllm-fp8": {"kv_cache_dtype": "fp8"},
    "fp8attn": {"kv_cache_dtype": "fp8", "attention_backend": "CUSTOM"},
    **{f"vllm-{kind}-per-token-head": {"kv_cache_dtype": f"{kind}_per_token_head"} for kind in ("int8", "fp8", "int4")},
    "vllm-flashmla": {"attention_backend": "FLASHMLA"},
    "vllm-flashmla-fp8": {"kv_cache_dtype": "fp8", "attention_backend": "FLASHMLA"},
}  # fmt: skip
LONGEST = 768 if TINY else 36864  # 288 pages: kernels like tables of 16 columns
GRAPHS = (1, 2, 4, 8, 16, 64, 72)  # sequences of steps that have a CUDA graph; the next larger one serves others
CHUNK = 256 if TINY else 8192  # tokens of a prompt that vLLM takes in a step
LOOKED_AT, LIKELIEST = 8, 20  # tokens of a request that is alone and among others, and of each step
COMPARED = (200, 40) if TINY else (2500, 300)  # tokens of the prompts whose log-probabilities are compared
OUR_KERNELS = (
    r"_?(latent_)?(decode|prefill|combine|page|step|rows|scales|statistics|portable|append|queries|attention)_kernel\b"
    r"|latent_kernel\b"
)
ATTENTION = (
    OUR_KERNELS
    + r"|.*(flash|fmha|(reshape|concat)_(and_)?cache|varlen_num_blocks|unified_attention|reduce_segments|_attn_packed"
    + r"|hadamard)"
)

_llm: Any = None  # of this process
_tokens = range(2, VOCABULARY)  # of prompts
FEW_TOKENS = range(2, 66)  # of prompts and answers with drafts by n-grams, which then always find some


def serve(request: str, *arguments: Any) -> Any:
    """Answer a request of `vllm.Engines`: the name of a function of `ANSWERS`, and its arguments."""
    return ANSWERS[request](*arguments)


def start(model: str, impl: str, folder: str, log: str, most: int, long: int, drafts: int) -> float:
    """Start the engine. Returns the seconds that it took.

    Args:
        folder: of the plugin.
        log: the file for all that the engine prints.
        most: sequences of a step.
        long: tokens of the longest prompt, if it is longer than `LONGEST`.
        drafts: of each sequence in a step.
    """
    global _llm, _tokens
    begun = time.perf_counter()
    with open(log, "wb") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"  # also of the processes that vLLM starts
    own = {"FP8ATTN_VLLM_CPU": str(int(impl == "fp8attn")), "VLLM_CACHE_ROOT": f"{folder}/{impl}", "PYTHONPATH": path}
    os.environ.update(ENVIRONMENT | own)
    sys.path.insert(0, folder)
    shape = MODELS[model]
    caches_latents = "kv_lora_rank" in shape
    graphs = [size for size in GRAPHS if size <= most or size == min(x for x in GRAPHS if x >= most)]
    if TINY:
        shape = shape | SMALL | {key: kinds[:6] for key, kinds in shape.items() if key == "layer_types"}
    config = Path(tempfile.mkdtemp(dir=folder))
    (config / "config.json").write_text(json.dumps(shape))
    prepare(model, impl)
    import torch
    from vllm import LLM

    on_gpu = torch.cuda.is_available()
    bytes_16 = (19 if long else 10) << 30  # of K and V; given, because other engines use the memory, too
    options = OPTIONS[impl] | {"gpu_memory_utilization": 0.05}
    if caches_latents and impl == "fp8attn":
        options["attention_backend"] = "FP8ATTN_MLA"
    options["kv_cache_memory_bytes"] = bytes_16 * 5 // 8 if "kv_cache_dtype" in options else bytes_16
    if drafts:
        _tokens = FEW_TOKENS
        options["speculative_config"] = {
            "method": "ngram", "num_speculative_tokens": drafts, "prompt_lookup_min": 1, "prompt_lookup_max": 1
        }  # fmt: skip
        graphs = [size * (drafts + 1) for size in graphs]
    if on_gpu:
        from triton.backends.nvidia.compiler import get_ptxas_version

        get_ptxas_version(
            90
        )  # kept for the keys of all kernels: torch.compile sets another ptxas, and `compile_kernels` has this one
    else:
        kept = ("kv_cache_dtype", "speculative_config")  # the plugin replaces the CPU's backend
        options = {name: options[name] for name in kept if name in options}
    _llm = LLM(
        str(config), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
        max_num_seqs=graphs[-1] // (drafts + 1),
        # Beside the steps of others, too, chunks of latents are of CHUNK tokens: a chunk attends to what is stored of
        # the tokens before it.
        max_num_batched_tokens=CHUNK + graphs[-1] if caches_latents else CHUNK,
        long_prefill_token_threshold=CHUNK if caches_latents else 0,
        max_model_len=max(LONGEST, long + 2048), enable_prefix_caching=caches_latents, enforce_eager=not on_gpu,
        compilation_config={"cudagraph_capture_sizes": graphs} if on_gpu
        else {"custom_ops": ["-rotary_embedding"]} if caches_latents else {},
        **options,
    )  # fmt: skip
    gc.collect()
    gc.freeze()  # what the engine has made is not searched while something is timed
    return time.perf_counter() - begun


def compile_kernels(model: str) -> int:
    """Compile our kernels of a model, beside the start of the engines, which wait for this lock.
    Returns their number.
    """
    import triton
    from filelock import FileLock

    from fp8attn import PageSpec, precompile
    from fp8attn.integrations.vllm.specs import KEYS_PAGES
    from fp8attn.precompile.calls import MOST, Layer

    folder = Path(triton.knobs.cache.dir)
    folder.mkdir(parents=True, exist_ok=True)
    shape = MODELS[model]
    heads, kv_heads, head_dim = (shape[name] for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    full = shape.get("num_global_key_value_heads", kv_heads), shape.get("global_head_dim", head_dim)
    if "attention_k_eq_v" in shape:
        full = full[0], KEYS_PAGES
    longest = MOST
    if "kv_lora_rank" in shape:  # prompts do not attend to latents
        full, longest = (1, PageSpec.latent(shape["kv_lora_rank"], shape["qk_rope_head_dim"])), 1
    layers = [Layer(heads, *full, backend="auto", advance=False, longest=longest)]
    if "sliding_window" in shape:
        windows = frozenset({"window"})
        layers.append(Layer(heads, kv_heads, head_dim, backend="auto", advance=False, attention=windows))
    with FileLock(folder / "fp8attn.lock"):
        return len(precompile.compile_kernels(layers, "cuda"))


def check() -> tuple[list[float], list[int]]:
    """Log-probabilities of prompts and of eight greedy tokens, and these tokens."""
    logprobs, tokens = [], []
    asked = [prompt(length, 0) for length in COMPARED]
    for found in _llm.generate(asked, sampling(8, prompt_logprobs=0, logprobs=0), use_tqdm=False):
        answer = found.outputs[0]
        made, steps = [*found.prompt_token_ids[1:], *answer.token_ids], [*found.prompt_logprobs[1:], *answer.logprobs]
        logprobs += [step[token].logprob for token, step in zip(made, steps, strict=True)]
        tokens += answer.token_ids
    assert all(map(math.isfinite, logprobs)), "log-probabilities are not finite"
    print(f"the deviation of log-probabilities is {statistics.pstdev(logprobs):.3f}", flush=True)
    return logprobs, tokens


def alone_and_among(batch: int, length: int) -> list[list[tuple[int, dict[int, float]]]]:
    """The first greedy tokens of a request that is alone, and of the same one beside `batch - 1` that make tokens
    meanwhile; each with the log-probabilities of the likeliest tokens at its step.
    """
    answers = []
    for others in (0, batch - 1):
        _llm.reset_prefix_cache()
        names = [f"{batch}-{length}-{seq}" for seq in range(others)]
        for seq, name in enumerate(names):
            steps = batch * -(-length // CHUNK) + 2 * LOOKED_AT  # of all prompts, and of this request
            _llm.llm_engine.add_request(name, prompt(length, seq + 1), sampling(steps))
        if others:
            _step(others)
        _llm.llm_engine.add_request("looked at", prompt(length, 0), sampling(LOOKED_AT, logprobs=LIKELIEST))
        answer = None
        while answer is None:
            ended = [one for one in _llm.llm_engine.step() if one.request_id.startswith("looked at") and one.finished]
            answer = ended[0].outputs[0] if ended else None
        _llm.llm_engine.abort_request(names)
        finish()
        answers.append(_likeliest(answer))
    return answers


def _likeliest(answer: Any) -> list[tuple[int, dict[int, float]]]:
    """An answer's tokens, each with the log-probabilities of the likeliest tokens at its step."""
    steps = zip(answer.token_ids, answer.logprobs, strict=True)
    return [(token, {other: x.logprob for other, x in step.items()}) for token, step in steps]


def again(length: int) -> tuple[list, list, int]:
    """The first greedy tokens of a request, and of the same one when the prefix cache has its prompt, as `_likeliest`
    has them; and the tokens that were found there (on a CPU none: vLLM turns the cache off for latents).
    """
    _llm.reset_prefix_cache()
    wanted = sampling(LOOKED_AT, logprobs=LIKELIEST)
    first, second = (_llm.generate([prompt(length, 0)], wanted, use_tqdm=False)[0] for _ in range(2))
    return _likeliest(first.outputs[0]), _likeliest(second.outputs[0]), second.num_cached_tokens


def prompt(length: int, seed: int) -> dict:
    draw = random.Random(f"{seed}-{length}")
    return {"prompt_token_ids": draw.choices(_tokens, k=length)}


def sampling(tokens: int, **more: Any) -> Any:
    from vllm import SamplingParams

    allowed = list(_tokens) if _tokens is FEW_TOKENS else None
    return SamplingParams(
        temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, allowed_token_ids=allowed, **more
    )


def timed_prompt(length: int, turn: int) -> float:
    """Milliseconds of a prompt to its first token."""
    asked, wanted = [prompt(length, turn)], sampling(1)
    _llm.reset_prefix_cache()
    begun = time.perf_counter()
    _llm.generate(asked, wanted, use_tqdm=False)
    return 1e3 * (time.perf_counter() - begun)


def begin(batch: int, length: int, tokens: int) -> bool:
    """Take prompts, until each makes tokens. A sequence ends after `tokens`, and as many as the first may have made by
    then.
    """
    wanted = sampling(tokens + batch * -(-length // CHUNK))
    for seq in range(batch):
        _llm.llm_engine.add_request(f"{batch}-{length}-{seq}", prompt(length, seq), wanted)
    _step(batch)
    return True


def _step(batch: int) -> float:
    """When the next step is over in which every sequence makes a token.

    Raises:
        RuntimeError: some have ended, before or because the cache has no room for all.
    """
    while len(_llm.llm_engine.step()) < batch:
        if _llm.llm_engine.get_num_unfinished_requests() < batch:
            raise RuntimeError(f"of {batch} sequences some have ended, and never did all make a token in one step")
    return time.perf_counter()


def timed_steps(batch: int, count: int, turn: int) -> list[float]:
    """Milliseconds of steps, but for the first of a turn, before which the engine waited."""
    return [1e3 * (after - before) for before, after in pairwise([_step(batch) for _ in range(count)])]


def finish() -> bool:
    while _llm.llm_engine.has_unfinished_requests():
        _llm.llm_engine.step()
    return True


def profile(request: str, *arguments: Any) -> dict[str, float]:
    """Milliseconds of kernels in a request, or in a step of it, by torch's profiler. Without a GPU it is empty."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    if not torch.cuda.is_available():
        serve(request, *arguments)
        return {}
    with profiled(activities=[ProfilerActivity.CUDA]) as found:
        answer = serve(request, *arguments)
        torch.cuda.synchronize()
    calls = len(answer) + 1 if isinstance(answer, list) else 1
    events = [
        event
        for event in found.events()
        if not event.name.startswith(("Memcpy", "Memset", "gpu_")) and event.device_time > 0
    ]
    kernels = {}
    for event in events:
        kernels[event.name] = kernels.get(event.name, 0) + event.device_time / 1e3 / calls
    longest = sorted(kernels.items(), key=lambda item: -item[1])[:14]
    print({name[:90]: round(ms, 4) for name, ms in longest}, flush=True)
    span = max(event.time_range.end for event in events) - min(event.time_range.start for event in events)
    return {
        "kernels_ms": round(sum(kernels.values()), 4),
        "attention_ms": round(sum(ms for name, ms in kernels.items() if re.match(ATTENTION, name)), 4),
        "span_ms": round(span / 1e3 / calls, 4),
    }


ANSWERS = {
    "start": start, "check": check, "prompt": timed_prompt, "begin": begin, "steps": timed_steps, "finish": finish,
    "profile": profile, "alone and among": alone_and_among, "again": again,
}  # fmt: skip
