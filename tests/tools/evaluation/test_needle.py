"""Retrieval: samples have their length and depth, answers depend on the tokens in the cache, and statistics agree with
the literature.
"""

import re
from array import array
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

from fp8attn_tools.evaluation import models, needle, paired
from fp8attn_tools.evaluation.caches import cache_factory, prefill
from fp8attn_tools.evaluation.outcomes import (
    Outcome,
    Sample,
    cells,
    load_outcomes,
    same_outcomes,
    save_outcomes,
    score,
)
from fp8attn_tools.evaluation.recall import Haystack, recall_samples


class RecallModel:
    """A model that finds the last place where its latest `context` tokens occurred before, and predicts the token after
    it. It sees only what its cache keeps."""

    device = torch.device("cpu")

    def __init__(self, context=12):
        self.context = context

    def __call__(self, input_ids, past_key_values, use_cache, logits_to_keep, attention_mask=None, position_ids=None):
        past_key_values.append(input_ids)
        self.forwards = getattr(self, "forwards", 0) + 1
        logits = torch.zeros(len(input_ids), 1, 257)
        for row, ids in enumerate(past_key_values.ids.tolist()):
            if (following := self.following(ids)) is not None:
                logits[row, 0, following] = 1
        return SimpleNamespace(logits=logits)

    def following(self, ids):
        key = ids[-self.context :]
        return next(
            (ids[end] for end in range(len(ids) - 1, self.context - 1, -1) if ids[end - self.context : end] == key),
            None,
        )


