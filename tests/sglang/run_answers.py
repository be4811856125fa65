"""One engine of SGLang on a CPU, in a process of its own: its greedy answers to 20 prompts, or to those of a file.

    python -m tests.sglang.run_answers WAY [ENGINE_OPTIONS_AS_JSON]

The model is `models/stdlib-llama`. The last line of the output is `ANSWERS` and a JSON object. Options that are not
SGLang's:

"again": the prompts are answered a second time ("again" in the output).
"prompts": a file of lists of token ids, instead of the 20 prompts. The log-probabilities of their tokens are in the
output, too.
"""

import json
import os
import sys
from pathlib import Path

from tests.support.answers import ANSWER, MODEL, prompts_of

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0",
}
LIKELIEST = 20  # tokens of each step whose log-probabilities are in the output
COMMON = {
    "device": "cpu", "dtype": "bfloat16", "mem_fraction_static": 0.1, "max_total_tokens": 32768,
    "max_running_requests": 32,
    "context_length": 4096, "disable_radix_cache": True, "skip_server_warmup": True, "random_seed": 0,
    "log_level": "info",
}  # fmt: skip
OURS = {"attention_backend": "fp8attn"}
WAYS = {  # of computing the same answers
    "bf16": {"attention_backend": "torch_native", "page_size": 128},
    "bf16-chunks": {"attention_backend": "torch_native", "page_size": 128, "chunked_prefill_size": 256},
    "plain": OURS,
    "radix": OURS | {"disable_radix_cache": False},
    "chunks": OURS | {"chunked_prefill_size": 256},
    "mixed": OURS | {"chunked_prefill_size": 256, "enable_mixed_chunk": True, "disable_radix_cache": False},
    "little-memory": OURS | {"max_total_tokens": 6144, "schedule_conservativeness": 0.0, "disable_radix_cache": False},
    "tp2": OURS | {"tp_size": 2},
}


def answers_of(engine, prompts, of_prompts):
    """The answers: tokens; the log-probabilities of the likeliest tokens of each step; how many tokens of prompts were
    in the cache; and of prompts the log-probability of each token but the first, if `of_prompts`."""
    params = {"temperature": 0, "max_new_tokens": ANSWER, "ignore_eos": True}
    given = {"return_logprob": True, "top_logprobs_num": LIKELIEST, "logprob_start_len": 0 if of_prompts else -1}
    found = engine.generate(input_ids=prompts, sampling_params=params, **given)
    infos = [one["meta_info"] for one in found]
    answers = {
        "answers": [one["output_ids"] for one in found],
        "logprobs": [
            [{str(token): value for value, token, *_ in step} for step in info["output_top_logprobs"]] for info in infos
        ],
        "cached": sum(info["cached_tokens"] for info in infos),
    }
    if of_prompts:
        answers["of_prompts"] = [[value for value, *_ in info["input_token_logprobs"][1:]] for info in infos]
    return answers


def main(way, options="{}"):
    """Print the answers, and how many bytes SGLang gave the cache for how many tokens."""
    os.environ.update(
        ENVIRONMENT | ({"SGLANG_CPU_OMP_THREADS_BIND": "0|1"} if way == "tp2" else {})
    )  # a core for each process
    import sglang
    from transformers import AutoTokenizer

    options = {"model_path": MODEL} | COMMON | WAYS[way] | json.loads(options)
    again, file = options.pop("again", False), options.pop("prompts", None)
    prompts = prompts_of(AutoTokenizer.from_pretrained(MODEL)) if file is None else json.loads(Path(file).read_text())
    engine = sglang.Engine(**options)
    try:
        found = answers_of(engine, prompts, file is not None)
        if again:
            found["again"] = answers_of(engine, prompts, file is not None)
        info = engine.get_server_info()
        found["page_size"] = info["page_size"]
    finally:
        engine.shutdown()
    print("ANSWERS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
