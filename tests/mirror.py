"""Which tests test a file: `python -m tests.mirror src/fp8attn/kernels/append/settle.py`. `make quick` runs those of
what has changed.

`src/fp8attn/A/B.py` has `tests/A/test_B.py` and `tests/A/test_B_*.py`, and what `ROWS` says of it. A file that has none
of these has
the tests of its package: those of A are `tests/A/test_A.py`, `tests/A/test_A_*.py`, and what `ROWS` says of `A/`.
`src/fp8attn_tools/A/B.py` has the same in `tests/tools/`.

    python -m tests.mirror PATH ...          # the tests of these files
    python -m tests.mirror --changed [REV]   # of all files that differ from the merge base with REV (main)
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"src/fp8attn/": "tests/", "src/fp8attn_tools/": "tests/tools/"}

# Files and packages, below `src/`, whose tests have other names, below `tests/`.
ROWS = {
    "_fp8attn_command.py": ("tools/cli/test_errors.py", "release/test_installed.py"),
    "fp8attn/__init__.py": ("test_architecture.py",),
    "fp8attn/_torch_ops.py": ("test_ops.py", "dense/test_registration.py"),
    "fp8attn/backends/fa3.py": ("backends/test_fa3.py", "dense/test_sdpa_fa3.py"),
    "fp8attn/cache/": ("cache/test_paged.py", "cache/test_layers.py", "cache/test_machine.py", "cache/test_fuzz.py"),
    "fp8attn/cache/ahead.py": ("precompile/test_first.py",),
    "fp8attn/cache/page_table.py": ("cache/test_page_table.py", "cache/test_paged.py", "cache/test_tails.py"),
    "fp8attn/cache/paged.py": (
        "cache/test_paged.py",
        "cache/test_layers.py",
        "cache/test_machine.py",
        "cache/test_tails.py",
    ),
    "fp8attn/cache/step.py": ("cache/test_step.py", "cache/test_layers.py", "cache/test_tails.py"),
    "fp8attn/cache/layer.py": (
        "cache/test_paged.py",
        "cache/test_layers.py",
        "cache/test_machine.py",
        "cache/test_not_finite.py",
    ),
    "fp8attn/dense/": ("dense/test_sdpa.py", "dense/test_quantized.py", "dense/test_registration.py"),
    "fp8attn/derivatives.py": ("test_ops.py",),
    "fp8attn/errors.py": ("tools/cli/test_errors.py",),
    "fp8attn/formats/": ("test_numerics.py",),
    "fp8attn/formats/rope.py": ("dense/test_rope.py",),
    "fp8attn/integrations/engine/biases.py": (
        "integrations/engine/test_static.py",
        "integrations/engine/test_marks.py",
    ),
    "fp8attn/integrations/engine/layer.py": (
        "integrations/engine/test_engine.py",
        "vllm/test_steps.py",
        "vllm/test_static.py",
    ),
    "fp8attn/integrations/engine/steps.py": ("integrations/engine/test_engine.py", "vllm/test_steps.py"),
    "fp8attn/integrations/k_eq_v.py": (
        "integrations/transformers/test_k_eq_v.py",
        "integrations/transformers/test_latent_caches.py",
        "vllm/test_k_eq_v.py",
    ),
    "fp8attn/integrations/transformers/attention.py": (
        "integrations/transformers/test_windows.py",
        "integrations/transformers/test_wide.py",
        "integrations/transformers/test_masks.py",
    ),
    "fp8attn/integrations/transformers/biases.py": ("integrations/transformers/test_multimodal.py",),
    "fp8attn/integrations/transformers/build.py": (
        "integrations/transformers/test_windows.py",
        "integrations/transformers/test_wide.py",
        "integrations/transformers/test_cache.py",
        "integrations/transformers/test_hybrid.py",
    ),
    "fp8attn/integrations/transformers/cache.py": (
        "integrations/transformers/test_windows.py",
        "integrations/transformers/test_hybrid.py",
        "integrations/transformers/test_inference_mode.py",
    ),
    "fp8attn/integrations/transformers/decoder.py": (
        "integrations/transformers/test_devices.py",
        "integrations/transformers/test_multimodal.py",
        "integrations/transformers/test_cache.py",
        "integrations/transformers/test_families.py",
    ),
    "fp8attn/integrations/transformers/layers.py": (
        "integrations/transformers/test_windows.py",
        "integrations/transformers/test_cache.py",
        "integrations/transformers/test_hybrid.py",
    ),
    "fp8attn/integrations/transformers/kept.py": (
        "integrations/transformers/test_cache.py",
        "integrations/transformers/test_inference_mode.py",
        "integrations/transformers/test_transformers.py",
    ),
    "fp8attn/integrations/transformers/tensors.py": (
        "integrations/transformers/test_windows.py",
        "integrations/transformers/test_masks.py",
    ),
    "fp8attn/integrations/transformers/weights.py": ("integrations/transformers/test_biases.py",),
    "fp8attn/integrations/vllm/": (
        "integrations/test_vllm.py",
        "vllm/test_plugin.py",
        "vllm/test_steps.py",
        "vllm/test_static.py",
    ),
    "fp8attn/kernels/append/": ("kernels/append/test_page_bytes.py", "kernels/test_compile.py"),
    "fp8attn/kernels/combine.py": ("kernels/test_compile.py",),
    "fp8attn/kernels/memory.py": ("kernels/prefill/test_prefill.py", "kernels/latent/hopper/test_hopper.py"),
    "fp8attn/kernels/latent/": ("kernels/test_compile.py",),
    "fp8attn/kernels/tiles.py": ("kernels/decode/test_decode.py", "kernels/prefill/test_prefill.py"),
    "fp8attn/kernels/portable/": ("kernels/test_compile.py", "kernels/test_window_plans.py"),
    "fp8attn/kernels/ptx.py": ("kernels/decode/test_decode.py", "kernels/prefill/test_prefill.py"),
    "fp8attn/mode/report.py": ("mode/test_policy.py",),
    "fp8attn/ops.py": ("test_inference_mode.py",),
    "fp8attn/pages.py": ("test_ops.py", "formats/test_page_layout.py"),
    "fp8attn/params.py": ("test_ops.py",),
    "fp8attn/precompile/": ("precompile/test_calls.py", "integrations/test_warmup.py"),
    "fp8attn_tools/__init__.py": ("test_architecture.py",),
    "fp8attn_tools/calibration/": ("tools/calibration/test_calibrate.py", "tools/calibration/test_observer.py"),
    "fp8attn_tools/cli/options.py": ("tools/cli/test_errors.py",),
    "fp8attn_tools/cli/plots.py": ("tools/cli/test_drawing.py",),
    "fp8attn_tools/cli/shared.py": ("tools/cli/test_errors.py", "tools/cli/test_files.py"),
    "fp8attn_tools/cli/tables.py": ("tools/cli/test_drawing.py",),
    "fp8attn_tools/diagnostics/": ("tools/diagnostics/test_doctor.py",),
    "fp8attn_tools/diagnostics/accumulation.py": ("backends/test_fa3.py", "tools/diagnostics/test_doctor.py"),
    "fp8attn_tools/diagnostics/flashmla.py": ("tools/diagnostics/test_accumulation.py",),
    "fp8attn_tools/evaluation/harness.py": ("tools/evaluation/test_ruler.py",),
    "fp8attn_tools/evaluation/outcomes.py": ("tools/evaluation/test_needle.py",),
    "fp8attn_tools/evaluation/paired.py": ("tools/cli/test_drawing.py", "tools/evaluation/test_needle.py"),
    "fp8attn_tools/evaluation/recall.py": ("tools/evaluation/test_needle.py",),
}

# The tests of what is not in `src/`, by the beginnings of paths. (A folder X has those in `tests/X`.)
BESIDE = {
    ("README.md", "docs/"): ("tests/test_readme.py", "tests/test_docs_names.py"),
    ("Makefile", "pyproject.toml", "constraints.txt", "CHANGELOG.md", "CITATION.cff", ".github/", ".ci/"): (
        "tests/release/test_files.py",
    ),
    ("plugins/sglang/",): ("tests/sglang",),
    ("results/",): ("tests/evidence",),
    ("tests/emulator/", "tests/support/machine_code.py"): (
        "tests/emulator",
        "tests/kernels/decode",
        "tests/kernels/latent",
        "tests/kernels/prefill",
    ),
}


def files_for(path: str) -> list[str]:
    """The test files (or folders) of a file. Both are paths from the repository's root, and the file may have been
    deleted.
    """
    for package, tests in PACKAGES.items():
        if path.startswith(package):
            return _mirrored(Path(path), Path(path).relative_to(package), Path(tests))
    if path.startswith("src/"):
        return _rows(Path(path))
    for beginnings, tests in BESIDE.items():
        if path.startswith(beginnings):
            return list(tests)
    if path.startswith("tests/"):
        return _of_tests(Path(path))
    folder = f"tests/{path.partition('/')[0]}"  # benchmarks, examples, ...
    return [folder] if (ROOT / folder).is_dir() else []


def _mirrored(source: Path, inside: Path, tests: Path) -> list[str]:
    """The tests of a file of a package, which is `inside` it."""
    here = [*_named(tests / inside.parent, inside.stem), *_rows(source)] if inside.stem != "__init__" else _rows(source)
    for package in inside.parents:
        if here or package == Path():
            break
        source = source.parent
        here = [*_named(tests / package, package.name), *_rows(source)]
    return list(dict.fromkeys(here))


def _named(folder: Path, name: str) -> list[str]:
    return sorted(
        str(path.relative_to(ROOT))
        for pattern in ("", "_*")
        for path in (ROOT / folder).glob(f"test_{name}{pattern}.py")
    )


def _rows(source: Path) -> list[str]:
    row = str(source.relative_to("src"))
    return [f"tests/{test}" for test in ROWS.get(row if source.suffix else f"{row}/", ())]


def _of_tests(path: Path) -> list[str]:
    """A test file itself; of `conftest.py` all tests that see it; of what tests share, the files that name it."""
    if path.name.startswith("test_"):
        return [str(path)] * (ROOT / path).exists()
    if path.name == "conftest.py":
        return [str(path.parent)]
    package, module = (re.escape(".".join(x.parts)) for x in (path.parent, path.with_suffix("")))
    named = re.compile(rf"\b{module}\b|from {package} import .*\b{path.stem}\b")
    files = (ROOT / "tests").rglob("test_*.py") if path.suffix == ".py" else ()
    return sorted(str(file.relative_to(ROOT)) for file in files if named.search(file.read_text()))


def changed(revision: str = "main") -> list[str]:
    """The files that differ from the merge base with `revision`, with those that git does not track."""

    def git(*arguments: str) -> list[str]:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()

    [base] = git("merge-base", "HEAD", revision)
    return sorted({*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")})


def main(*arguments: str) -> None:
    paths = changed(*arguments[1:]) if arguments[:1] == ("--changed",) else arguments
    print(*sorted({test for path in paths for test in files_for(path)}), sep="\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
