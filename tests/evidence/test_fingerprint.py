"""What the fingerprint of a syntax tree depends on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from evidence import fingerprint
from evidence.fingerprint import ROOT, files, tree


def paths(*sources, **options) -> set[str]:
    return {path.relative_to(ROOT).as_posix() for path in files(*sources, **options)}


def test_a_benchmark_brings_all_that_it_imports():
    """Its files include every module that Python imports with it."""
    code = "import sys, benchmarks.accuracy; print(*(getattr(m, '__file__', None) for m in list(sys.modules.values())), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    here = [Path(line).relative_to(ROOT) for line in run.stdout.split() if line.startswith(f"{ROOT}/")]
    loaded = {path.as_posix() for path in here if path.parts[0] in fingerprint.FOLDERS and path.name != "__init__.py"}
    assert len(loaded) > 20 and loaded <= paths("benchmarks/accuracy.py")


def test_imports_are_followed_however_they_are_written():
    kernels = "src/fp8attn/kernels"
    assert {"src/fp8attn/ops.py", f"{kernels}/append/page.py", "src/fp8attn/numerics.py"} < paths("benchmarks/prefill.py")  # its pages
    assert {"benchmarks/measure.py", "benchmarks/problem.py"} < paths("benchmarks/decode.py")  # relative imports
    assert {f"{kernels}/decode/kernel.py", f"{kernels}/append/page.py"} < paths("src/fp8attn/backends/hopper.py")  # inside functions
    assert not any(path.startswith("evidence/") for path in paths("benchmarks/decode.py"))
    ours, others = paths(*fingerprint.sources("needle")), paths(*fingerprint.NEEDLE, folders=("benchmarks",))
    assert f"{kernels}/prefill/kernel.py" in ours - others and "benchmarks/peers/fa3.py" in ours & others
    assert fingerprint.of_row("needle", "bf16") == fingerprint.of_row("needle", "fa3-fp8:means") != fingerprint.of_row("needle", "fp8attn")
    plugin = paths(*fingerprint.sources("vllm")) - paths(*fingerprint.STOCK_VLLM, folders=("benchmarks",))
    assert {"src/fp8attn/integrations/vllm/impl.py", f"{kernels}/prefill/kernel.py"} < plugin
    stock, ours = (fingerprint.of_row("vllm", impl) for impl in ("vllm-bf16", "fp8attn"))
    assert fingerprint.of_row("vllm", "vllm-fp8-covered") == stock != ours


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ('"""Doc."""\nx = 1\n', '"""Another."""\n# words\nx  =  1\n', True),
        ("x = 1\n", "x = 2\n", False),
        ('def f():\n    """Doc."""\n', "def f():\n    pass\n", False),
        ('def f():\n    """Doc."""\n    return 1\n', "def f():\n    return (1)\n", True),
        ('class A:\n    """Doc."""\n    x: int\n', "class A:\n    x: int\n", True),
        ('x = """Doc."""\n', 'x = """Another."""\n', False),
    ],
)
def test_words_are_no_code(before, after, same, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "ROOT", tmp_path)
    prints = []
    for text in (before, after):
        (tmp_path / "a.py").write_text(text)
        fingerprint._content.cache_clear()
        tree.cache_clear()
        prints.append(tree("a.py"))
    assert (prints[0] == prints[1]) is same
