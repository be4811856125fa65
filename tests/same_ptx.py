"""Checks that a change does not change the kernels: compares the PTX of every compile case here and at another commit,
without a GPU.

    python tests/same_ptx.py [case substring ...] [--base REV]
    python tests/same_ptx.py --results    # since the commits of the files in results/, which name theirs
    (`make check-results`)

A case is the same if its launches have the same PTX (`support.ptx.normalized`: without locations, names and versions),
grids and numbers that the host chose. Every case is compiled with the Triton that is imported, as far as PTX: some two
seconds each, in a process a core. The digests of a commit are kept in `.cache/ptx/`, so that only the first comparison
with it compiles it; with substrings, only the cases that contain one. It lists what differs and exits with 1; cases
that only one side has are listed and fail nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "src")]
CACHE = ROOT / ".cache/ptx"


def names() -> list[str]:
    """Every compile case: `kind: case`."""
    from tests.kernels import compile_kernels
    from tests.kernels.decode import run_decode
    from tests.kernels.prefill import compile_prefill

    cases = {"prefill": compile_prefill.CASES, "decode": run_decode.COMPILED, "kernels": compile_kernels.cases()}
    return [f"{kind}: {case}" for kind, some in cases.items() for case in some]


def fingerprint(name: str) -> str:
    """The fingerprint of what a case launches."""
    from triton import knobs

    from fp8attn.kernels.compile import compiled
    from tests.kernels import compile_kernels
    from tests.kernels.decode import run_decode
    from tests.kernels.prefill import compile_prefill
    from tests.support.ptx import digest, normalized, of_launches

    kind, case = name.split(": ")
    if kind == "prefill":
        launches = [compile_prefill.launch(**compile_prefill.CASES[case])]
    elif kind == "decode":
        launches = run_decode.recorded(case)
    else:
        launches = compile_kernels.launches("sm_90", case)
    knobs.runtime.add_stages_inspection_hook = _stop_at_ptx
    return of_launches(
        (each, digest(normalized(compiled(each.kernel, each.args, each.constants).asm["ptx"]))) for each in launches
    )


def _stop_at_ptx(*args) -> tuple[str, str] | None:
    """Triton's hook, which changes the stages of a compilation, and without arguments gives the key of what it does."""
    if not args:
        return "stop at PTX", "stop at PTX"
    stages = args[1]
    stages["cubin"] = lambda ptx, metadata: b""  # ptxas takes longer than all before it
    return None


def fingerprints(words: list[str]) -> dict[str, str]:
    """The fingerprints of all cases whose names contain one of the words."""
    chosen = [name for name in names() if _is_chosen(name, words)]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder  # kernels without machine code must not be found by others
        os.environ.pop("TRITON_INTERPRET", None)
        with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
            return dict(zip(chosen, _progress(pool.map(fingerprint, chosen), len(chosen)), strict=True))


def _is_chosen(name: str, words: list[str]) -> bool:
    return not words or any(word in name for word in words)


def _progress(results: Iterator[str], count: int) -> Iterator[str]:
    for number, result in enumerate(results, 1):
        print(f"\r{number} of {count} cases", end="", file=sys.stderr, flush=True)
        yield result
    print(file=sys.stderr)


def at(revision: str, words: list[str]) -> dict[str, str]:
    """The fingerprints at a commit of all cases whose names contain one of the words, by this file as it is there.

    Raises:
        LookupError: there is no such commit, or it has no such file, or that fails there.
    """
    from triton import __version__

    from tests.support.ptx import digest

    here = Path(__file__).relative_to(ROOT)
    parsed = subprocess.run(["git", "rev-parse", f"{revision}^{{commit}}"], cwd=ROOT, capture_output=True, text=True)
    if parsed.returncode:
        raise LookupError(f"git knows no commit {revision}")
    commit = parsed.stdout.strip()
    if subprocess.run(["git", "cat-file", "-e", f"{commit}:{here}"], cwd=ROOT, capture_output=True).returncode:
        raise LookupError(f"{revision} has no {here}, which records its kernels")
    whole = CACHE / f"{commit}-triton-{__version__}.json"
    if whole.exists():
        return {name: each for name, each in json.loads(whole.read_text()).items() if _is_chosen(name, words)}
    path = whole.with_stem(f"{whole.stem}-{digest(sorted(words))}") if words else whole
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(["git", "worktree", "add", "-q", "--detach", folder, commit], cwd=ROOT, check=True)
            try:
                unfinished = path.with_suffix(f".{os.getpid()}")
                command = [sys.executable, Path(folder) / here, *words, "--write", unfinished]
                if status := subprocess.run(command).returncode:
                    raise LookupError(f"{here} of {revision} ended with exit status {status}; what it printed is above")
                unfinished.replace(path)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=ROOT, check=True)
    return json.loads(path.read_text())


def check_results(now: dict[str, str]) -> None:
    """Print, for each file of a GPU's results, the compile cases whose machine code has changed since its commit.
    Archives are left out.
    """
    files: dict[str, list[str]] = {}
    for path in sorted((ROOT / "results").glob("*/*.json")):
        result = json.loads(path.read_text())
        if result["device"] != "cpu" and not result.get("note", "").startswith("Archived"):
            files.setdefault(result["commit"].removesuffix("+"), []).append(str(path.relative_to(ROOT / "results")))
    for commit, measured in files.items():
        print(f"{commit}: {', '.join(measured)}", flush=True)
        begun = time.monotonic()
        try:
            before = at(commit, [])
        except LookupError as problem:
            print(f"  cannot be compared: {problem}", flush=True)
            continue
        both = before.keys() & now.keys()
        different = sorted(name for name in both if before[name] != now[name])
        gone = f", {len(before.keys() - both)} are gone" if before.keys() - both else ""
        took = f"({time.monotonic() - begun:.0f} s)"
        print(
            f"  {len(different)} of {len(both)} cases have changed since{gone} {took}",
            *different,
            sep="\n    ",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", metavar="case substring")
    parser.add_argument(
        "--base", metavar="REV", default="HEAD", help="the commit to compare with (default: %(default)s)"
    )
    parser.add_argument("--results", action="store_true", help="compare with the commits of the files in results/")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    now = fingerprints(args.words)
    if args.write:
        args.write.write_text(json.dumps(now, indent=0))
        return
    if args.results:
        check_results(now)
        return
    try:
        before = at(args.base, args.words)
    except LookupError as problem:
        sys.exit(str(problem))
    for name in sorted(before.keys() ^ now.keys()):
        print(f"{name}: only {'at ' + args.base if name in before else 'here'}")
    both = before.keys() & now.keys()
    different = sorted(name for name in both if before[name] != now[name])
    for name in different:
        print(f"{name}: differs")
    print(f"{len(both) - len(different)} of {len(both)} cases are the same as at {args.base}")
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
