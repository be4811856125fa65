"""README's Python runs as it stands there: its blocks in their order, in one namespace, as a reader would type them.

A line `<!-- not run: REASON -->` above a block says that this machine cannot run it. Such a block must compile.
"""

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCK = re.compile(r"^(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks() -> list[tuple]:
    """Each block's first line, its code and why it is not run (None: it is)."""
    text = README.read_text()
    return [(text.count("\n", 0, match.start("code")) + 1, match["code"], match["reason"]) for match in BLOCK.finditer(text)]


def compiled(line: int, code: str):
    return compile("\n" * (line - 1) + code, README, "exec")  # an error names README's line


def test_every_block_is_found():
    assert len(blocks()) == README.read_text().count("```python") >= 5


def test_snippets_run(monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.chdir(README.parent)
    namespace, printed, outs = {}, io.StringIO(), []
    with contextlib.redirect_stdout(printed):
        for line, code, reason in blocks():
            if reason is None:
                exec(compiled(line, code), namespace)
                outs.append(namespace["out"])
    assert len(outs) >= 3
    assert all(out.isfinite().all() for out in outs)
    assert printed.getvalue().startswith("def parse_header(")


@pytest.mark.parametrize(
    ("line", "code", "reason"), [block for block in blocks() if block[2]], ids=lambda x: str(x) if type(x) is int else ""
)
def test_snippets_that_are_not_run_compile(line, code, reason):
    compiled(line, code)
    pytest.skip(f"README.md:{line}: {reason}")
