"""The whole comparison of retrieval runs on a CPU, with a kernel of torch instead of the peers' kernels."""

import json
import sys
from dataclasses import replace

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks import needle as bench
from benchmarks import needle_systems
from benchmarks.needle_systems import IMPLS, KERNELS, Systems, Work
from evidence import answers
from fp8attn.formats.codec import FP8
from fp8attn_tools.evaluation import models
from fp8attn_tools.evaluation.caches import cache_factory, forward, prefill
from fp8attn_tools.evaluation.outcomes import save_outcomes, save_samples
from fp8attn_tools.evaluation.recall import recall_samples


def rows_attention(shape, q, k, v):
    """The function of the other systems' kernels, in FP32."""

    def call():
        outs, ends = [], torch.tensor([0, *shape.keys]).cumsum(0).tolist()
        for seq in range(len(shape.keys)):
            n, m = shape.keys[seq], shape.queries[seq]
            queries = q[shape.rows(seq)].float()
            keys, values = (x[ends[seq] : ends[seq + 1]].float().repeat_interleave(shape.q_heads // shape.kv_heads, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * shape.softmax_scale
            ahead = torch.arange(n) > torch.arange(m)[:, None] + n - m
            outs.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(ahead, -torch.inf).softmax(-1), values))
        return torch.cat(outs).to(torch.bfloat16 if q.dtype == FP8 else q.dtype)

    return call


@pytest.fixture(autouse=True)
def cpu_kernels(monkeypatch):
    monkeypatch.setattr(needle_systems, "KERNELS", dict.fromkeys(KERNELS, rows_attention))
    monkeypatch.setattr(needle_systems.peers, "available", lambda: {"fa3", "vllm-fa3"})


@pytest.fixture
def folder(tiny_model, tokenizer, tmp_path, monkeypatch):
    """A folder with samples whose prompts differ in length, for the outputs of a run."""
    monkeypatch.setattr(bench, "SAMPLES", tmp_path)
    monkeypatch.setattr(answers, "OUTCOMES", tmp_path / "outcomes")
    monkeypatch.setattr(answers.results, "RESULTS", tmp_path)
    monkeypatch.setattr(needle_systems.texts, "CALIBRATION", (256, 2))
    made = recall_samples(tokenizer, models.read_text(model=tiny_model), lengths=(600, 591), depths=(0.5,), samples=2)
    samples = [replace(sample, index=n, length=600) for n, sample in enumerate(made)]
    save_samples(tmp_path / "recall-600.zip", samples)
    return tmp_path


MACHINE = {"device": "H"}


@pytest.fixture
def codes(monkeypatch):
    """The fingerprints of the implementations' code, by name. A test changes one to simulate other code."""
    codes = {}
    for module in (answers, bench):
        monkeypatch.setattr(module, "of_row", lambda name, impl: codes.get(impl, "tree:1"))
    return codes


def work(folder, tiny_model, names, **options):
    into = answers.begin(MACHINE, {})
    return Work(into, str(tiny_model), (folder / "recall-600.zip",), names, (0, 2), None, **options)


def test_every_implementation_answers_every_sample_once(folder, tiny_model):
    first = work(folder, tiny_model, IMPLS)
    for number in range(2):
        first.run(number, 2)
    outcomes = answers.read(first.folder).outcomes
    assert len(outcomes) == len(IMPLS) * 2 * 4 == len({answers.key(o) for o in outcomes})
    rows = answers.rows(outcomes)
    cases = ["recall-S600", "recall-stress2-S600"]
    assert [(row["case"], row["impl"], row["samples"]) for row in rows] == [(case, name, 4) for case in cases for name in IMPLS]
    assert all(row["paired"] == 4 and row["p"] == 1 for row in rows if row["impl"] != "bf16")
    again = work(folder, tiny_model, IMPLS, done=frozenset(map(answers.key, outcomes)))
    again.run(0, 2)
    assert answers.read(again.folder).outcomes == []


def test_time_is_kept(folder, tiny_model):
    late = work(folder, tiny_model, ("bf16",), deadline=0.0)
    late.run()
    assert answers.read(late.folder).outcomes == []


def test_scales_do_not_depend_on_who_was_asked_before(tiny_model):
    model, tokenizer = models.load(tiny_model, device="cpu")
    text = models.tokenize(tokenizer, models.read_text(model=tiny_model))[:600].view(2, 300)
    want, after = Systems(model, text), Systems(model, text)
    want.enter("fp8attn-static")
    prefill(model, text, after.enter("fa3-fp8")())
    after.enter("fp8attn-static")
    for layer, scales in want.static.layers.items():
        torch.testing.assert_close(after.static.layers[layer].k_scale, scales.k_scale, rtol=0, atol=0)


