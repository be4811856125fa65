"""The evaluations against direct computation, and with a model whose use of its cache is known."""

import json
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

transformers = pytest.importorskip("transformers")

import fp8attn  # noqa: E402
from fp8attn import UsageError  # noqa: E402
from fp8attn.integrations.transformers import FP8Cache  # noqa: E402
from fp8attn_tools import calibrate  # noqa: E402
from fp8attn_tools.evaluation import models, needle, record  # noqa: E402
from fp8attn_tools.evaluation.caches import BF16Cache, E4M3Cache, cache_factory, cache_names, greedy, prefill  # noqa: E402
from fp8attn_tools.evaluation.names import CACHES  # noqa: E402
from fp8attn_tools.evaluation.outcomes import same_outcomes, score  # noqa: E402
from fp8attn_tools.evaluation.perplexity import by_token, perplexity  # noqa: E402
from fp8attn_tools.evaluation.recall import recall_samples  # noqa: E402

# models


def test_load(loaded):
    model, tokenizer = loaded
    assert model.dtype == torch.float32  # 16-bit products are slow on a CPU
    assert model.config._attn_implementation == "fp8_kv"
    assert not model.training
    assert models.tokenize(tokenizer, "ab\n").tolist() == tokenizer("ab\n")["input_ids"]


def test_outside_a_checkout(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "__file__", str(tmp_path / "a/b/c/d.py"))
    monkeypatch.chdir(tmp_path)
    assert models.committed_model() is None
    monkeypatch.setattr(models, "find", lambda name: tmp_path / f"{name}.gguf")
    assert models.default_model() == "smollm2"

    def missing(name):
        raise UsageError(f"the model {name!r} needs gguf")

    monkeypatch.setattr(models, "find", missing)
    with pytest.raises(
        UsageError,
        match=r"pass a model's folder or a Hugging Face id .* smollm2 is used if it is installed: .* needs gguf",
    ):
        models.default_model()
    assert "import" in models.read_text()  # the standard library's source


def test_texts(tmp_path, tiny_model):
    with pytest.raises(ValueError, match="no such text file: nowhere"):
        models.read_text("nowhere")
    (tmp_path / "a.txt").write_text("héllo")
    assert models.read_text(tmp_path / "a.txt") == "héllo"
    (tmp_path / "b.txt").write_bytes(b"\xff")
    (tmp_path / "c.xz").write_bytes(b"no archive")
    for name in ("b.txt", "c.xz"):
        with pytest.raises(UsageError, match=f"{name} cannot be read as text"):
            models.read_text(tmp_path / name)
    assert len(models.read_text(model=tiny_model)) == 16384


def test_windows():
    tokens = torch.arange(10)
    assert models.windows(tokens, 4, 2).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert models.windows(tokens, 4, 2, from_end=True).tolist() == [[2, 3, 4, 5], [6, 7, 8, 9]]
    with pytest.raises(ValueError, match="3 windows of 4 tokens need 12, and the text has 10"):
        models.windows(tokens, 4, 3)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        models.windows(tokens, 1, 3)


# caches


def test_bf16_cache_stores_bf16_and_answers_in_the_models_dtype(loaded):
    cache = BF16Cache(loaded[0].config)
    k, v = torch.randn(1, 2, 5, 64), torch.randn(1, 2, 5, 64)
    cache.update(k[:, :, :3], v[:, :, :3], 0)
    keys, values = cache.update(k[:, :, 3:], v[:, :, 3:], 0)
    assert keys.dtype == torch.float32
    assert torch.equal(keys, k.bfloat16().float())
    assert torch.equal(values, v.bfloat16().float())
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert cache.nbytes == 2 * 5 * 2 * 64 * 2


def test_bf16_cache_with_sliding_layers():
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=4
    )
    cache = BF16Cache(config)
    for layer in (0, 1):
        for _ in range(3):
            cache.update(torch.randn(1, 1, 3, 64), torch.randn(1, 1, 3, 64), layer)
        assert cache.layers[layer].keys.dtype == torch.bfloat16
    assert (cache.layers[0].keys.shape[2], cache.layers[1].keys.shape[2]) == (3, 9)


