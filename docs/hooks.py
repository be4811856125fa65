"""Hooks of mkdocs: pages from files outside docs/, links that hold both in a checkout and on the site, and the list of
public names.

Links in the repository's Markdown are relative to the file that they are in. On the site they must name pages. A link
to a file that is no page (source code) becomes its text.
"""

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parent.parent
PAGES = {  # by path in the repository, the page's path on the site
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
    "benchmarks/README.md": "benchmarks.md",
    "examples/README.md": "examples/index.md",
    "tests/emulator/README.md": "emulator.md",
    "training/README.md": "training.md",
    "models/stdlib-llama/README.md": "model.md",
    **{
        f"docs/{path.relative_to(ROOT / 'docs')}": str(path.relative_to(ROOT / "docs"))
        for path in (ROOT / "docs").rglob("*.md")
    },
    **{f"examples/{path.name}": f"examples/{path.stem}.md" for path in (ROOT / "examples").glob("*.py")},
}
SOURCES = {page: source for source, page in PAGES.items()}
PICTURES = {str(path.relative_to(ROOT)) for path in (ROOT / "results").rglob("*.png")}
LINK = re.compile(r"(?P<picture>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s]+)\)")
NAMES = re.compile(r"<!-- public names: (?P<package>[\w.]+) -->")


def public_names(package: str) -> str:
    """mkdocstrings' directive for each name of a package's `__all__`, by the module that the package imports it from.

    The package is parsed, not imported: building the site needs no torch.
    """
    path = ROOT / "src" / package.replace(".", "/") / "__init__.py"
    names, modules = [], {}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            modules |= {alias.name: f"{package}.{node.module}" for alias in node.names}
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
    return "\n\n".join(f"::: {modules.get(name, package)}.{name}" for name in names)


def example(path: Path) -> str:
    """A page: what an example does, its command line, its code."""
    _, docstring, code = path.read_text().split('"""', 2)
    return f"# {path.name}\n\n{docstring}\n```python\n{code.strip()}\n```\n"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """In the nav, a folder (`lab/`) means its pages."""
    for entry in config.nav:
        ((title, page),) = entry.items()
        if page.endswith("/"):
            found = (source for source in SOURCES if source.startswith(page))
            entry[title] = sorted(
                found, key=lambda source: (not source.endswith("/index.md"), source)
            )  # what a folder has, first
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        if not source.startswith("docs/"):
            path = ROOT / source
            files.append(
                File.generated(config, page, content=example(path) if path.suffix == ".py" else path.read_text())
            )
    for picture in PICTURES:
        files.append(File.generated(config, picture, abs_src_path=str(ROOT / picture)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = SOURCES[page.file.src_uri]

    def on_site(match: re.Match) -> str:
        target, _, anchor = match["target"].partition("#")
        if not target or re.match(r"\w+:", target):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        if not (ROOT / path).exists():
            return match[0]  # mkdocs warns
        found = PAGES.get(path) or PAGES.get(f"{path}/README.md") or (path if path in PICTURES else None)
        if found is None:
            return match["text"]
        found = posixpath.relpath(found, posixpath.dirname(page.file.src_uri) or ".")
        return f"{match['picture']}[{match['text']}]({found}{'#' + anchor if anchor else ''})"

    return NAMES.sub(lambda match: public_names(match["package"]), LINK.sub(on_site, markdown))
