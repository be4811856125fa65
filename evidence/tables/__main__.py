"""Writes the tables and numbers of README.md and docs/ that come from results.

python -m evidence.tables            # writes them anew
python -m evidence.tables --check    # exits with 1 if a file is not up to date
"""

from __future__ import annotations

import argparse
import sys

from ..results import ROOT
from . import FILES, filled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = [path for path in FILES if filled(path.read_text()) != path.read_text()]
    for path in old:
        if args.check:
            print(f"{path.relative_to(ROOT)} differs from the results: run python -m evidence.tables")
        else:
            path.write_text(filled(path.read_text()))
    sys.exit(bool(old) and args.check)


if __name__ == "__main__":
    main()
