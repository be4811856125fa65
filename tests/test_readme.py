"""What README.md and docs/ show works: every Python block runs, a page's blocks in their order, in one namespace; every command exists.

This machine has no GPU and no network, so `HERE` replaces the GPU and the model. `pipe` is a small pipeline; the page
says that it is the reader's.
"""

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
HERE = {'"meta-llama/Llama-3.1-8B-Instruct"': '"models/stdlib-llama"', '"cuda"': '"cpu"'}


def blocks(page: str) -> list[tuple[int, str]]:
    """Each block's first line and its code."""
    text = (ROOT / page).read_text()
    return [(text.count("\n", 0, match.start("code")) + 1, match["code"]) for match in BLOCK.finditer(text)]


def run(page: str, monkeypatch, folder=ROOT, **namespace) -> tuple[dict, str, list[torch.Tensor]]:
    """The namespace after all blocks, what they print in `folder`, and the tensors named `out`, one a block."""
    monkeypatch.chdir(folder)
    printed, outs = io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        for line, code in blocks(page):
            for theirs, ours in HERE.items():
                code = code.replace(theirs, ours)
            exec(compile("\n" * (line - 1) + code, ROOT / page, "exec"), namespace)  # an error names the page's line
            if "out" in namespace:
                outs.append(namespace.pop("out"))
    return namespace, printed.getvalue(), outs


def pipeline():
    """A Wan pipeline with random weights that takes a prompt, and makes 50 steps of a tiny video."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline, WanTransformer3DModel

    class Pipeline(WanPipeline):
        def __call__(self, prompt, **options):
            given = {"prompt_embeds": torch.randn(1, 16, 32), "guidance_scale": 1.0, "output_type": "latent"}
            return super().__call__(**given, height=16, width=16, num_frames=1, num_inference_steps=50, **options)

    transformer = WanTransformer3DModel(
        num_attention_heads=1, attention_head_dim=64, text_dim=32, freq_dim=32, ffn_dim=64, num_layers=5, rope_max_seq_len=64
    )  # fmt: skip
    pipe = Pipeline(None, None, None, FlowMatchEulerDiscreteScheduler(), transformer=transformer)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(("page", "least"), [("README.md", 3), ("docs/quickstart.md", 8), ("docs/export.md", 1), ("docs/evaluation.md", 1)])
def test_every_block_is_found(page, least):
    assert len(blocks(page)) == (ROOT / page).read_text().count("```python") >= least


def test_every_page_with_blocks_is_run():
    assert {page for page in PAGES if blocks(page)} == {"README.md", "docs/quickstart.md", "docs/export.md", "docs/evaluation.md"}


@pytest.mark.parametrize("page", PAGES)
def test_no_line_begins_with_a_generated_number(page):
    """A comment at the beginning of a line begins a block of HTML, in which Markdown is not read."""
    assert not re.findall(r"^ *<!-- results: [\w-]+ -->\S.*", (ROOT / page).read_text(), re.MULTILINE)


def test_readme_runs(monkeypatch):
    pytest.importorskip("transformers")
    _, printed, outs = run("README.md", monkeypatch)
    assert printed.startswith("The KV cache of a language model")
    assert "2 of 4 calls in FP8" in printed  # of the encoder: the first and last layer stay as they are
    assert [tuple(out.shape) for out in outs] == [(1, outs[0].shape[1]), (600, 32, 128), (1, 512, 512)]
    assert all(out.isfinite().all() for out in outs)


def test_quickstart_runs(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    namespace, printed, outs = run("docs/quickstart.md", monkeypatch, pipe=pipeline())
    assert all(out.isfinite().all() for out in outs)
    assert "a mask is given" in printed  # the reason why a call goes to PyTorch
    reasons = {row.reason for row in namespace["report"].rows if row.name == "blocks.2.attn1"}
    assert reasons == {"left out by steps", "shorter than 8192 tokens"}  # the calls of the small pipeline are short


def test_export_runs(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from fp8attn import calibrate

    shutil.copytree(ROOT / "models/stdlib-llama", tmp_path / "MODEL")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "MODEL")
    calibrate(model, [torch.arange(64)[None]], key_dtype="e4m3", rotate_keys=False).save(tmp_path / "scales.safetensors")
    _, printed, _ = run("docs/export.md", monkeypatch, tmp_path)
    assert printed.startswith("vllm serve MODEL-FP8-KV --kv-cache-dtype fp8")


def test_evaluation_runs(monkeypatch):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from fp8attn import AttentionPolicy
    from fp8attn.integrations.transformers import FP8Cache

    model = AutoModelForCausalLM.from_pretrained(ROOT / "models/stdlib-llama")
    windows, other_windows = torch.arange(66).view(2, 1, 33)
    given = {"model": model, "windows": windows, "other_windows": other_windows, "FP8Cache": FP8Cache, "AttentionPolicy": AttentionPolicy}
    namespace, printed, _ = run("docs/evaluation.md", monkeypatch, **given)
    assert printed.startswith("--kv-cache-dtype fp8")
    assert namespace["policy"].skip == namespace["chosen"]


def commands(page: str) -> list[list[str]]:
    """The words after `fp8attn` of every command that a page shows, in a block or in a line."""
    text = (ROOT / page).read_text()
    fenced = "".join(re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    shown = re.findall(r"^fp8attn (.*)$", fenced, re.MULTILINE) + re.findall(r"`fp8attn ([a-z][^`\n]*)`", text)
    return [shlex.split(line, comments=True) for line in shown]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page):
    pytest.importorskip("typer")
    from typer.main import get_command

    from fp8attn.cli.app import app

    for words in commands(page):
        command = get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        assert {word.strip("[]") for word in words if word.strip("[").startswith("--")} <= known, (page, command.name, words)
        assert not getattr(command, "commands", {}) or command.name == "evaluate", (page, words)
