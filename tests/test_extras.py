"""A missing optional package is an error that says how to install it, and the instruction works."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fp8attn import UsageError, extras

ROOT = Path(__file__).parents[1]


def test_every_hint_names_an_extra_of_the_project():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert found.keys() >= extras.PACKAGES.keys() and found.keys() - extras.PACKAGES.keys() == {"dev", "docs", "release"}
    assert extras.hint("ruler") == 'run pip install ".[ruler]" in a clone of fp8attn'
    with pytest.raises(ValueError, match="fp8attn has no extra 'rulers'; its extras are hf, diffusers, "):
        extras.hint("rulers")


def test_no_text_tells_users_to_install_fp8attn_from_a_package_index():
    texts = [path for folder in ("src", "docs", "examples") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")]
    for path in (*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = path.read_text()
        assert not any(f"pip install {quote}fp8attn" in text for quote in ("", "'", '"')), path


def test_a_missing_package_of_the_extra_is_named_with_the_extra():
    with pytest.raises(extras.MissingPackageError) as raised, extras.needs("plot"):
        raise ModuleNotFoundError("No module named 'matplotlib.figure'", name="matplotlib.figure")
    assert str(raised.value) == 'matplotlib is not installed; run pip install ".[plot]" in a clone of fp8attn'
    assert isinstance(raised.value, UsageError) and isinstance(raised.value, ImportError) and raised.value.name == "matplotlib.figure"


def test_the_innermost_extra_is_named():
    with pytest.raises(extras.MissingPackageError, match=r"\.\[hf\]"), extras.needs("cli"), extras.needs("hf"):
        raise ModuleNotFoundError(name="transformers")


def test_other_missing_modules_are_bugs():
    bug = ModuleNotFoundError(name="no_such")
    with pytest.raises(ModuleNotFoundError) as raised, extras.needs("cli"):
        raise bug
    assert raised.value is bug


@pytest.mark.parametrize(
    ("extra", "package", "code"),
    [
        ("hf", "transformers", "import fp8attn.integrations.transformers"),
        ("hf", "transformers", "import fp8attn_tools; fp8attn_tools.calibrate"),
        ("vllm", "vllm", "import fp8attn.integrations.vllm as plugin; plugin.register()"),
        ("diffusers", "diffusers", "import fp8attn.integrations.diffusers"),
        ("diffusers", "diffusers", "import runpy; runpy.run_path('examples/wan.py')"),
    ],
)
def test_integrations_name_their_extra(extra, package, code):
    ended = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.modules[{package!r}] = None; {code}"], cwd=ROOT, capture_output=True, text=True
    )
    assert ended.returncode == 1
    expected = f'fp8attn.extras.MissingPackageError: {package} is not installed; run pip install ".[{extra}]" in a clone of fp8attn'
    assert ended.stderr.splitlines()[-1] == expected
