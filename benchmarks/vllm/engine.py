"""One engine: whether its answers are right, then the times of prompts and steps."""

import gc
import json
import math
import random
import re
import statistics
import tempfile
import time
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

from evidence import results

from .models import MODELS, SMALL, TINY, VOCABULARY, prepare

OURS = {"kv_cache_dtype": "fp8", "attention_backend": "CUSTOM"}
CACHES = {"bf16": {}, "ours": OURS, "fp8": {"kv_cache_dtype": "fp8"}}
PREFILLS = {300: 2} if TINY else {2048: 7, 8192: 5, 32768: 3}  # tokens: repetitions
DECODES = ((2, 300),) if TINY else ((16, 2048), (8, 8192), (4, 32768))  # sequences, tokens
LONG = {} if TINY else {"llama": 131072}  # models of a further prompt, and of a step with one sequence, of so many tokens
LONGEST = 768 if TINY else 36864  # 288 pages, or 32 of the blocks of 9 pages that hold a state: kernels like tables of 16 columns
CHUNK = 256 if TINY else 8192  # tokens of a prompt that vLLM takes in a step
STEPS, PROFILED = (12, 2) if TINY else (96, 8)
COMPARED = (200, 40) if TINY else (2500, 300)  # tokens of the prompts whose log-probabilities are compared
TOO_FAR = 1.0  # nats from BF16; two unrelated models are about 4 apart
OUR_KERNELS = r"_?(decode|prefill|combine|page|step|rows|scales|statistics|portable)_kernel\b"
ATTENTION = OUR_KERNELS + r"|.*(flash|fmha|reshape_and_cache|varlen_num_blocks)"


def engine(model, cache, out, write, turn):
    """Start, wait for the turn, measure.

    Args:
        out: the folder for log-probabilities.
        write: called with each row.
        turn: called when the engine has started, and returns when it may measure, how many engines are still starting.
    """
    begun = time.time()
    shape = MODELS[model]
    if TINY:
        shape = shape | SMALL | {key: kinds[:6] for key, kinds in shape.items() if key == "layer_types"}
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(shape))
    prepare(model, cache)
    import torch
    from vllm import LLM

    on_gpu = torch.cuda.is_available()
    options = CACHES[cache] | {"gpu_memory_utilization": 0.05}
    long = LONG.get(model, 0)
    bytes_16 = (19 if long else 8) << 30  # of K and V; given, because other engines use the memory, too
    options["kv_cache_memory_bytes"] = bytes_16 * 5 // 8 if "kv_cache_dtype" in options else bytes_16
    if on_gpu:
        from triton.backends.nvidia.compiler import get_ptxas_version

        get_ptxas_version(90)  # kept for the keys of all kernels: torch.compile sets another ptxas, and `run.py` compiles with this one
    else:
        options = {"kv_cache_dtype": "fp8"} if "kv_cache_dtype" in CACHES[cache] else {}  # the plugin replaces the CPU's backend
    llm = LLM(
        str(folder), load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0, max_num_seqs=16, max_num_batched_tokens=CHUNK,
        max_model_len=max(LONGEST, long + 2048), enable_prefix_caching=False, enforce_eager=not on_gpu,
        compilation_config={"cudagraph_capture_sizes": [1, 4, 8, 16]} if on_gpu else {}, mamba_ssm_cache_dtype="float32",
        additional_config={"gdn_prefill_backend": "triton"}, **options,  # not FlashInfer's kernel, which the machine lacks
    )  # fmt: skip
    started = round(time.time() - begun, 1)
    others = turn()
    cache_config = llm.llm_engine.vllm_config.cache_config
    facts = {"block": cache_config.block_size, "blocks": cache_config.num_gpu_blocks, "started_s": started, "others_starting": others}
    facts["versions"] = {name: version(name) for name in ("vllm", "torch", "triton")}
    facts["device"] = torch.cuda.get_device_name() if on_gpu else "CPU"
    facts["commit"] = results.commit()
    facts["runner"] = "V2" if llm.llm_engine.vllm_config.use_v2_model_runner else "V1"
    write({"case": "check"} | facts | check(llm, model, cache, out, write))
    gc.collect()
    gc.freeze()  # what the engine has made is not searched while something is timed
    for length, times in (PREFILLS | ({long: 1} if long else {})).items():
        write({"case": f"prefill-S{length}"} | guarded(prefill, llm, length, times))
    for batch, length in (*DECODES, *([(1, long)] if long else [])):
        write({"case": f"decode-B{batch}-S{length}"} | guarded(decode, llm, batch, length))


