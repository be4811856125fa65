"""One engine on a CPU whose pool of blocks is small, in a process of its own.

    python -m tests.vllm.run_small_pool requests|churn|windows|load [ENGINE_OPTIONS_AS_JSON]

The last line of the output is `ANSWERS` and a JSON object. "requests": greedy answers of `models/stdlib-llama`, with
prefix caching:

"alone", "together": prompts with a common beginning, each in an empty pool, and all at once, which need several times
    the pool. "preemptions" counts how often a request gave its blocks back and was computed again.
"split": by length n of a first prompt, a longer prompt that begins with it: in an empty pool, and after the first
    prompt.
"rounds": one long prompt, every time after other prompts have filled the whole pool.

"churn": greedy answers to requests that come for `STEPS` steps while others run, more than the pool can hold. Their
prompts share beginnings, all are asked for several times, and some requests are aborted. "alone" are the answers to
each prompt in an empty pool, "churned" those of the requests that ended, to the prompts "of".

"windows": log-probabilities of the prompts of a file ("prompts", an option that is not vLLM's), one prompt after the
other: "first"; "again" in the pool that they have left; and "poisoned", in one of NaNs.

"load": greedy answers to 64 requests that share eight beginnings, three times, each time in another order ("rounds").
"""

import json
import os
import random
import sys
from itertools import count
from pathlib import Path

from tests.support.answers import text_of
from tests.vllm.run_answers import ENVIRONMENT, found_of, make_engine
from tests.vllm.run_engine import logprobs_of

BLOCKS, LONGEST = 20, 1500  # of the pool, one of which is vLLM's own; the most tokens of a request
PROMPTS, SHARED, ANSWER = 30, 300, 20  # prompts; tokens of their common beginning, and of an answer
SPLITS = (1, 127, 128, 129)
STEPS, IN_FLIGHT = 200, 16  # of "churn": steps in which requests come; requests at a time
ROUNDS, LONG, PRESSURE = (
    3,
    1200,
    2500,
)  # tokens of the long prompt, and of two others before the next round: more than the pool has


def generate(llm, prompts):
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=8)
    return found_of(llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False))


def in_an_empty_pool(llm, prompt):
    assert llm.reset_prefix_cache()
    return generate(llm, [prompt])


def preemptions(llm):
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def tail(draw):
    """A number of tokens after a common beginning, with which an answer needs one block more than its prompt."""
    return 128 * draw.randint(1, 4) - SHARED % 128 - draw.randint(1, ANSWER - 2)


def requests(llm):
    text, draw = text_of(llm.get_tokenizer()), random.Random(0)
    lengths = [tail(draw) for _ in range(PROMPTS)]
    prompts = [text[:SHARED] + text[1000 * (i + 1) :][:n] for i, n in enumerate(lengths)]
    alone = [in_an_empty_pool(llm, prompt) for prompt in prompts]
    found = {"alone": {name: [x for one in alone for x in one[name]] for name in ("answers", "logprobs")}}
    assert llm.reset_prefix_cache()
    found["together"] = generate(llm, prompts)
    found["preemptions"] = preemptions(llm)

    whole, found["split"] = text[40_000:40_300], {}
    for n in SPLITS:
        in_an_empty_pool(llm, whole[:n])
        found["split"][n] = {"after": generate(llm, [whole]), "empty": in_an_empty_pool(llm, whole)}

    long, others = text[50_000:][:LONG], iter(range(60_000, 120_000, PRESSURE // 2))
    found["rounds"] = [in_an_empty_pool(llm, long)]
    for _ in range(ROUNDS):
        generate(llm, [text[next(others) :][: PRESSURE // 2] for _ in range(2)])
        found["rounds"].append(generate(llm, [long]))
    return found


def churn(llm):
    from vllm import SamplingParams

    text, draw, engine = text_of(llm.get_tokenizer()), random.Random(0), llm.llm_engine
    prompts = [text[1000 * (i % 3) :][:SHARED] + text[20_000 + 700 * i :][: tail(draw)] for i in range(10)]
    alone = [in_an_empty_pool(llm, prompt) for prompt in prompts]
    found = {"alone": {name: [x for one in alone for x in one[name]] for name in ("answers", "logprobs")}}
    assert llm.reset_prefix_cache()
    params = SamplingParams(temperature=0, max_tokens=ANSWER, ignore_eos=True, detokenize=False, logprobs=8)
    ended, of, running, added = [], [], {}, 0
    for step in count():
        while step < STEPS and len(running) < IN_FLIGHT and (not running or draw.random() < 0.5):
            which, added = draw.randrange(len(prompts)), added + 1
            engine.add_request(str(added), {"prompt_token_ids": prompts[which]}, params)
            running[str(added)] = which
        if not running:
            break
        if draw.random() < 0.05:
            name = draw.choice(sorted(running))
            engine.abort_request([name])
            del running[name]
        for one in engine.step():
            if one.finished and one.request_id in running:
                ended.append(one)
                of.append(running.pop(one.request_id))
    return found | {"churned": found_of(ended), "of": of, "added": added, "preemptions": preemptions(llm)}


def load(llm):
    text, draw = text_of(llm.get_tokenizer()), random.Random(0)
    prompts = [text[1000 * (i % 8) :][:600] + text[10_000 + 1000 * i :][: draw.randint(20, 400)] for i in range(64)]
    rounds = []
    for _ in range(3):
        order = draw.sample(range(64), 64)
        found = generate(llm, [prompts[i] for i in order])
        places = sorted(range(64), key=order.__getitem__)
        rounds.append(
            {name: [found[name][at] for at in places] for name in ("answers", "logprobs")} | {"cached": found["cached"]}
        )
    return {"rounds": rounds}


def poison(model):
    """Fill the pool with NaNs: in BF16, in E4M3, and as scales in float32."""
    pools = [module.kv_cache for module in model.modules() if hasattr(module, "kv_cache")]
    for pool in pools:
        pool.fill_(0xFF)
    return len(pools)


def windows(llm, prompts):
    def ask():
        return [logprobs_of(llm, [{"prompt_token_ids": ids}])[0] for ids in prompts]

    found = {"first": ask(), "again": ask()}
    assert llm.apply_model(poison)[0]
    return found | {"poisoned": ask()}


def main(what, options="{}"):
    os.environ |= ENVIRONMENT
    options = {"num_gpu_blocks_override": BLOCKS, "max_model_len": LONGEST, "disable_log_stats": False} | json.loads(
        options
    )
    prompts = options.pop("prompts", None)
    if what != "windows":
        found = {"requests": requests, "churn": churn, "load": load}[what](make_engine("prefix-caching", options))
    else:
        found = windows(
            make_engine("plain", options | {"skip_tokenizer_init": True}), json.loads(Path(prompts).read_text())
        )
    print("ANSWERS " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