def test_a_plain_cast_rounds_once_and_saturates():
    layer = E4M3Cache(transformers.LlamaConfig(num_hidden_layers=1)).layers[0]
    k, v = torch.tensor([0.0, 1.0, 1.0625, 1.1, 449.0, -1e4, 2.0**-10]), torch.linspace(-3, 3, 7)
    want = torch.tensor(
        [0.0, 1.0, 1.0, 1.125, 448.0, -448.0, 0.0]
    )  # 3 bits behind the first, ties to even, up to 448, from 2^-9 on
    layer.update(k.expand(1, 2, 3, 7), v.expand(1, 2, 3, 7))
    keys, values = layer.update(k.expand(1, 2, 2, 7), v.expand(1, 2, 2, 7))
    assert torch.equal(keys, want.expand(1, 2, 5, 7))
    assert torch.equal(values, v.to(torch.float8_e4m3fn).float().expand(1, 2, 5, 7))
    assert layer.get_seq_length() == 5
    assert layer.keys.nbytes == 2 * 5 * 7


def test_a_plain_cast_of_windows():
    """Layer 0 has a window of 4, so it holds 3 tokens, and a step sees them beside its own."""
    config = transformers.Gemma3TextConfig(
        num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"], sliding_window=4
    )
    plain, cast = (E4M3Cache(config, windows=windows) for windows in (False, True))
    x = torch.randn(1, 1, 6, 64, generator=torch.Generator().manual_seed(0))
    rounded = x.to(torch.float8_e4m3fn).float()
    for cache, window in ((plain, x), (cast, rounded)):
        cache.update(x[:, :, :5], x[:, :, :5], 0)
        for layer, want in ((0, window[:, :, 2:]), (1, rounded[:, :, 5:])):
            assert all(torch.equal(got, want) for got in cache.update(x[:, :, 5:], x[:, :, 5:], layer))
    assert (plain.layers[0].keys.nbytes, cast.layers[0].keys.nbytes) == (4 * 3 * 64, 3 * 64)
    assert (
        type(E4M3Cache(config, windows=True, skip_layers=(0,)).layers[0])
        is transformers.cache_utils.DynamicSlidingWindowLayer
    )


def test_one_scale_a_tensor_is_as_in_transformers():
    if not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip("this transformers has no FP8 cache")
    config = transformers.LlamaConfig(
        num_hidden_layers=1, hidden_size=64, intermediate_size=64, num_attention_heads=2, vocab_size=9
    )
    theirs, ours = (
        cache_factory("transformers-fp8", transformers.LlamaForCausalLM(config))(),
        E4M3Cache(config, scale=None, first_exact=True),
    )
    torch.manual_seed(0)
    for length, size in ((5, 3.0), (1, 2.0), (4, 9.0)):  # the last is larger than the first scale holds
        k, v = (size * torch.randn(1, 2, length, 64).bfloat16() for _ in "kv")
        for want, got in zip(theirs.update(k, v, 0), ours.update(k, v, 0), strict=True):
            assert torch.equal(want.nan_to_num(777.0), got.nan_to_num(777.0))  # NaN where a cast beyond 448 gives that


def test_cache_names_and_factory(loaded):
    model = loaded[0]
    assert cache_names("both") == ("bf16", "fp8")
    assert cache_names("fp8") == ("fp8",)
    scales = calibrate(model, [torch.arange(50)[None]])
    assert cache_names("both", scales) == ("bf16", "fp8-static")
    assert cache_names("bf16,fp8,fp8-static", scales) == ("bf16", "fp8", "fp8-static")
    with pytest.raises(
        ValueError, match="no cache of 'bf16,fp8-e4m3-keys' uses the scales; add fp8-static, or leave the scales out"
    ):
        cache_names("bf16,fp8-e4m3-keys", scales)
    with pytest.raises(ValueError, match="no cache is called 'int4'; choose bf16, fp8, both"):
        cache_names("bf16,int4")
    with pytest.raises(ValueError, match="no cache is called 'int4'"):
        cache_factory("int4", model)
    with pytest.raises(ValueError, match=r"'fp8-static' needs scales; pass scales=KVScales.load"):
        cache_factory("fp8-static", model)
    with pytest.raises(ValueError, match="'bf16' takes no scales"):
        cache_factory("bf16", model, scales=scales)
    names = [*CACHES][: None if hasattr(transformers.cache_utils, "Fp8QuantizedLayer") else -1]
    for name in names:
        make = cache_factory(name, model, scales=scales if name == "fp8-static" else None)
        assert make() is not make()
        prefill(model, torch.arange(20)[None], make())
    # What each stores keys in; the model's biases are less than several deviations.
    formats = {
        "fp8": ("int8", True),
        "fp8-int8-keys": ("int8", True),
        "fp8-e4m3-keys": ("e4m3", True),
        "fp8-e4m3-plain": ("e4m3", False),
    }
    for name, expected in formats.items():
        cache = cache_factory(name, model)()
        assert (cache.options.key_dtype, cache.layers[0].rotate_keys) == expected
    plain = calibrate(model, [torch.arange(50)[None]], key_dtype="e4m3", rotate_keys=False)
    cache = cache_factory("fp8-static", model, scales=plain)()
    assert (cache.options.key_dtype, cache.layers[0].rotate_keys, cache.layers[0].scales) == (
        "e4m3",
        False,
        plain.layer(0),
    )


