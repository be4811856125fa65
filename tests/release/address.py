"""Writes the address of the repository into what is published, for the workflow that publishes it: only there is the
address known.

python tests/release/address.py https://github.com/OWNER/NAME v0.2.0    # changes FILES
"""

import posixpath
import re
import sys
from functools import partial
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")  # of Markdown, to a file of the repository


def linked(text: str, address: str, tag: str, folder: str = "") -> str:
    """Markdown of a file in `folder` as it is shown elsewhere, where links to files of the repository lead nowhere."""

    def link(match: re.Match) -> str:
        path = posixpath.normpath(posixpath.join(folder, match[3]))
        return f"{match[1]}[{match[2]}]({address}/{'raw' if match[1] else 'blob'}/{tag}/{path})"

    return LINK.sub(link, text)


def readme(text: str, address: str, tag: str) -> str:
    """README.md as an index of packages shows it."""
    clone = rf"git clone {address} fp8attn && cd fp8attn  \g<0>"
    return linked(re.sub(r"^# in a clone of this repository.*$", clone, text, flags=re.MULTILINE), address, tag)


def project(text: str, address: str, tag: str) -> str:
    """pyproject.toml with the links that an index shows beside the README."""
    urls = {"Repository": address, "Issues": f"{address}/issues", "Changelog": f"{address}/blob/{tag}/CHANGELOG.md"}
    lines = "\n".join(f'{name} = "{url}"' for name, url in urls.items())
    return text.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n\n[project.scripts]\n")


FILES = {  # `notes.py` has written notes.md; the others are in the repository
    "README.md": readme,
    "notes.md": linked,
    "plugins/sglang/README.md": partial(linked, folder="plugins/sglang"),
    "pyproject.toml": project,
}


if __name__ == "__main__":
    [_, address, tag] = sys.argv
    for name, write in FILES.items():
        path = ROOT / name
        path.write_text(write(path.read_text(), address, tag))
