"""What the results files were measured with, and at which commits."""

from __future__ import annotations

from ..rows import header, path_of
from .writing import block, measured


@block("prefill")
def measured_files() -> str:
    """The files of the device whose tables the pages have, by commit, torch and Triton."""
    names = sorted(path.stem for path in path_of("prefill").parent.glob("*.json"))
    of: dict[str, list[str]] = {}
    for name in names:
        of.setdefault(measured(name), []).append(name)
        for commit in header(name).get("mixed", {}):
            of.setdefault(f"some cases at commit {commit}", []).append(name)
    return "\n".join(f"- {what}: {', '.join(files)}" for what, files in of.items())


@block("prefill")
def measured_peers() -> str:
    """The releases of other systems that those files were measured with."""
    heads = [header(path.stem) for path in path_of("prefill").parent.glob("*.json")]
    return "; ".join(sorted({release for head in heads for release in head.get("peers", {}).values()}, key=str.lower))
