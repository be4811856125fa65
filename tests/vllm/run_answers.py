"""One engine with the plugin on a CPU, in a process of its own: its greedy answers to 20 prompts.

    python -m tests.vllm.run_answers WAY [ENGINE_OPTIONS_AS_JSON]

The model is `models/stdlib-llama`. The last line of the output is `ANSWERS` and a JSON object.
"""

import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path

from tests.support.answers import ANSWER, MODEL, PROMPTS, prompts_of
from tests.vllm.run_engine import ROPE_OF_LATENTS, serve_latents

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0", "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1", "VLLM_WORKER_MULTIPROC_METHOD": "spawn", "VLLM_CPU_KVCACHE_SPACE": "2",
    "FP8ATTN_VLLM_CPU": "1",
    "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
     # threads that wait for one another are slow where others use the cores
}  # fmt: skip
LIKELIEST = 8  # tokens of a step that have log-probabilities
WAYS = {  # of computing the same answers
    "plain": {},
    "prefix-caching": {"enable_prefix_caching": True},
    "chunks": {"max_num_batched_tokens": 256},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": 4,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    },
    "draft": {
        "disable_log_stats": False,
        "speculative_config": {"method": "draft_model", "model": MODEL, "num_speculative_tokens": 3},
    },
    "eagle": {"disable_log_stats": False, "speculative_config": {"method": "eagle", "num_speculative_tokens": 3}},
    "tp2": {"tensor_parallel_size": 2, "disable_custom_all_reduce": True},
}


def make_engine(way, options):
    from vllm import LLM

    given = {
        "dtype": "bfloat16", "seed": 0, "enable_prefix_caching": False, "kv_cache_dtype": "fp8", "enforce_eager": True,
        "max_model_len": 4096, "max_num_seqs": 32, "gpu_memory_utilization": 0.3,
        "max_num_batched_tokens": 4096,
         # vLLM's own number grows with the processes, and then prompts have other chunks
    } | WAYS[way] | options  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        if given.pop("latents", False):
            serve_latents()
            given |= ROPE_OF_LATENTS | {"model": save_untied(given["model"], Path(folder, "untied"))}
        if way == "eagle":
            head = {"model": save_eagle(Path(folder, "eagle"))}
            given["speculative_config"] = given["speculative_config"] | head
        return LLM(given.pop("model", MODEL), **given)


def save_untied(model, folder):
    """A model whose last matrix has weights of its own: vLLM's DeepSeek V3 does not take the embeddings for it."""
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    for file in Path(model).iterdir():
        (folder / file.name).symlink_to(file.resolve())
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def save_eagle(folder):
    """Write an EAGLE head for our model: its first layer, and a projection that passes the token's embedding and little
    else. It is not trained, so nearly all of its drafts are rejected."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    config, weights = json.loads(Path(MODEL, "config.json").read_text()), load_file(f"{MODEL}/model.safetensors")
    layer = {
        name.removeprefix("model."): x
        for name, x in weights.items()
        if "layers.0." in name and "input_layernorm" not in name
    }
    passed = torch.eye(config["hidden_size"], dtype=torch.bfloat16)
    projection = {
        "fc.weight": torch.cat([passed, 0.1 * passed], 1),
        "embed_tokens.weight": weights["model.embed_tokens.weight"],
    }
    save_file(layer | projection, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    return str(folder)


def accepted(llm):
    """Tokens of drafts that were accepted; 0 without statistics."""
    if not llm.llm_engine.log_stats:
        return 0
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:spec_decode_num_accepted_tokens")


def main(way, options="{}"):
    """Print the answers, the log-probabilities of the likeliest tokens of each step, how many tokens of the prompts
    came from blocks ("cached"), and how many tokens of drafts were accepted. Options that are not vLLM's:

    "again": the prompts are asked for a second time.
    "killed": an engine before this one was killed in a step ("killed": whether its process has ended).
    "latents": the model caches latents (see `run_engine.serve_latents`).
    """
    options = json.loads(options)
    again, killed = options.pop("again", False), options.pop("killed", False)
    os.environ |= ENVIRONMENT | {"VLLM_ENABLE_V1_MULTIPROCESSING": str(int(killed))}
    ended = kill_in_a_step(make_engine(way, options.copy())) if killed else None
    llm = make_engine(way, options)
    found = answers_of(llm) | {"killed": ended}
    if again:
        found["again"] = answers_of(llm)
    found["accepted"] = accepted(llm)
    print("ANSWERS " + json.dumps(found), flush=True)


def kill_in_a_step(llm):
    """Kill the process of an engine that works on the prompts, by the signal that Linux sends when memory is used up.
    Returns whether the process has ended.
    """
    from vllm import SamplingParams

    front = llm.llm_engine
    for number, ids in enumerate(prompts_of(llm.get_tokenizer())):
        front.add_request(str(number), {"prompt_token_ids": ids}, SamplingParams(max_tokens=ANSWER, ignore_eos=True))
    for _ in range(5):
        front.step()
    (core,) = multiprocessing.active_children()
    core.kill()
    until = time.monotonic() + 60
    while Path(f"/proc/{core.pid}").exists() and time.monotonic() < until:
        core.join(0.1)  # vLLM waits for it, too, and only one of two learns how a process has ended
    return not Path(f"/proc/{core.pid}").exists()


def ask(llm, tokens=ANSWER, transfers=({},) * PROMPTS):
    """What vLLM returns for the prompts. `transfers`: for each prompt, what a KV connector is told of it."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": ids} for ids in prompts_of(llm.get_tokenizer())]
    greedy = {"temperature": 0, "max_tokens": tokens, "ignore_eos": True, "detokenize": False, "logprobs": LIKELIEST}
    params = [
        SamplingParams(**greedy, extra_args={"kv_transfer_params": given} if given else None) for given in transfers
    ]
    return llm.generate(prompts, params, use_tqdm=False)


def answers_of(llm, **options):
    return found_of(ask(llm, **options))


def found_of(asked):
    """The tokens, log-probabilities and number of cached tokens of what vLLM has returned."""
    return {
        "answers": [list(one.outputs[0].token_ids) for one in asked],
        "logprobs": [
            [{token: x.logprob for token, x in step.items()} for step in one.outputs[0].logprobs] for one in asked
        ],
        "cached": sum(one.num_cached_tokens or 0 for one in asked),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
