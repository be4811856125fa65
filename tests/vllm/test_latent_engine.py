"""vLLM engines with latent attention (MLA) on a CPU, whose platform is told to serve latents in 8 bits
(`run_engine.serve_latents`): a random model, and a trained one. Each engine takes 15 to 30 seconds.
"""

import json
from itertools import chain

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("vllm")
pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla", reason="this vLLM has no latent attention on CPUs")

from fp8attn.integrations.vllm import ON_CPU
from tests.integrations.engine.models import deepseek_v3
from tests.support.near_ties import check_near_ties
from tests.vllm.engines import LATENTS, answers, engine
from tests.vllm.run_engine import ROPE_OF_LATENTS

LENGTHS, ANSWER = (700, 30, 400), 24  # tokens of the prompts, and of their answers
OPTIONS = {"skip_tokenizer_init": True, "dtype": "bfloat16"} | ROPE_OF_LATENTS


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latents")
    deepseek_v3().bfloat16().save_pretrained(folder / "model")
    torch.manual_seed(1)
    (folder / "windows.json").write_text(json.dumps([torch.randint(2, 500, (n,)).tolist() for n in LENGTHS]))
    return folder


def run(folder, ours=True, **options):
    """What an engine finds."""
    eight_bits = {"kv_cache_dtype": "fp8", "latents": True} if ours else {}
    files = folder / "model", folder / "windows.json", folder / "found.json"
    return engine(*files, {ON_CPU: str(int(ours))}, **OPTIONS | {"answer": ANSWER} | eight_bits | options)


@pytest.fixture(scope="module")
def exact(folder):
    """An engine of vLLM's own, with latents in BF16."""
    return run(folder, ours=False)


@pytest.fixture(scope="module")
def whole(folder):
    """An engine with latents in 8 bits that takes prompts whole."""
    return run(folder)


def nats(result, expected):
    """The mean difference of log-probabilities: of prompts, and of answers where both have made the same tokens."""
    prompts = torch.tensor(list(chain(*result["logprobs"]))) - torch.tensor(list(chain(*expected["logprobs"])))
    answers = []
    for one, other in zip(chain(*result["answers"]), chain(*expected["answers"]), strict=True):
        for token, same, x, y in zip(one["tokens"], other["tokens"], one["logprobs"], other["logprobs"], strict=True):
            if token != same:
                break
            answers.append(x - y)
    means = float(prompts.abs().mean()), float(torch.tensor(answers).abs().mean())
    print(f"{len(answers)} tokens, {means[0]:.4f} and {means[1]:.4f} nats")
    assert len(answers) > ANSWER * len(LENGTHS)
    return means


def test_a_prompt_is_exact_and_an_answer_close(exact, whole):
    """A whole prompt attends in 16 bits to its own tokens, as in vLLM's engine; a decode to the pages."""
    prompts, answers = nats(whole, exact)
    assert prompts == 0.0 and 0.0 < answers < 0.05
    assert whole["answers"][0] == whole["answers"][1]


@pytest.mark.parametrize("options", [{}, {"block_size": 256}], ids=["128", "256"])
def test_chunks_and_prefix_caching(folder, exact, options):
    """Chunks and hits of the prefix cache read the tokens before them from the pages, in blocks of one page or two."""
    ours = run(folder, max_num_batched_tokens=256, enable_prefix_caching=True, reload=True, **options)
    prompts, answers = nats(ours, exact)
    assert 0.0 < prompts < 0.05 and 0.0 < answers < 0.05
    size = options.get("block_size", 128)
    first, again = ([one["cached"] for one in answer] for answer in ours["answers"])
    assert first == [0] * len(LENGTHS) and again == [(length - 1) // size * size for length in LENGTHS]
    # After the weights have been reloaded, too.
    assert nats({"answers": ours["answers"], "logprobs": ours["again"]["logprobs"]}, exact)[0] < 0.05


def test_sleep(folder):
    """Of both levels. Blocks are discarded, and computed again."""
    result = run(folder, max_num_batched_tokens=256, enable_prefix_caching=True, sleep=True)
    assert sorted(result["awake"]) == ["1", "2"]
    for awake in result["awake"].values():
        assert awake["logprobs"] == result["logprobs"] and awake["answers"] == result["answers"]


def save_draft_layer(folder):
    """Give a checkpoint the layer that makes drafts (MTP): its last one, beside a projection that passes the token's
    embedding and some of the hidden state. It is not trained, so most drafts are rejected.
    """
    weights = load_file(folder / "model.safetensors")
    last, embeddings = "model.layers.1.", weights["model.embed_tokens.weight"]
    layer = {name.removeprefix(last): x for name, x in weights.items() if name.startswith(last)}
    norm, eye = weights["model.norm.weight"], torch.eye(embeddings.shape[1], dtype=torch.bfloat16)
    layer |= {"embed_tokens.weight": embeddings, "shared_head.head.weight": weights["lm_head.weight"]}
    layer |= {name: norm.clone() for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    layer["eh_proj.weight"] = torch.cat([eye, 0.5 * eye], 1)
    weights |= {f"model.layers.2.{name}": x.clone() for name, x in layer.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_drafts(folder, exact, method):
    """Drafts of the model's own draft layer, which has pages, too, and of n-grams: several tokens of a request are
    verified by absorbed queries.
    """
    speculation = {"method": method, "num_speculative_tokens": 3}
    if method == "mtp":
        save_draft_layer(folder / "model")
    else:
        speculation["prompt_lookup_max"] = 3
    options = {"max_num_batched_tokens": 512, "enable_prefix_caching": True}
    found = run(folder, speculative_config=speculation, **options)
    prompts, own = nats(found, exact)
    assert prompts < 0.05 and 0.0 < own < 0.05
    cached = [one["cached"] for one in found["answers"][1]]
    # vLLM computes the last block of a hit again for a draft layer, which needs the hidden states of its tokens.
    assert cached == ([640, 0, 384] if method == "ngram" else [512, 0, 256])


@pytest.fixture(scope="module")
def trained():
    """Answers of a trained model to 20 whole prompts."""
    return answers("plain", **LATENTS)


@pytest.mark.parametrize(("way", "chunk"), [("ngram", 4096), ("eagle", 256)])
def test_a_trained_model(trained, way, chunk):
    """Drafts by n-grams, and chunks with drafts by an EAGLE head that caches keys and values."""
    found = answers(way, **LATENTS, max_num_batched_tokens=chunk, disable_log_stats=False)
    check_near_ties(found, trained)
    assert way == "eagle" or found["accepted"] > 200
