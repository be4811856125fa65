"""The notes of a release, for the workflow that publishes it.

python tests/release/notes.py 0.2.0    # exits with 1 if that is not the version of the package, or CHANGELOG.md has no
notes of it
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def version() -> str:
    [found] = re.findall(r'^__version__ = "(.*)"$', (ROOT / "src/fp8attn/__init__.py").read_text(), re.MULTILINE)
    return found


def notes(release: str, changelog: str) -> str:
    """The text below a release's heading, `## 0.2.0 (2026-12-01)`.

    Raises:
        SystemExit: there is none, or the heading has no date.
    """
    found = re.search(
        rf"^## {re.escape(release)} \(\d{{4}}-\d\d-\d\d\)\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL
    )
    if found is None or not found[1].strip():
        sys.exit(f"CHANGELOG.md has no notes below a heading '## {release} (YYYY-MM-DD)'")
    return found[1].strip() + "\n"


if __name__ == "__main__":
    [_, release] = sys.argv
    if release != version():
        sys.exit(
            f"the tag is of version {release}, and the package is {version()}: change __version__ in "
            f"src/fp8attn/__init__.py, or the tag"
        )
    print(notes(release, (ROOT / "CHANGELOG.md").read_text()), end="")