def prompt(length, seed=0):
    draw = random.Random(f"{seed}-{length}")
    return {"prompt_token_ids": [draw.randrange(2, VOCABULARY) for _ in range(length)]}


def sampling(tokens, **more):
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def check(llm, model, cache, out, write):
    """Log-probabilities of prompts and greedy tokens beside those of BF16.

    Raises:
        SystemExit: some are not finite, or too far.
    """
    found = {"logprobs": [], "tokens": []}
    for asked in llm.generate([prompt(length) for length in COMPARED], sampling(8, prompt_logprobs=0, logprobs=0), use_tqdm=False):
        answer = asked.outputs[0]
        tokens, steps = [*asked.prompt_token_ids[1:], *answer.token_ids], [*asked.prompt_logprobs[1:], *answer.logprobs]
        found["logprobs"] += [step[token].logprob for token, step in zip(tokens, steps, strict=True)]
        found["tokens"] += answer.token_ids
    (out / f"check-{model}-{cache}.json").write_text(json.dumps(found))
    row = {"finite": all(map(math.isfinite, found["logprobs"])), "deviation": round(statistics.pstdev(found["logprobs"]), 3)}
    if (exact := out / f"check-{model}-bf16.json").exists():
        other = json.loads(exact.read_text())
        distances = [abs(x - y) for x, y in zip(found["logprobs"], other["logprobs"], strict=True)]
        equal = sum(x == y for x, y in zip(found["tokens"], other["tokens"], strict=True))
        row |= {"nats_from_bf16": round(statistics.fmean(distances), 4), "tokens_equal": f"{equal} of {len(found['tokens'])}"}
    same = cache != "bf16" and row.get("nats_from_bf16") == 0  # K and V do not matter then: all were zero once
    if not row["finite"] or same or row.get("nats_from_bf16", 0) > TOO_FAR:
        write({"case": "check", "error": "wrong answers, not timed"} | row)
        raise SystemExit(3)
    return row


def guarded(measure, *arguments):
    try:
        return measure(*arguments)
    except Exception as error:
        return {"error": repr(error)[:500]}


def prefill(llm, length, times):
    """A prompt alone, to its first token."""
    seconds = []
    for i in range(times + 1):  # the first one may compile
        begun = time.perf_counter()
        llm.generate([prompt(length, i)], sampling(1), use_tqdm=False)
        seconds.append(time.perf_counter() - begun)
    with Profile() as profile:
        llm.generate([prompt(length)], sampling(1), use_tqdm=False)
    return {"ms": round(1e3 * statistics.median(seconds[1:]), 3), "all_ms": [round(1e3 * s, 2) for s in seconds], **profile.kernels(1)}


def decode(llm, batch, length):
    """A step of sequences that all make tokens."""
    server = llm.llm_engine
    for i in range(batch):
        server.add_request(f"{batch}-{length}-{i}", prompt(length, i), sampling(STEPS))

    def stamp():
        """When the next step is over in which every sequence makes a token."""
        while len(server.step()) < batch:
            pass
        return time.perf_counter()

    stamps = [stamp() for _ in range(STEPS // 2)][4:]  # the first ones have the ends of prompts
    with Profile() as profile:
        for _ in range(PROFILED):
            stamp()
    while server.has_unfinished_requests():
        server.step()
    timed = [1e3 * (b - a) for a, b in pairwise(stamps)]
    row = {"ms": round(statistics.median(timed), 4), "mean_ms": round(statistics.fmean(timed), 4), "steps": len(timed)}
    return row | profile.kernels(PROFILED)


class Profile:
    """The time of kernels, by torch's profiler."""

    def __enter__(self):
        import torch
        from torch.profiler import ProfilerActivity, profile

        self.profile = profile(activities=[ProfilerActivity.CUDA if torch.cuda.is_available() else ProfilerActivity.CPU])
        self.profile.__enter__()
        return self

    def __exit__(self, *_):
        import torch

        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.profile.__exit__(None, None, None)

    def kernels(self, calls):
        """ms of a call: of all kernels, of those of attention, and of the longest by name."""
        times = {}
        for event in self.profile.key_averages():
            if event.self_device_time_total and not event.key.startswith(("Memcpy", "Memset", "gpu_")):
                times[event.key] = times.get(event.key, 0) + event.self_device_time_total / 1e3 / calls
        longest = sorted(times.items(), key=lambda item: -item[1])[:14]
        return {
            "kernels_ms": round(sum(times.values()), 4),
            "attention_ms": round(sum(ms for key, ms in times.items() if re.match(ATTENTION, key)), 4),
            "longest_ms": {key[:90]: round(ms, 4) for key, ms in longest},
        }
