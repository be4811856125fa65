"""The map from source files to their tests is complete, and no row of it is dead."""

import ast
import subprocess

import pytest

from tests.mirror import ROOT, ROWS, changed, files_for

SOURCES = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "src").rglob("*.py"))


def has_code(path: str) -> bool:
    """More than a docstring."""
    body = ast.parse((ROOT / path).read_text()).body
    return len(body) > (ast.get_docstring(ast.Module(body, [])) is not None)


def test_every_source_file_has_tests():
    without = [path for path in SOURCES if has_code(path) and not files_for(path)]
    assert not without, f"name a test file after each of {without}, or give it a row in tests/mirror.py"


def test_no_row_is_dead():
    for source, tests in ROWS.items():
        path = ROOT / "src" / source
        assert path.is_dir() if source.endswith("/") else path.is_file(), f"tests/mirror.py: there is no src/{source}"
        for test in tests:
            assert (ROOT / "tests" / test).is_file(), f"tests/mirror.py: there is no tests/{test}"
        named = {*files_for(f"src/{source}__init__.py" if source.endswith("/") else f"src/{source}")}
        assert named >= {f"tests/{test}" for test in tests}, f"the row of {source} is not used"


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("src/fp8attn/scales.py", ["test_scales.py"]),
        ("src/fp8attn/cache/storage.py", ["cache/test_storage.py"]),
        ("src/fp8attn/kernels/prefill/cut.py", ["kernels/prefill/test_cut.py"]),
        (
            "src/fp8attn/kernels/prefill/tiles.py",
            ["kernels/prefill/test_prefill.py", "kernels/prefill/test_prefill_compile.py"],
        ),
        ("src/fp8attn_tools/evaluation/caches.py", ["tools/evaluation/test_evaluation.py"]),
        ("src/fp8attn_tools/cli/plots.py", ["tools/cli/test_drawing.py"]),
        ("tests/kernels/decode/run_decode.py", ["kernels/decode/test_decode.py"]),
        ("tests/tools/cli/conftest.py", ["tools/cli"]),
        ("tests/support/libcuda.py", ["kernels/test_launch.py"]),
        ("examples/wan.py", ["examples"]),
        ("docs/kernels.md", ["test_readme.py", "test_docs_names.py"]),
        ("LICENSE", []),
    ],
)
def test_the_tests_of_a_file(path, tests):
    assert files_for(path) == [f"tests/{test}" for test in tests]


def test_what_has_changed_is_committed_or_not(monkeypatch, tmp_path):
    def git(*arguments):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a", *arguments],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    monkeypatch.setattr("tests.mirror.ROOT", tmp_path)
    git("init", "-b", "main")
    (tmp_path / "kept").touch()
    (tmp_path / "edited").touch()
    git("add", ".")
    git("commit", "-m", "first")
    assert changed() == []
    git("checkout", "-b", "work")
    (tmp_path / "committed").touch()
    git("add", ".")
    git("commit", "-m", "second")
    (tmp_path / "edited").write_text("more")
    (tmp_path / "untracked").touch()
    assert changed() == ["committed", "edited", "untracked"]
