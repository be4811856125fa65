"""Does speculative decoding give plain greedy decoding's tokens?

transformers' prompt lookup and assisted decoding run through our caches and, in BF16, through its own. Drafts are appended to the cache,
and those that the model rejects are cropped, in the middle of a page. In exact arithmetic no token changes. On a GPU, several tokens in a
forward round differently from one, through any cache, so equally likely tokens may change.

| key | is |
|---|---|
| `prompts` | how many: pieces of code, of prose, and questions |
| `equal` | of how many all tokens equal plain greedy's through the same cache |
| `accepted` | draft tokens accepted in a forward of the model, on average |
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from transformers import DynamicCache

from fp8attn_tools.evaluation.caches import MakeCache

from . import texts

CASES = {  # a model, and how drafts are made
    f"{name}-{how}": (model, how) for name, model in (("smollm2", "smollm2"), ("stdlib", None)) for how in ("prompt-lookup", "assisted")
}
IMPLS = ("bf16", "fp8attn", "fp8attn-e4m3-keys")
PIECES = 8  # of each text
LENGTH, NEW, DRAFT = 200, 24, 4  # tokens of a piece, of a continuation, of a draft
QUESTIONS = ("What is the capital of France?", "Name three colors.", "What is a hash table?", "What is 17 + 25?")


def prompts_of(tokenizer: Any, device: torch.device) -> list[torch.Tensor]:
    """The prompts, `[1, S]` each."""
    read = [texts.tokens(tokenizer, path) for path in (texts.CODE, texts.PROSE)]
    pieces = [text[start : start + LENGTH] for text in read for start in range(0, 1000 * PIECES, 1000)]
    questions = [torch.tensor(tokenizer(f"Question: {text}\nAnswer:")["input_ids"]) for text in QUESTIONS]
    return [ids[None].to(device) for ids in (*pieces, *questions)]


def assistant_of(model: Any) -> Any:
    """The model without its last layers (one in eight). Its guesses are often right and sometimes wrong."""
    assistant = copy.deepcopy(model)
    layers = len(model.model.layers)
    assistant.config.num_hidden_layers = kept = layers - max(1, layers // 8)
    assistant.model.layers = assistant.model.layers[:kept]
    assistant.set_attn_implementation("sdpa")
    assistant.generation_config.num_assistant_tokens = DRAFT
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return assistant


def continuations(model: Any, prompts: list[torch.Tensor], make: MakeCache, **options: Any) -> tuple[list[list[int]], int]:
    """The tokens that follow each prompt, and the number of the model's forwards for them."""
    found, forwards = [], []
    counter = model.register_forward_pre_hook(lambda *_: forwards.append(1))
    try:
        for ids in prompts:
            out = model.generate(ids, past_key_values=make(), max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options)
            found.append(out[0, ids.shape[1] :].tolist())
    finally:
        counter.remove()
    return found, len(forwards)


def compare(plain: list[list[int]], drafted: list[list[int]], forwards: int) -> dict[str, Any]:
    """The fields of a row that compare each prompt's tokens."""
    return {
        "prompts": len(plain),
        "equal": sum(a == b for a, b in zip(plain, drafted, strict=True)),
        "accepted": round(sum(map(len, drafted)) / forwards - 1, 3),  # a forward gives one token of its own
    }


def makes_cache(impl: str, model: Any) -> MakeCache:
    """Set the attention of `impl`. Returns a function that makes its cache."""
    model.set_attn_implementation("sdpa" if impl == "bf16" else "fp8_kv")
    return (lambda: DynamicCache(config=model.config)) if impl == "bf16" else texts.make_cache(impl, model)


@cache
def greedy(name: str | None, impl: str) -> list[list[int]]:
    """The tokens of plain greedy decoding, with which both kinds of drafts are compared."""
    model, tokenizer = texts.load(name)
    return continuations(model, prompts_of(tokenizer, model.device), makes_cache(impl, model))[0]


def measure(case: str) -> Iterator[dict]:
    name, how = CASES[case]
    if (loaded := texts.load(name)) is None:
        return
    model, tokenizer = loaded
    prompts = prompts_of(tokenizer, model.device)
    options = {"prompt_lookup_num_tokens": DRAFT} if how == "prompt-lookup" else {"assistant_model": assistant_of(model)}
    for impl in IMPLS:
        plain = greedy(name, impl)
        yield {"case": case, "impl": impl, **compare(plain, *continuations(model, prompts, makes_cache(impl, model), **options))}
