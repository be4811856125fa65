"""`fp8attn demo` as a results file: results/cpu or results/h100, with the needle picture beside it.

PYTHONPATH=src python -m benchmarks.demo [cpu | cuda]
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path

from fp8attn.cli.demo import run

from .results import ROOT, write


def main() -> None:
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    folder = ROOT / "results" / ("h100" if device == "cuda" else "cpu")
    with tempfile.TemporaryDirectory() as out:
        run(Path(out), device)
        found = json.loads((Path(out) / "demo.json").read_text())
        rows = [
            {"case": f"demo-{name}", "impl": side, "value": found[f"{name}_{side}"]}
            for name in ("bytes_per_token", "ppl", "needle")
            for side in ("bf16", "fp8")
        ]
        rows.append({"case": "demo-ppl", "impl": "fp8-static", "value": found["ppl_fp8_static"]})
        names = ("needle_cells_equal", "greedy_tokens_equal", "greedy_tokens_matched", "greedy_tokens", "seconds")
        rows += [{"case": f"demo-{name}", "impl": "fp8", "value": found[name]} for name in names]
        kernels = ["src/fp8attn/kernels"] if device == "cuda" else []
        write(folder / "demo.json", rows, [*found["meta"]["sources"], *kernels])
        shutil.copy(Path(out) / "needle.png", folder / "needle.png")


if __name__ == "__main__":
    main()
