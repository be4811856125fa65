"""The docstring of a package is its README, which names every file of it. No page of the documentation names a file
that is gone.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = [path for path in sorted((ROOT / "src").glob("*/**/__init__.py")) if path.parent != ROOT / "src/fp8attn"]
PACKAGES += sorted((ROOT / "plugins").glob("*/*/__init__.py"))
FOLDERS = ("src", "plugins", "tests", "benchmarks", "evidence", "examples", "training", "docs")
FILES = {f"/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
MADE_UP = {
    "tests/A/test_B.py",
    "tests/tools/A/test_B.py",
    "src/fp8attn/A/B.py",
    "src/fp8attn_tools/A/B.py",
    "benchmarks/NAME.py",
}


@pytest.mark.parametrize("init", PACKAGES, ids=lambda path: path.parent.name)
def test_the_docstring_of_a_package_names_its_files(init):
    named = set(re.findall(r"\w+", ast.get_docstring(ast.parse(init.read_text()))))
    files = {path.stem for path in init.parent.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert files - {"__init__"} <= named


@pytest.mark.parametrize(
    "page",
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("*/README.md"), *ROOT.glob("plugins/*/README.md")],
    ids=lambda path: path.name,
)
def test_a_page_names_no_file_that_is_gone(page):
    if page.name == "CHANGELOG.md":
        return
    named = {
        name for code in re.findall(r"`([^`\n]+)`", page.read_text()) for name in re.findall(r"[\w/]+\.py\b", code)
    }
    assert not [name for name in named - MADE_UP if not any(file.endswith(f"/{name}") for file in FILES)]