class Reader(RecallModel):
    """A model that answers RULER's question from the statement about its key, if its cache keeps that."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer

    def following(self, ids):
        text = self.tokenizer.decode(ids)
        asked = re.search(r"for (\S+) mentioned in the provided text is( \d*|)$", text)
        stated = asked and re.search(f"numbers for {asked[1]} is:( [0-9]+)", text)
        return self.tokenizer(stated[1])["input_ids"][len(asked[2])] if stated else None


class Memory:
    """A cache that keeps all ids, or replaces ids older than `horizon` by zeros."""

    def __init__(self, horizon=None):
        self.horizon, self.ids = horizon, None

    def append(self, new):
        self.ids = new.clone() if self.ids is None else torch.cat([self.ids, new], 1)
        if self.horizon:
            self.ids[:, : -self.horizon] = 0


@pytest.fixture(scope="module")
def haystack(tokenizer, tiny_model):
    return Haystack(tokenizer, models.read_text(model=tiny_model), seed=1)


@pytest.mark.parametrize("length", [700, 2001])
@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
def test_prompts(haystack, tokenizer, length, depth):
    prompt = haystack.sample(length, depth, distractors=3)
    (answer,) = prompt.answers
    text = tokenizer.decode(prompt.tokens)
    assert len(prompt.tokens) == length
    assert text.startswith("A special magic number is hidden")
    key = re.search(r"\nWhat is the special magic number for ([a-z]{6}-[a-z]{6}) mentioned", text).group(1)
    assert text.endswith(f"? The special magic number for {key} mentioned in the provided text is")
    stated = f"\nOne of the special magic numbers for {key} is: {answer}.\n"
    assert text.count(stated) == 1  # on a line of its own
    keys, values = zip(*re.findall(r"numbers for (\S+) is: ([1-9][0-9]{6})\.", text), strict=True)
    assert len(set(values)) == 4 and len({word for key in keys for word in key.split("-")}) == 8
    needles = 4 * len(stated)
    assert abs(text.index(stated) - depth * (length - needles)) < needles  # distractors stand before it or behind it


def test_prompts_have_a_seed(tokenizer, tiny_model):
    text = models.read_text(model=tiny_model)
    first, again, other = (Haystack(tokenizer, text, seed) for seed in (5, 5, 6))
    assert first.sample(700, 0.5) == again.sample(700, 0.5)
    assert first.sample(700, 0.5) != other.sample(700, 0.5)
    assert first.sample(700, 0.5) != again.sample(800, 0.5)


def test_prompts_that_cannot_be(haystack):
    with pytest.raises(ValueError, match=r"the length of a prompt with 4 pairs must be 547 to 16931 tokens; got 90"):
        haystack.sample(90, 0.5)
    with pytest.raises(ValueError, match="got 20000"):
        haystack.sample(20000, 0.5)
    with pytest.raises(ValueError, match="distractors must be 0 or more; got -1"):
        haystack.sample(500, 0.5, distractors=-1)
    with pytest.raises(ValueError, match=r"depth must be in \[0, 1\]"):
        haystack.sample(500, 50)


def test_a_perfect_memory_finds_all_and_a_short_one_the_near(tokenizer, tiny_model):
    text, caches, calls = models.read_text(model=tiny_model), {"all": Memory, "half": lambda: Memory(horizon=500)}, []
    samples = list(recall_samples(tokenizer, text, lengths=(900, 1400), depths=(0.0, 0.2, 0.9, 1.0), samples=2, seed=1))
    assert [(s.length, s.index, s.depth) for s in samples[:3]] == [(900, 0, 0.0), (900, 1, 0.0), (900, 2, 0.2)]
    outcomes = needle.ask(
        Reader(tokenizer), tokenizer, samples, caches, chunk=128, batch_tokens=3000, progress=calls.append
    )
    assert calls == outcomes and len(outcomes) == 2 * 16
    assert score(outcomes, "all") == 1.0
    found = {(cell.length, cell.depth): cell.score for cell in cells(outcomes) if cell.cache == "half"}
    for (length, depth), share in found.items():
        assert share == (depth > 0.5), (length, depth)
    assert score(outcomes, "half") == 4 / 8
    assert same_outcomes(outcomes, "all", "all")
    assert not same_outcomes(outcomes, "all", "half")
    assert all(o.text.startswith(" " + o.answers[0]) for o in outcomes if o.cache == "all")


def sample(text, tokenizer, *answers, count=40, task="t", index=0):
    return Sample(task, 100, index, array("i", tokenizer(text)["input_ids"]), answers, 0.0, count)


def test_a_batch_stops_when_all_its_answers_are_there(tokenizer):
    model = RecallModel(context=3)
    row = sample("abcdefghijklmnopqrstuvwxyz abc", tokenizer, "FGH")
    (outcome,) = needle.ask(model, tokenizer, [row], {"all": Memory})
    assert outcome.text == "defgh" and outcome.right  # in any case of letters
    assert model.forwards == 1 + 4
    (outcome,) = needle.ask(model, tokenizer, [sample("abcdefg abc", tokenizer, "d", "zzz", count=5)], {"all": Memory})
    assert (outcome.text, outcome.score, outcome.right) == ("defg ", 0.5, False)


def test_an_answer_ends_where_it_is_told_to(tokenizer):
    model = RecallModel(context=3)
    rows = [sample("abc\n\ndef\nghi abc", tokenizer, "GHI"), sample("abcd\nefgh abcd", tokenizer, "zzz", index=1)]
    heard = needle.ask(model, tokenizer, rows, {"all": Memory}, stop="\n", batch_tokens=1)
    assert [(o.text, o.right) for o in heard] == [("\n\ndef", False), ("\nefgh abcd", False)]
    heard = needle.ask(model, tokenizer, rows[:1], {"all": Memory})
    assert [(o.text, o.right) for o in heard] == [("\n\ndef\nghi", True)]


def test_batches_hold_neighbors_of_one_kind(tokenizer):
    made = [
        sample("x" * n, tokenizer, "y", task=task)
        for task, n in (("a", 10), ("a", 20), ("a", 20), ("b", 20), ("b", 50))
    ]
    batches = [[len(s.tokens) for s in batch] for batch in needle._batches(made, 40)]
    assert batches == [[10, 20], [20], [20], [50]]


def test_side_by_side_is_one_by_one(loaded, tiny_model, tokenizer):
    model, _ = loaded
    text = models.read_text(model=tiny_model)
    samples = [sample(text[9 * n : 300 + 50 * n], tokenizer, "\0never", count=4, index=n) for n in range(3)]
    caches = {"bf16": cache_factory("bf16", model)}
    together, alone = (needle.ask(model, tokenizer, samples, caches, chunk=128, batch_tokens=n) for n in (10**4, 1))
    assert [o.text for o in together] == [o.text for o in alone]


@pytest.mark.parametrize(
    ("name", "tolerance"), [("bf16", 1e-5), ("fp8", 0.2)]
)  # padding shares pages, so scales, with the first tokens
def test_padding_is_not_seen(loaded, tiny_model, tokenizer, name, tolerance):
    model, _ = loaded
    tokens = models.tokenize(tokenizer, models.read_text(model=tiny_model))[None, :300]
    make = cache_factory(name, model)
    want = prefill(model, tokens, make(), chunk=128)
    padded = torch.cat([torch.full((1, 7), 65), tokens], 1)
    got = prefill(model, padded, make(), chunk=128, mask=(torch.arange(307) >= 7).long()[None])
    blind = prefill(model, padded, make(), chunk=128)
    assert (got - want).std() < tolerance * want.std()
    assert (got - want).std() < 0.5 * (blind - want).std()


@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_a_shared_prefix_is_read_once_and_changes_nothing(loaded, tiny_model, tokenizer, name, monkeypatch):
    model, _ = loaded
    text = models.read_text(model=tiny_model)
    samples = [
        sample(text[:700] + question, tokenizer, "\0never", count=4)
        for question in ("value_", "result = ", "function_x")
    ]
    samples.append(sample(text[100:900], tokenizer, "\0never", count=4))
    caches, read = {name: cache_factory(name, model)}, []
    prefill = needle.prefill
    monkeypatch.setattr(needle, "prefill", lambda model, tokens, *rest, **options: (
        read.append((tokens.shape[1], last := prefill(model, tokens, *rest, **options))), last)[1])  # fmt: skip
    shared = needle.ask(model, tokenizer, samples, caches, chunk=256, batch_tokens=1)
    assert [length for length, _ in read] == [706, 709 - 512, 710 - 512, 800]
    alone = [needle.ask(model, tokenizer, [one], caches, chunk=256)[0] for one in samples]
    assert [o.text for o in shared] == [o.text for o in alone]
    for (_, with_prefix), (_, without) in zip(read[:4], read[4:], strict=True):
        assert torch.equal(with_prefix, without)  # bit for bit


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.xz"])
def test_to_a_file_and_back(tmp_path, tokenizer, ending):
    outcomes = [Outcome("fp8", "recall", 512, 3, 0.25, ("1", "é"), "\n1", 0.5)]
    save_outcomes(tmp_path / "a" / f"o.{ending}", outcomes)
    assert load_outcomes(tmp_path / "a" / f"o.{ending}") == outcomes


def test_many_depths_go_by_tenths():
    made = [Outcome("fp8", "t", 512, n, n / 99, ("1",), "1", float(n < 50)) for n in range(100)]
    found = cells(made)
    assert [(c.depth, c.samples) for c in found] == [(pytest.approx(0.05 + t / 10), 10) for t in range(10)]
    assert [c.score for c in found] == [1.0] * 5 + [0.0] * 5


# paired statistics


def test_intervals_are_those_of_the_literature():
    assert paired.wilson(81, 263) == pytest.approx(
        (0.2553, 0.3662), abs=5e-5
    )  # Newcombe 1998, Stat. Med. 17:857, table I
    assert paired.wilson(0, 20) == pytest.approx((0, 0.1611), abs=5e-5)
    assert paired.newcombe(36, 12, 2, 0) == pytest.approx((0.0569, 0.3404), abs=5e-5)  # the same, 17:2635, table II
    assert paired.newcombe(0, 0, 0, 5) == pytest.approx((-0.4345, 0.4345), abs=5e-5)


def test_mcnemar_is_the_binomial_test():
    assert paired.mcnemar(0, 0) == 1
    assert paired.mcnemar(3, 3) == 1
    assert paired.mcnemar(1, 8) == pytest.approx(2 * (1 + 9) / 512)
    assert paired.mcnemar(0, 400) == pytest.approx(2**-399)


def test_compare_pairs_by_sample():
    rows = [(True, True), (True, False), (True, False), (False, True), (False, False), (True, True)]
    made = [
        Outcome(cache, "t", 512, n, 0.5, ("1",), "", float(right[side]))
        for n, right in enumerate(rows)
        for side, cache in enumerate("ab")
    ]
    pair = paired.compare(reversed(made[:-1]), "a", "b")  # the last sample has no partner
    assert (pair.both, pair.only_first, pair.only_second, pair.neither, pair.samples) == (1, 2, 1, 1, 5)
    assert pair.difference == pytest.approx(-0.2)
    assert pair.interval[0] < -0.2 < pair.interval[1]
    assert pair.p == 1
    assert {a.index for a, _ in pair.discordant} == {1, 2, 3} and all(
        a.cache == "a" and b.cache == "b" for a, b in pair.discordant
    )
    with pytest.raises(ValueError, match="'a' and 'c' have no sample in common"):
        paired.compare(made, "a", "c")
