"""The docstring of a package is its README, which names every file of it. No page of the documentation names a file,
a module, a target of `make` or a heading that is gone.
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
PAGES = [
    *ROOT.glob("*.md"),
    *(page for folder in (*FOLDERS, "models") for page in sorted((ROOT / folder).rglob("*.md"))),
]
THEIRS = ("pytest", "sglang")  # packages whose modules pages run
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


def prose(page: Path) -> str:
    """A page without code."""
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """The names by which links reach the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", line) for line in re.findall(r"^#+ (.*)$", text, re.MULTILINE))
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_link_leads_to_a_file_and_a_heading(page):
    """mkdocs checks this for the pages of the site, without the READMEs of plugins and of one model."""
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)#?([^)\s]*)\)", prose(page)):
        found = page.parent / target if target else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_names_no_module_or_target_that_is_gone(page):
    if page.name == "CHANGELOG.md" or page.parent.name == "lab":
        return
    text = page.read_text()
    for module in re.findall(r"python -m ([\w.]+)", text):
        path = f"/{module.replace('.', '/')}"
        assert module.startswith(THEIRS) or {f"{path}.py", f"{path}/__main__.py"} & FILES, module
    [targets] = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", text, re.MULTILINE)) <= {*targets.split()}
