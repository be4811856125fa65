"""Writes the address of the repository into what is published, for the workflow that publishes it: only there is the
address known.

python tests/release/address.py https://github.com/OWNER/NAME v0.2.0    # changes README.md and pyproject.toml
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?://|#)([^)\s]+)\)")  # of Markdown, to a file of the repository


def readme(text: str, address: str, tag: str) -> str:
    """README.md as an index of packages shows it: there, links to files of the repository lead nowhere."""
    text = re.sub(
        r"^# in a clone of this repository.*$",
        rf"git clone {address} fp8attn && cd fp8attn  \g<0>",
        text,
        flags=re.MULTILINE,
    )
    return LINK.sub(lambda m: f"{m[1]}[{m[2]}]({address}/{'raw' if m[1] else 'blob'}/{tag}/{m[3]})", text)


def project(text: str, address: str, tag: str) -> str:
    """pyproject.toml with the links that an index shows beside the README."""
    urls = {"Repository": address, "Issues": f"{address}/issues", "Changelog": f"{address}/blob/{tag}/CHANGELOG.md"}
    lines = "\n".join(f'{name} = "{url}"' for name, url in urls.items())
    return text.replace("[project.scripts]\n", f"[project.urls]\n{lines}\n\n[project.scripts]\n")


if __name__ == "__main__":
    [_, address, tag] = sys.argv
    for name, write in (("README.md", readme), ("pyproject.toml", project)):
        path = ROOT / name
        path.write_text(write(path.read_text(), address, tag))
