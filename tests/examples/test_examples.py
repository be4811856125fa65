"""Every file of `examples/` runs as its docstring says, at small size: on a CPU, with the committed model or random
weights.
"""

import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
PROMPT = "def parse_header(line):\n"


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example with command line arguments, and returns what it prints."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_has_a_test():
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_docstring_gives_the_command(path):
    assert f"\n    python examples/{path.name}" in path.read_text().split('"""')[1]


def test_generate_and_static_compiled_give_the_same_text(run):
    pytest.importorskip("transformers")
    growing = run("generate.py", "--prompt", PROMPT, "--tokens", "6").split("\n\n")
    static = run("static_compiled.py", "--prompt", PROMPT, "--tokens", "6", "--length", "128").split("\n\n")
    assert growing[:-1] == static[:-1]
    assert growing[0].startswith(PROMPT)
    # One page a layer and KV head, with the page tables; BF16: 6 layers, 2 KV heads of 128, K and V, 2 bytes.
    tokens, held, bf16 = (
        int(n.replace(",", "")) for n in re.search(r"(\d+) tokens: ([\d,]+) bytes .* ([\d,]+)", growing[-1]).groups()
    )
    assert bf16 == tokens * 6144
    assert 128 * 3072 < held < 1.01 * 128 * 3072


def test_sdpa_dropin(run):
    printed = run("sdpa_dropin.py", "--tokens", "256")
    one, model = (float(x) for x in re.findall(r"differs \D*([\d.]+)%", printed))
    assert 0.5 < one < 4  # 8 bits: not torch's function, and not far from it
    assert 0 < model < 1
    assert "3 of 4 calls in FP8" in printed
    assert printed.count("torch: left out by skip_first") == 1


def test_prefix_reuse_continues_as_a_fresh_cache_does(run, tmp_path):
    pytest.importorskip("transformers")
    prefix, continuations = "import os\n\ndef size(path):\n", ["    return os.path", "    with open("]
    (tmp_path / "prefix.txt").write_text(prefix)
    files = ["--prefix", str(tmp_path / "prefix.txt"), "--pages", str(tmp_path / "prefix.safetensors")]
    computed, loaded = (run("prefix_reuse.py", *files, "--tokens", "4", *continuations) for _ in range(2))
    reused, again = (
        [eval(text) for text in re.findall(r" s: ('.*'|\".*\")$", printed, re.MULTILINE)]
        for printed in (computed, loaded)
    )
    assert again == reused
    (tmp_path / "prefix.txt").write_text("import re\n\ndef find(text):\n")  # the pages are of the first prefix
    with pytest.raises(ValueError, match="is from another prompt"):
        run("prefix_reuse.py", *files, "--tokens", "4", *continuations)
    fresh = [
        run("generate.py", "--prompt", prefix + text, "--tokens", "4").rsplit("\n\n", 1)[0] for text in continuations
    ]
    assert [prefix + text for text in reused] == fresh


def test_wan(run):
    pytest.importorskip("diffusers")
    printed = run("wan.py")
    # 4 steps, 4 blocks: the first step, and the first and last block, stay in 16 bits.
    assert "6 of 32 calls in FP8" in printed
    assert "latent frames (16, 3, 16, 16), all finite: True" in printed
