"""What README.md and docs/ show works: every Python block runs, README's each alone, a page's in their order in one
namespace; every command exists.

This machine has no network, so `HERE` replaces the model.
"""

import contextlib
import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch

import fp8attn

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
PAGES = ["README.md", *(str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md")))]
HERE = {'"meta-llama/Llama-3.1-8B-Instruct"': '"models/stdlib-llama"'}


def blocks(page: str) -> list[tuple[int, str]]:
    """Each block's first line and its code."""
    text = (ROOT / page).read_text()
    return [(text.count("\n", 0, match.start("code")) + 1, match["code"]) for match in BLOCK.finditer(text)]


def run(page: str, monkeypatch, folder=ROOT, alone: bool = False, **given) -> tuple[dict, str, list[torch.Tensor]]:
    """The namespace after all blocks, what they print in `folder`, and the tensors named `out`, one a block. `alone`:
    each in its own.
    """
    monkeypatch.chdir(folder)
    printed, outs, namespace = io.StringIO(), [], dict(given)
    with contextlib.redirect_stdout(printed):
        for line, code in blocks(page):
            for theirs, ours in HERE.items():
                code = code.replace(theirs, ours)
            namespace = dict(given) if alone else namespace
            exec(compile("\n" * (line - 1) + code, ROOT / page, "exec"), namespace)  # an error names the page's line
            if "out" in namespace:
                outs.append(namespace.pop("out"))
    return namespace, printed.getvalue(), outs


def shown(code: str) -> str:
    """The output that the comments at the end of a block show."""
    comments = re.search(r"(?:^#.*\n)+\Z", code, re.MULTILINE)
    return re.sub(r"^# ?", "", comments[0], flags=re.MULTILINE)


@pytest.mark.parametrize(
    ("page", "least"), [("README.md", 2), ("docs/quickstart.md", 8), ("docs/export.md", 1), ("docs/evaluation.md", 1)]
)
def test_every_block_is_found(page, least):
    assert len(blocks(page)) == (ROOT / page).read_text().count("```python") >= least


def test_every_page_with_blocks_is_run():
    assert {page for page in PAGES if blocks(page)} == {
        "README.md",
        "docs/quickstart.md",
        "docs/export.md",
        "docs/evaluation.md",
        "docs/latent.md",
    }


def test_the_page_on_latents_runs(monkeypatch):
    _, _, (out,) = run("docs/latent.md", monkeypatch)
    assert out.shape == (300, 16, 512) and out.isfinite().all()


@pytest.mark.parametrize("page", PAGES)
def test_no_line_begins_with_a_generated_number(page):
    """A comment at the beginning of a line begins a block of HTML, in which Markdown is not read."""
    assert not re.findall(r"^ *<!-- results: [\w-]+ -->\S.*", (ROOT / page).read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if not page.startswith("docs/lab/")])
def test_no_table_cell_is_an_essay(page):
    """A reader of a table compares short cells. What is longer is a section."""
    rows = re.findall(r"^\|(.*)\|$", (ROOT / page).read_text(), re.MULTILINE)
    assert not [cell for row in rows for cell in row.split(" | ") if len(cell.strip()) > 200]


def test_every_block_of_readme_runs_alone_and_prints_what_is_shown(monkeypatch):
    pytest.importorskip("transformers")
    _, printed, outs = run("README.md", monkeypatch, alone=True)
    assert shown(blocks("README.md")[0][1]) in printed.replace("<|endoftext|>", "")
    assert "1 of 1 calls in FP8" in printed and "# 1 of 1 calls in FP8" in blocks("README.md")[1][1]
    assert [tuple(out.shape) for out in outs] == [(1, outs[0].shape[1]), (1, 8, 600, 128)]
    assert all(out.isfinite().all() for out in outs)


def test_readme_begins_with_what_it_is_a_picture_and_two_commands_that_exist():
    """Within 14 lines. Nothing in the block has to be filled in."""
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 95
    before, block, _ = text.split("```", 2)
    assert before.startswith("# fp8attn\n\n") and before.count("\n") <= 14 and block.startswith("sh\n")
    [picture] = re.findall(r"^!\[[^\]]+\]\((\S+)\)$", before, re.MULTILINE)
    assert (ROOT / picture).is_file() and "GiB in BF16" in before
    [targets] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = [line.partition("#")[0].strip() for line in block.splitlines()[1:]]
    assert [command for command in commands if command] == ["make demo", "make test"]
    assert {"demo", "test"} <= set(targets.split())


MODEL_TYPES = {
    "Llama 3": "llama", "Qwen 2.5": "qwen2", "Qwen 3": "qwen3", "Qwen 3.5": "qwen3_5_text", "Gemma 2": "gemma2",
    "Gemma 3": "gemma3_text",
    "Gemma 4": "gemma4_text", "Mistral": "mistral", "Phi 4": "phi3", "GLM 4": "glm4", "gpt-oss": "gpt_oss",
    "DeepSeek V3": "deepseek_v3", "Kimi": "kimi_linear", "GLM 5": "glm_moe_dsa", "DeepSeek V3.2": "deepseek_v32",
    "Hunyuan 4": "hy_v4",
}  # fmt: skip


def test_readme_names_the_models_that_families_names():
    served, refused = (ROOT / "docs/families.md").read_text().split("## Served")[1].split("## Refused")
    refused = refused.split("## Not tried")[0]
    text = (ROOT / "README.md").read_text().replace("\n", " ")
    works, fails = (re.search(rf"{begin} with: (.*?)( and \[| \()", text)[1].split(", ") for begin in ("Works", "Not"))
    for names, section in ((works, served), (fails, refused)):
        assert len(names) >= 3
        for name in names:
            assert re.search(rf"[ ,]{MODEL_TYPES[name]}[ ,]", section), name
    assert {*works, *fails} == MODEL_TYPES.keys()


def test_a_row_of_readmes_table_has_one_number_a_cell():
    """And each has fp8attn's beside that of BF16 and of a cast."""
    table = (ROOT / "README.md").read_text().split("<!-- results: headline -->")[1].split("<!-- /results -->")[0]
    head, _, *rows = (line.strip("| ").split(" | ") for line in table.strip().splitlines())
    assert head[1:] == ["BF16", "plain cast to FP8", "fp8attn"] and 4 <= len(rows) <= 5
    assert all(re.fullmatch(r"[+-]?\d+(\.\d+)?", cell) for row in rows for cell in row[1:]), rows


def test_the_line_that_quickstart_begins_with_gives_an_answer_that_makes_sense(monkeypatch, capsys):
    pytest.importorskip("typer")
    pytest.importorskip("transformers")
    from fp8attn_tools.cli import main

    [line] = re.findall(r"^fp8attn generate \$'(.*)$", (ROOT / "docs/quickstart.md").read_text(), re.MULTILINE)
    quoted, _, options = line.partition("#")[0].partition("'")
    prompt = quoted.replace("\\n", "\n")  # as bash reads $'...'
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", ["fp8attn", "generate", prompt, *options.split()])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert not exit_.value.code
    [code] = re.findall(r"^def .*?(?=\nthe cache holds)", capsys.readouterr().out, re.MULTILINE | re.DOTALL)
    assert code.startswith(prompt) and code.endswith("return f.read()")
    compile(code, "docs/quickstart.md", "exec")


def test_a_key_that_stands_out_costs_its_page_what_readme_says():
    torch.manual_seed(0)
    k, v = torch.randn(2, 128, 8, 128)
    k[50] *= 30
    others = torch.arange(128) != 50
    for key_dtype, error in (("int8", "23% in INT8"), ("e4m3", "3% in FP8")):
        cache = fp8attn.PagedKVCache(num_kv_heads=8, head_dim=128, num_layers=1, num_seqs=1, key_dtype=key_dtype)
        cache.append(0, k, v)
        stored = cache.read(0, 0)[0]
        assert f"{float((stored - k)[others].norm() / k[others].norm()):.0%}" == error.split()[0]
        assert error in (ROOT / "README.md").read_text()


def test_quickstart_runs(monkeypatch):
    pytest.importorskip("transformers")
    pytest.importorskip("diffusers")
    assert (ROOT / "docs/quickstart.md").read_text().count('"cuda"') == 1  # where `device` is chosen
    namespace, printed, outs = run("docs/quickstart.md", monkeypatch)
    assert all(out.isfinite().all() for out in outs)
    assert "a mask is given" in printed  # the reason why a call goes to PyTorch
    # 3 steps, 4 blocks, self and cross attention: not the first step, the outer blocks and the prompt.
    assert "4 of 24 calls in FP8" in printed
    assert {row.reason for row in namespace["report"].rows if row.name == "blocks.2.attn1"} == {
        None,
        "left out by steps",
    }


def test_export_runs(monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    from transformers import AutoModelForCausalLM

    from fp8attn_tools import calibrate

    shutil.copytree(ROOT / "models/stdlib-llama", tmp_path / "MODEL")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "MODEL")
    calibrate(model, [torch.arange(64)[None]], key_dtype="e4m3", rotate_keys=False).save(
        tmp_path / "scales.safetensors"
    )
    _, printed, _ = run("docs/export.md", monkeypatch, tmp_path)
    assert printed.startswith("vllm serve MODEL-FP8-KV --kv-cache-dtype fp8")


def test_evaluation_runs(monkeypatch):
    pytest.importorskip("transformers")
    namespace, printed, _ = run("docs/evaluation.md", monkeypatch)
    assert printed.startswith("--kv-cache-dtype fp8")
    assert namespace["policy"].skip == namespace["chosen"]


def commands(page: str) -> list[list[str]]:
    """The words after `fp8attn` of every command that a page shows, in a block or in a line."""
    text = (ROOT / page).read_text()
    fenced = "".join(re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    shown = re.findall(r"^fp8attn (.*)$", fenced, re.MULTILINE) + re.findall(r"`fp8attn ([a-z][^`\n]*)`", text)
    return [shlex.split(line, comments=True) for line in shown]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists(page):
    pytest.importorskip("typer")
    from typer.main import get_command

    from fp8attn_tools.cli.app import app

    for words in commands(page):
        command = get_command(app)
        while words and words[0] in getattr(command, "commands", {}):
            command = command.commands[words.pop(0)]
        known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)} | {"--help"}
        assert {word.strip("[]") for word in words if word.strip("[").startswith("--")} <= known, (
            page,
            command.name,
            words,
        )
        assert not getattr(command, "commands", {}) or command.name == "evaluate", (page, words)
