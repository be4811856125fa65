"""How exactly every FP8 kernel here sums, by length: what `fp8attn doctor` measures, as a results file."""

from __future__ import annotations

from fp8attn.accumulation import kernels, measure

from . import peers
from .results import write

SOURCES = (
    *("benchmarks/accumulation.py", "src/fp8attn/accumulation.py", "src/fp8attn/sdpa_quantized.py"),
    *("src/fp8attn/kernels/append.py", "src/fp8attn/kernels/prefill.py", "src/fp8attn/kernels/fa3.py"),
)


def main() -> None:
    peers.available()  # loads those in `.peers`, for `kernels` to find
    rows = []
    for name, attend in kernels().items():
        found = measure(attend, "cuda")
        print(f"{name}: {found}", flush=True)
        rows += [{"case": f"S{length}", "impl": name, "rel_err": error} for length, error in found.errors.items()]
    write("results/h100/accumulation.json", rows, SOURCES)


if __name__ == "__main__":
    main()
