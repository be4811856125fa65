"""One engine in a process of its own: the scales that its layers got, log-probabilities of windows of text, and
answers.

    python run_engine.py FOLDER WINDOWS.json OUT.json [ENGINE_OPTIONS_AS_JSON]

WINDOWS.json is a list of lists of token ids. Neither fp8attn nor this repository is imported, so that any environment
with vLLM can run it. Options that are not vLLM's:

"reload": weights are reloaded, from this folder if it is one, and all is done again ("again").
"sleep": the engine sleeps and wakes up at level 1, then at level 2 with a reload, by the code of vLLM's worker for GPUs
    (see `sleep_on_cpus`). All is done again after each ("awake": answers, log-probabilities and buffers by level).
"answer": tokens of greedy answers to the windows, which are asked for twice ("answers": tokens, log-probabilities, how
    many tokens of the prompt came from blocks).
"latents": vLLM's platform for CPUs serves latents in 8 bits (see `serve_latents`).
"clear_whole_blocks": vLLM's fault with blocks of several pages on a CPU is mended, and fp8attn told so (see
`clear_whole_blocks`).
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

# vLLM's kernel of RoPE for CPUs takes the heads of queries for neighbors, and in latent attention they are not: without
# fp8attn, too, log-probabilities are 1.3 nats from those of transformers. With PyTorch's operations they are 0.02.
ROPE_OF_LATENTS = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}


def scales_of(model):
    """By layer, `_q_scale`, `_k_scale` and `_v_scale` of its attention, and the dtype of its cache."""
    return {
        module.layer_name: {x: getattr(module, f"_{x}_scale").flatten().tolist() for x in "qkv"}
        | {"dtype": module.kv_cache_dtype}
        for module in model.modules()
        if hasattr(module, "_k_scale") and hasattr(module, "layer_name")
    }


def buffers_of(model):
    """The addresses of the buffers that are not in a checkpoint, by name."""
    saved = model.state_dict()
    return {name: buffer.data_ptr() for name, buffer in model.named_buffers() if name not in saved}


def logprobs_of(llm, prompts):
    """The log-probability of each token of each prompt but the first."""
    from vllm import SamplingParams

    found = []
    for answer in llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0)) if prompts else ():
        steps = zip(answer.prompt_token_ids[1:], answer.prompt_logprobs[1:], strict=True)
        found.append([step[token].logprob for token, step in steps])
    return found


def answers_of(llm, prompts, tokens):
    """Greedy answers to each prompt, and again."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=0, detokenize=False)
    found = []
    for _ in range(2):
        given = [(asked.num_cached_tokens, asked.outputs[0]) for asked in llm.generate(prompts, params)]
        found.append(
            [
                {
                    "tokens": list(answer.token_ids),
                    "logprobs": [
                        step[token].logprob for token, step in zip(answer.token_ids, answer.logprobs, strict=True)
                    ],
                    "cached": cached,
                }
                for cached, answer in given
            ]
        )
    return found


def clear_whole_blocks():
    """Models with Mamba layers need their new blocks cleared. vLLM's runner for CPUs takes the numbers of blocks for
    numbers of the parts into which a backend splits them, so it clears parts that are in use. It does so in 0.28 to
    0.33, and its runners for GPUs do not. fp8attn refuses such models on a CPU. Here both are replaced, for tests only.
    """
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    from fp8attn.integrations.vllm import supported

    def clear(self, block_ids):
        for group in self.kv_cache_config.kv_cache_groups:
            if isinstance(group.kv_cache_spec, FullAttentionSpec):
                for name in group.layer_names:
                    parts = self.compilation_config.static_forward_context[name].kv_cache
                    parts.unflatten(0, (self.kv_cache_config.num_blocks, -1))[block_ids] = 0

    CPUModelRunner._zero_block_ids = clear
    supported.CPU_CLEARS_OTHER_PAGES = False


