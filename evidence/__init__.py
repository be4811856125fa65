"""The results of this repository, and the measurements that support them.

A **row** is one measurement of one implementation in one case: `{"case", "impl", ...}` in `results/<device>/NAME.json` (`results`). Its
`provenance` says with which versions, when, at which commit and by which command it was measured. Rows of one provenance were measured by
one command; only those are divided by each other.

A row is **stale** when what it measured would no longer run. Its `fingerprint` says what it depends on (`fingerprint`):

| fingerprint | is of |
|---|---|
| `launches:...` | kernels: the PTX of one call's launches, without locations and names, their grids, and the numbers that the host chose |
| `tree:...` | whole models and the host: the syntax trees, without docstrings, of the benchmark and of all that it imports |
| `peer:...` | other systems: their version |

Comments, docstrings and formatting make no row stale. Refactoring that gives the same machine code makes no `launches` row stale.

| command | does |
|---|---|
| `python -m evidence.check` (`make check-results`) | lists the stale rows and the commands that measure them again |
| `python -m evidence.tables` | writes the tables and numbers of README.md and docs/ from the rows |
| `python -m evidence.pictures` | draws the pictures beside the rows |

`check` needs no GPU. A `launches` row whose sources have changed is planned again on tensors without memory (`dry`), and its kernels are
compiled with the row's Triton. `ptx` makes the text of a kernel that is compared. `answers` keeps the answers that `needle` counts.
Benchmarks measure: `benchmarks/README.md`.
"""

import benchmarks  # noqa: F401, which decides whose fp8attn is imported
