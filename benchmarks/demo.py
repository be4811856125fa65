"""`fp8attn demo` as a results file, with the needle picture beside it.

PYTHONPATH=src python -m benchmarks.demo [--save]
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from fp8attn.cli.demo import run

from . import results
from .problem import DEVICE


def main() -> None:
    args = results.parse(results.arguments(__doc__, cases=False))
    with tempfile.TemporaryDirectory() as out:
        found = run(Path(out), DEVICE)
        sides = [(name, side, f"{name}_{side}") for name in ("bytes_per_token", "ppl", "needle") for side in ("bf16", "fp8")]
        names = ("needle_cells_equal", "greedy_tokens_equal", "greedy_tokens_matched", "greedy_tokens", "model", "seconds")
        public = [
            (name, key.removeprefix(f"{name}_"), key) for name in ("public_ppl", "public_kl") for key in found if key.startswith(name)
        ]
        cases = [*sides, ("ppl", "fp8-static", "ppl_fp8_static"), *public, *((name, "fp8", name) for name in names)]
        if args.save:
            rows = [{"case": f"demo-{name}", "impl": side, "value": found[key]} for name, side, key in cases]
            shutil.copy(Path(out) / "needle.png", results.save("demo", rows).parent / "needle.png")


if __name__ == "__main__":
    main()
