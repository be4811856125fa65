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
    assert found.keys() >= extras.PACKAGES.keys() and found.keys() - extras.PACKAGES.keys() == {
        "test",
        "dev",
        "docs",
        "release",
    }
    assert extras.hint("ruler") == 'run pip install "fp8attn[ruler]"'
    with pytest.raises(ValueError, match="fp8attn has no extra 'rulers'; its extras are hf, diffusers, "):
        extras.hint("rulers")


def test_no_text_tells_users_to_install_fp8attn_from_a_package_index():
    """Errors may: who reads them has it, so pip looks for no other (`release/test_installed.py`)."""
    texts = [
        path for folder in ("docs", "examples") for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md")
    ]
    for path in (*texts, ROOT / "README.md", ROOT / "CONTRIBUTING.md"):
        text = path.read_text()
        assert not any(f"pip install {quote}fp8attn" in text for quote in ("", "'", '"')), path


def test_a_missing_package_of_the_extra_is_named_with_the_extra():
    with pytest.raises(extras.MissingPackageError) as raised, extras.needs("plot"):
        raise ModuleNotFoundError("No module named 'matplotlib.figure'", name="matplotlib.figure")
    assert str(raised.value) == 'matplotlib is not installed; run pip install "fp8attn[plot]"'
    assert (
        isinstance(raised.value, UsageError)
        and isinstance(raised.value, ImportError)
        and raised.value.name == "matplotlib.figure"
    )


def test_the_oldest_transformers_is_that_of_the_project():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert found["hf"][0].startswith("transformers>={}.{},".format(*extras.OLDEST_TRANSFORMERS))


@pytest.mark.parametrize("version", ["4.57.1", "5.16.0"])
def test_a_transformers_that_is_too_old_is_an_error_before_it_is_imported(monkeypatch, version):
    monkeypatch.setattr(extras.metadata, "version", {"transformers": version}.__getitem__)
    with pytest.raises(extras.MissingPackageError) as raised, extras.needs("hf"):
        pytest.fail("the block ran")
    hint = 'run pip install "fp8attn[hf]"'
    assert str(raised.value) == f"transformers {version} is too old, 5.17 is the oldest that works; {hint}"
    with extras.needs("vllm"):  # an engine has a transformers of its own
        pass


@pytest.mark.parametrize("version", ["5.17.0", "5.24.0", "6.0.0.dev0"])
def test_a_newer_transformers_is_imported(monkeypatch, version):
    monkeypatch.setattr(extras.metadata, "version", {"transformers": version}.__getitem__)
    with extras.needs("hf"):
        pass


def test_the_innermost_extra_is_named():
    with pytest.raises(extras.MissingPackageError, match=r"fp8attn\[hf\]"), extras.needs("cli"), extras.needs("hf"):
        raise ModuleNotFoundError(name="transformers")


def test_other_missing_modules_are_bugs():
    bug = ModuleNotFoundError(name="no_such")
    with pytest.raises(ModuleNotFoundError) as raised, extras.needs("cli"):
        raise bug
    assert raised.value is bug


WITHOUT = """
import runpy, sys
sys.modules.update(dict.fromkeys(("transformers", "vllm", "diffusers")))  # none of them can be imported
import fp8attn_tools, fp8attn.integrations.vllm as plugin
from importlib import import_module

for call in (
    lambda: import_module("fp8attn.integrations.transformers"), lambda: fp8attn_tools.calibrate, plugin.register,
    lambda: import_module("fp8attn.integrations.diffusers"),
    lambda: runpy.run_path("examples/wan.py"),
):
    try:
        call()
    except ImportError as error:
        print(type(error).__name__, error)
"""


def test_integrations_name_their_extra():
    ended = subprocess.run([sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, check=True)
    extras = [("transformers", "hf"), ("transformers", "hf"), ("vllm", "vllm")] + [("diffusers", "diffusers")] * 2
    hint = 'MissingPackageError {} is not installed; run pip install "fp8attn[{}]"'
    assert ended.stdout.splitlines() == [hint.format(package, extra) for package, extra in extras]