def test_greedy_is_generate(loaded, tokens):
    model = loaded[0]
    prompt = tokens[None, :70]
    for name in ("bf16", "fp8"):
        make = cache_factory(name, model)
        want = model.generate(
            prompt, past_key_values=make(), max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0
        )
        assert torch.equal(greedy(model, prompt, make(), 12), want[:, 70:])


# perplexity


@torch.no_grad()
def direct(model, windows):
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction="none").view(len(windows), -1)


@pytest.mark.parametrize("chunk", [64, 100, 1000])
def test_perplexity_is_that_of_a_plain_forward(loaded, tokens, chunk):
    model, tokenizer = loaded
    windows = models.windows(tokens, 301, 2)
    exact = {"exact": lambda: transformers.DynamicCache(config=model.config)}
    (row,) = perplexity(model, windows, exact, chunk=chunk, tokenizer=tokenizer)
    want = direct(model, windows).mean().item()
    assert row.nll == pytest.approx(want, rel=1e-5)
    assert row.ppl == pytest.approx(math.exp(want), rel=1e-4)
    assert (row.mode, row.context, row.tokens, row.kl, row.top1_agreement) == ("chunks", 300, 600, 0.0, 1.0)
    assert row.bits_per_byte == pytest.approx(want / math.log(2), rel=1e-5)  # a token of this tokenizer is a byte
    assert math.isnan(row.bytes_per_token)  # transformers' cache does not say
    losses = direct(model, windows)
    assert [(p.start, p.stop, p.tokens) for p in row.positions] == [(0, 256, 512), (256, 300, 88)]
    assert [p.nll for p in row.positions] == pytest.approx(
        [losses[:, :256].mean().item(), losses[:, 256:].mean().item()], rel=1e-5
    )


def test_decoding_predicts_the_last_tokens(loaded, tokens):
    model, _ = loaded
    windows, calls = models.windows(tokens, 201, 2), []
    exact = {"exact": lambda: transformers.DynamicCache(config=model.config)}
    (row,) = perplexity(model, windows, exact, decode_tokens=20, progress=lambda *done: calls.append(done))
    assert row.nll == pytest.approx(direct(model, windows)[:, -20:].mean().item(), rel=1e-5)
    assert (row.mode, row.tokens) == ("decode", 40)
    assert math.isnan(row.bits_per_byte)
    assert calls == [(done, 40) for done in range(1, 41)]
    with pytest.raises(ValueError, match="decode_tokens must be 0 to 200, the tokens of a window; got 201"):
        perplexity(model, windows, exact, decode_tokens=201)


def test_fp8_beside_bf16(loaded, tokens):
    model, _ = loaded
    scales = calibrate(model, [tokens[None, -500:]])
    caches = {
        name: cache_factory(name, model, scales=scales if name == "fp8-static" else None)
        for name in ("bf16", "fp8", "fp8-static")
    }
    for decode in (0, 10):
        bf16, fp8, static = perplexity(model, models.windows(tokens, 257, 2), caches, decode_tokens=decode, chunk=100)
        assert bf16.kl == bf16.standard_error == 0
        for row in (fp8, static):
            assert abs(row.nll - bf16.nll) < 5 * row.standard_error < 0.1
            assert row.nll == pytest.approx(bf16.nll, rel=0.02)
            assert 0 < row.kl < 0.05
            assert row.top1_agreement > 0.8
            assert sum(p.kl * p.tokens for p in row.positions) == pytest.approx(row.kl * row.tokens)
        assert bf16.bytes_per_token == 2 * 2 * 2 * 64 * 2
        cache = FP8Cache(model)
        prefill(model, tokens[None, :256], cache)
        assert fp8.bytes_per_token == cache.nbytes / 256


