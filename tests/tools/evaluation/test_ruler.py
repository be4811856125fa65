"""RULER's tasks and lm-eval through a cache: the prompts are lm-eval's own, and so are the answers."""

import random
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
if find_spec("lm_eval") is None:  # its import takes seconds: tests do it, and not each worker that collects them
    pytest.skip("needs lm-eval", allow_module_level=True)

from fp8attn_tools.evaluation import models, needle, ruler
from fp8attn_tools.evaluation.caches import cache_factory
from fp8attn_tools.evaluation.names import RULER_TASKS


@pytest.fixture(scope="module")
def committed():
    """The committed model's tokenizer: English in few tokens, each digit one."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(models.default_model())


@pytest.mark.parametrize("task", RULER_TASKS)
def test_samples(committed, task):
    random.seed(1)
    state = random.getstate()
    samples = list(ruler.ruler_samples(committed, task, lengths=(2048,), samples=3))
    assert random.getstate() == state
    assert [s.index for s in samples] == [0, 1, 2] and len({s.answers for s in samples}) == 3
    for s in samples:
        prompt = committed.decode(s.tokens)
        assert 1200 < len(s.tokens) <= 2048 - s.max_new_tokens + 60
        assert 0 < s.depth < 1 and prompt[round(s.depth * len(prompt)) :].startswith(s.answers[0])
        assert not prompt.endswith(" ")
    few = list(ruler.ruler_samples(committed, task, lengths=(2048,), samples=2))
    assert few == samples[:2]
    assert next(ruler.ruler_samples(committed, task, lengths=(2048,), samples=1, seed=1)) != samples[0]


def test_what_does_not_fit(tokenizer, committed):
    with pytest.raises(ValueError, match="no RULER task is called 'qa'; choose from niah_single_1"):
        next(ruler.ruler_samples(committed, "qa", lengths=(2048,)))
    with pytest.raises(ValueError, match="ruler_vt takes an example of at most 500 tokens; the shortest has"):
        next(ruler.ruler_samples(tokenizer, "ruler_vt", lengths=(2048,)))
    with pytest.raises(ValueError, match="ruler_vt does not fit into 300 tokens"):
        next(ruler.ruler_samples(committed, "ruler_vt", lengths=(300,)))


def test_without_lm_eval(committed, monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval.tasks.ruler", None)
    with pytest.raises(
        ValueError, match=r'niah_single_1 needs lm-eval, and .* is not installed; run pip install "fp8attn\[ruler\]"'
    ):
        next(ruler.ruler_samples(committed, "niah_single_1", lengths=(2048,)))


def test_lm_eval_asks_the_same_and_hears_the_same(loaded, tiny_model, tokenizer, monkeypatch):
    """lm-eval's task, on documents of this test: its prompts are ours, and its loop over the cache gets the same
    answers as `ask`.
    """
    from lm_eval import evaluator, tasks
    from lm_eval.tasks.ruler import niah_utils

    from fp8attn_tools.evaluation.harness import CachedLM

    model, _ = loaded
    make = cache_factory("fp8", model)
    lm = CachedLM(model, tokenizer, make, chunk=256)
    about = {"tokenizer": str(tiny_model), "max_seq_lengths": [600]}
    folder = Path(niah_utils.__file__).parent
    manager = tasks.TaskManager(include_path=str(folder), include_defaults=False, metadata=about)
    options = {"limit": 2, "gen_kwargs": {"max_gen_toks": 6}, "log_samples": True, "bootstrap_iters": 0}
    logged = evaluator.simple_evaluate(model=lm, tasks=["niah_multikey_2"], task_manager=manager, **options)["samples"][
        "niah_multikey_2"
    ]
    monkeypatch.setattr(ruler, "_docs", lambda *_: [entry["doc"] for entry in logged])
    samples = list(ruler.ruler_samples(tokenizer, "niah_multikey_2", lengths=(600,), samples=2))
    assert [tokenizer(entry["arguments"][0][0])["input_ids"] for entry in logged] == [
        s.tokens.tolist() for s in samples
    ]
    samples = [replace(s, max_new_tokens=6) for s in samples]
    heard = needle.ask(model, tokenizer, samples, {"fp8": make}, chunk=256, batch_tokens=1)
    assert [entry["resps"][0][0] for entry in logged] == [o.text for o in heard]


def test_likelihoods_go_through_the_cache(loaded, tokenizer):
    from fp8attn_tools.evaluation.harness import CachedLM

    model, _ = loaded
    made = []

    def make():
        made.append(cache_factory("fp8", model)())
        return made[-1]

    lm = CachedLM(model, tokenizer, make, chunk=64)
    tokens = torch.randint(1, 257, (2, 150))
    logits = lm._model_call(tokens)
    assert made[0].get_seq_length() == 150
    with torch.no_grad():
        exact = model(input_ids=tokens, use_cache=False).logits
    assert 0 < (logits - exact).std() < 0.1 * exact.std()  # the rounding of K and V, and no more
    with pytest.raises(ValueError, match="takes causal models only"):
        lm._model_call(tokens, attn_mask=tokens, labels=tokens)