def test_a_run_goes_on_from_the_one_before(folder, tiny_model, codes, monkeypatch):
    """The same for a run that was interrupted. The rows keep the commands that gave the answers."""

    def run(*arguments):
        line = ["needle", "run", "--task", "recall", "--lengths", "600", "--model", str(tiny_model), "--save", *arguments]
        monkeypatch.setattr(sys, "argv", line)
        monkeypatch.setattr(sys, "orig_argv", ["python", *line])
        bench.main()
        return found()

    def found():
        _, provenances, rows = json.loads((folder / "cpu/needle.json").read_text()).values()
        assert not answers.OUTCOMES.exists() and all(row["fingerprint"] == answers.of_row("needle", row["impl"]) for row in rows)
        commands = {name: one["command"].replace(str(tiny_model), "tiny") for name, one in provenances.items()}
        return {row["impl"]: (row["samples"], commands[row["impl"]]) for row in rows}

    first = "python needle run --task recall --lengths 600 --model tiny --save --impl fp8attn --samples 3"
    assert run("--impl", "fp8attn", "--samples", "3") == {"fp8attn": (3, first)}
    asked = answers.read(folder / "cpu").outcomes

    def interrupted(work):
        assert work.done == set(map(answers.key, asked))
        save_outcomes(work.folder / "needle-0.jsonl", [replace(asked[0], cache="bf16")])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bench, "run_everywhere", interrupted)
        with pytest.raises(SystemExit, match="interrupted; what was answered is kept"):
            run("--impl", "bf16")
    second = first.replace("fp8attn --samples 3", "bf16")
    assert found() == {"bf16": (1, second), "fp8attn": (3, first)}
    assert run("--impl", "bf16") == {"bf16": (4, second), "fp8attn": (3, first)}
    assert run("--impl", "bf16", "--samples", "2")["bf16"] == (4, second)  # which asked nothing
    codes["fp8attn"] = "tree:2"
    third = first.replace("--samples 3", "--samples 2")
    assert run("--impl", "fp8attn", "--samples", "2") == {"bf16": (4, second), "fp8attn": (2, third)}
    codes["fp8attn"] = "tree:3"
    assert run("--impl", "bf16") == {"bf16": (4, second)}
    with pytest.raises(ValueError, match="no implementation is called 'fa4'; choose from bf16, fp8attn"):
        run("--impl", "fa4")


@pytest.mark.parametrize("name", ["bf16", "fa3-fp8", "fa3-fp8:calibrated", "fa3-fp8:calibrated+means"])
def test_a_kernel_over_rows_is_the_model_but_for_rounding(tiny_model, name):
    """Prompts of different lengths, padded, in chunks, and one more token."""
    model, tokenizer = models.load(tiny_model, device="cpu")
    tokens = models.tokenize(tokenizer, models.read_text(model=tiny_model))
    systems = Systems(model, tokens[:600].view(2, 300))
    batch, mask = tokens[600:1200].view(2, 300), torch.ones(2, 300, dtype=torch.int64)
    mask[0, :11] = 0
    model.set_attn_implementation("fp8_kv")
    want = prefill(model, batch, cache_factory("bf16", model)(), mask=mask)
    cache = systems.enter(name)()
    prefill(model, batch[:, :299], cache, chunk=128, mask=mask[:, :299])
    got = forward(model, batch[:, 299:], cache, mask=mask)[:, -1]
    assert (got - want).std() < {"bf16": 1e-4, "fa3-fp8:calibrated+means": 0.1}.get(name, 0.2) * want.std()
    if name != "bf16":
        assert (got - want).std() > 0 and all(layer.keys.dtype == FP8 for layer in cache.layers)


def test_means_are_of_a_prompt_and_not_of_its_padding(tiny_model):
    """One prompt has 100 tokens after 200 of padding, the other 300. The means are those of the prompt alone."""
    model, tokenizer = models.load(tiny_model, device="cpu")
    batch = models.tokenize(tokenizer, models.read_text(model=tiny_model))[:600].view(2, 300)
    systems = Systems(model, batch)
    mask = torch.ones(2, 300, dtype=torch.int64)
    mask[0, :200] = 0

    def means(tokens, mask=None, more=()):
        cache = systems.enter("fa3-fp8:means")()
        prefill(model, tokens, cache, mask=mask)
        for token in more:  # which change none
            mask = torch.cat([mask, mask[:, -1:]], 1)
            forward(model, token, cache, mask=mask)
        return cache.layers[0].k_mean, cache.layers[0].v_mean

    alone, beside = means(batch[:1, 200:]), means(batch[1:])
    for found, *parts in zip(means(batch, mask, more=(batch[:, :1],)), alone, beside, strict=True):
        assert found.abs().amax(-1).min() > 0.1  # there are means to find
        torch.testing.assert_close(found, torch.cat(parts), rtol=1e-4, atol=1e-5)