def test_runs_of_several_models(loaded, tokens):
    """The first model is what divergences are from; the second one's predictions are known from plain forwards."""
    model, _ = loaded
    other = transformers.AutoModelForCausalLM.from_config(model.config, dtype=torch.float32).eval()
    windows = models.windows(tokens, 101, 2)
    make = lambda: transformers.DynamicCache(config=model.config)  # noqa: E731
    found, held = by_token(
        {"first": (model, make), "again": (model, make), "other": (other, make)}, windows, start=60, step=25
    )
    with torch.no_grad():
        first, second = (
            m(input_ids=windows[:, :-1], use_cache=False).logits[:, 60:].double().log_softmax(-1)
            for m in (model, other)
        )
    want = [
        direct(other, windows)[:, 60:],
        (first.exp() * (first - second)).sum(-1),
        first.argmax(-1) == second.argmax(-1),
    ]
    for got, expected in zip(found["other"], want, strict=True):
        torch.testing.assert_close(
            got, expected.double(), rtol=1e-4, atol=1e-5
        )  # float32's rounding through two layers
    assert torch.equal(found["first"], found["again"])
    assert found["first"][1].abs().max() == 0 and found["first"][2].min() == 1
    assert all(math.isnan(size) for size in held.values())


# records


def test_json_of_results(loaded, tokens, tmp_path):
    model, _ = loaded
    rows = perplexity(model, models.windows(tokens, 33, 1), {"bf16": cache_factory("bf16", model)})
    record.write_json(tmp_path / "a" / "r.json", {"rows": rows, "meta": record.meta(model)})
    written = json.loads((tmp_path / "a" / "r.json").read_text())
    assert written["rows"][0]["ppl"] == pytest.approx(rows[0].ppl)
    assert written["rows"][0]["bits_per_byte"] is None  # NaN is not JSON
    assert set(written["meta"]) == {"device", "fp8attn", "commit", "torch", "date", "model"}
    assert (written["meta"]["model"], written["meta"]["fp8attn"]) == ("tiny-llama", fp8attn.__version__)


def test_commit(monkeypatch, tmp_path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "first"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    monkeypatch.setattr(record, "__file__", str(tmp_path / "src/fp8attn_tools/evaluation/record.py"))
    assert record.commit.__wrapped__() == head
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "new.py").touch()
    assert record.commit.__wrapped__() == head + "+"


def test_the_commit_of_an_install_from_git(monkeypatch, tmp_path):
    class Installed:
        def read_text(self, name):
            return '{"vcs_info": {"commit_id": "abc"}}' if name == "direct_url.json" else None

    monkeypatch.setattr(record, "__file__", str(tmp_path / "a/b/c/d.py"))
    monkeypatch.setattr(record.importlib.metadata, "distribution", lambda name: Installed())
    assert record.commit.__wrapped__() == "abc"


@pytest.mark.slow
def test_imports_need_the_extra_eval_alone():
    names = [
        "caches",
        "drift",
        "models",
        "needle",
        "outcomes",
        "paired",
        "perplexity",
        "public",
        "recall",
        "record",
        "ruler",
    ]
    names += ["sensitivity"]
    code = "import sys\nfor name in ('rich', 'typer', 'matplotlib', 'lm_eval', 'tqdm.rich'): sys.modules[name] = None\n"
    code += "import fp8attn_tools.evaluation\n" + "\n".join(f"import fp8attn_tools.evaluation.{name}" for name in names)
    subprocess.run([sys.executable, "-c", code], check=True)


# the claim, on the model of this repository


@pytest.mark.slow
@pytest.mark.skipif(models.committed_model() is None, reason="the committed model is not here")
def test_the_committed_model_says_the_same_through_fp8():
    model, tokenizer = models.load()
    text = models.read_text()
    caches = {name: cache_factory(name, model) for name in ("bf16", "fp8")}
    bf16, fp8 = perplexity(model, models.windows(models.tokenize(tokenizer, text), 1025, 1), caches)
    assert fp8.ppl == pytest.approx(bf16.ppl, rel=0.006)  # four standard errors of so few tokens
    assert fp8.kl < 1.5e-3  # a plain cast's is 4.3e-3
    samples = recall_samples(tokenizer, text, lengths=(1024,), depths=(0.1, 0.9), samples=1)
    found = needle.ask(model, tokenizer, samples, caches)
    assert same_outcomes(found, "bf16", "fp8")
    assert score(found, "fp8") == 1.0
