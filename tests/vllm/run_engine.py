"""One engine of stock vLLM in a process of its own: the scales that its layers got, and log-probabilities of windows of text.

    python run_engine.py FOLDER WINDOWS.json OUT.json [ENGINE_OPTIONS_AS_JSON]

WINDOWS.json is a list of lists of token ids. Neither fp8attn nor this repository is imported, so that any environment with vLLM can run it.
"""

import json
import os
import sys

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the model is in this process
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}  # fmt: skip


def scales_of(model):
    """By layer, `_q_scale`, `_k_scale` and `_v_scale` of its attention, and the dtype of its cache."""
    return {
        module.layer_name: {x: getattr(module, f"_{x}_scale").flatten().tolist() for x in "qkv"} | {"dtype": module.kv_cache_dtype}
        for module in model.modules()
        if hasattr(module, "_k_scale") and hasattr(module, "layer_name")
    }


def main():
    """Run the engine and write what it found."""
    folder, windows, out, options = (*sys.argv[1:], "{}")[:4]
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    os.environ.pop("TRITON_INTERPRET", None)
    from vllm import LLM, SamplingParams, __version__

    with open(windows) as file:
        prompts = [{"prompt_token_ids": ids} for ids in json.load(file)]
    longest = max((len(prompt["prompt_token_ids"]) for prompt in prompts), default=128) + 8
    llm = LLM(folder, enforce_eager=True, max_model_len=longest, enable_prefix_caching=False, **json.loads(options))
    found = {"vllm": __version__, "scales": llm.apply_model(scales_of)[0], "logprobs": []}
    for answer in llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0)) if prompts else ():
        steps = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        found["logprobs"].append([step[token].logprob for token, step in steps])
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
