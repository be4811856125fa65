"""The results of this repository: files, tables and pictures.

A **row** is one measurement of one implementation in one case: `{"case", "impl", ...}`. A file
`results/<device>/NAME.json` has the rows that one command measured, and says on top which device, commit, torch and
Triton they are of (`results`). Only rows that were timed together are divided by each other (`rows`).

| command | does |
|---|---|
| `python -m evidence.tables` | writes the tables and numbers of README.md and docs/ from the rows |
| `python -m evidence.pictures` | draws the pictures beside the rows |
| `make check-results` | lists the kernels whose machine code has changed since a file's commit (`tests/same_ptx.py`) |

Benchmarks measure: `benchmarks/README.md`.
"""

import benchmarks  # noqa: F401, which decides whose fp8attn is imported