def serve_latents():
    """vLLM's platform for CPUs refuses latents in 8 bits. Without AMX, it also gives them blocks of 16 tokens, and
    takes prompts whole and without prefix caching, because its own kernel needs that. Here it does what it does with
    AMX, and with latents in 16 bits.
    """
    from functools import partial
    from unittest.mock import patch

    import torch
    from vllm.platforms.cpu import CpuPlatform

    amx = partial(patch.object, torch.cpu, "_is_amx_tile_supported", lambda: True)
    check, choose = CpuPlatform.check_and_update_config.__func__, CpuPlatform.get_attn_backend_cls.__func__

    def checked(cls, config):
        with amx():
            check(cls, config)

    def chosen(cls, selected_backend, attn_selector_config, num_heads=None):
        asked = attn_selector_config
        with amx():
            return choose(cls, selected_backend, asked._replace(kv_cache_dtype="auto") if asked.use_mla else asked)

    CpuPlatform.check_and_update_config, CpuPlatform.get_attn_backend_cls = classmethod(checked), classmethod(chosen)


def sleep_on_cpus():
    """Have CPUs sleep as GPUs do. vLLM's worker for CPUs ignores a sleep. What its worker for GPUs saves and restores
    is its own code; what its allocator discards, the memory of weights and buffers (level 2) and of the KV cache, is
    overwritten here.
    """
    import torch
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackend
    from vllm.v1.worker.cpu_worker import CPUWorker

    class Discarding(SleepModeBackend):
        def __init__(self, runner):
            super().__init__()
            self.runner, self.saved = runner, []

        def suspend(self, level=1):
            weights = [*self.runner.model.parameters(), *self.runner.model.buffers()]
            if level == 1:
                self.saved = [(x, x.data.clone()) for x in weights]
            for x in [*weights, *self.runner.kv_caches]:
                bytes_of = x.data.untyped_storage()
                torch.empty(0, dtype=torch.uint8).set_(bytes_of).fill_(0x7F)

        def resume(self, tags=None):
            if tags is None or "weights" in tags:
                for x, value in self.saved:
                    x.data.copy_(value)
                self.saved = []

    def mechanism(self):
        self._sleep_mode_backend = self._sleep_mode_backend or Discarding(self.model_runner)
        return self._sleep_mode_backend

    del CPUWorker.sleep, CPUWorker.wake_up
    CPUWorker.sleep_mode_backend = property(mechanism)
    torch.accelerator.synchronize, torch.accelerator.get_memory_info = (lambda: None), (lambda: (0, 0))


def main():
    """Run the engine and write what it found."""
    folder, windows, out, options = (*sys.argv[1:], "{}")[:4]
    os.environ.update({name: os.environ.get(name, value) for name, value in ENVIRONMENT.items()})
    os.environ.pop("TRITON_INTERPRET", None)
    from vllm import LLM, __version__

    options = json.loads(options)
    reload, sleep, answer = options.pop("reload", False), options.pop("sleep", False), options.pop("answer", 0)
    if sleep:
        sleep_on_cpus()
    if options.pop("clear_whole_blocks", False):
        clear_whole_blocks()
    if options.pop("latents", False):
        serve_latents()
    with open(windows) as file:
        prompts = [{"prompt_token_ids": ids} for ids in json.load(file)]
    longest = max((len(prompt["prompt_token_ids"]) for prompt in prompts), default=128) + max(answer, 8)
    llm = LLM(folder, enforce_eager=True, max_model_len=longest, **({"enable_prefix_caching": False} | options))
    found = {"vllm": __version__, "scales": llm.apply_model(scales_of)[0]}
    if answer:  # first, because log-probabilities of prompts fill the prefix cache
        found["answers"] = answers_of(llm, prompts, answer)
    found["logprobs"] = logprobs_of(llm, prompts)
    if reload:
        found["buffers"] = llm.apply_model(buffers_of)[0]
        llm.collective_rpc("reload_weights", kwargs={"weights_path": reload} if isinstance(reload, str) else None)
        found["again"] = {"buffers": llm.apply_model(buffers_of)[0], "logprobs": logprobs_of(llm, prompts)}
    if sleep:
        found["awake"] = {}
        for level in (1, 2):
            llm.sleep(level)
            llm.wake_up(["weights"])
            if level == 2:
                llm.collective_rpc("reload_weights")
            llm.wake_up(["kv_cache"])
            again = {"answers": answers_of(llm, prompts, answer)} if answer else {}
            found["awake"][level] = again | {
                "buffers": llm.apply_model(buffers_of)[0],
                "logprobs": logprobs_of(llm, prompts),
            }
    with open(out, "w") as file:
        json.dump(found, file)


if __name__ == "__main__":
    main()
