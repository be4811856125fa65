"""vLLM engines on a CPU whose blocks have several pages."""

import json

import pytest
import torch
import transformers

pytest.importorskip("vllm")

from fp8attn.integrations.vllm import ON_CPU
from tests.vllm.engines import engine

OPTIONS = {"skip_tokenizer_init": True, "dtype": "bfloat16", "max_num_batched_tokens": 256}
SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 4096, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
    "initializer_range": 0.1, "torch_dtype": "bfloat16",
}  # fmt: skip


def save(folder, lengths, **config):
    """A random model, and prompts of random tokens. Their files, and one for what an engine finds."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**SIZES | config)).bfloat16()
    model.save_pretrained(folder / "model")
    (folder / "windows.json").write_text(json.dumps([torch.randint(2, 500, (n,)).tolist() for n in lengths]))
    return folder / "model", folder / "windows.json", folder / "found.json"


def test_answers_do_not_depend_on_the_size_of_blocks(tmp_path):
    """Pages of a block of several are written and read as blocks of one are: all log-probabilities are equal. Hits have whole blocks."""
    files = save(tmp_path, (800, 30, 390), architectures=["LlamaForCausalLM"], model_type="llama")
    given = OPTIONS | {"kv_cache_dtype": "fp8", "enable_prefix_caching": True, "answer": 8}
    found = {size: engine(*files, {ON_CPU: "1"}, block_size=size, **given) for size in (128, 256, 384)}
    for size, one in found.items():
        assert one["logprobs"] == found[128]["logprobs"]
        for answers in one["answers"]:
            assert [x["cached"] for x in answers] == [799 // size * size, 0, 389 // size * size]
            for answer, expected in zip(answers, found[128]["answers"][0], strict=True):
                assert answer["tokens"] == expected["tokens"]
