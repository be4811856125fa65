"""The recipe of the long-context model. What it shares with the first model's it imports from the files one folder up."""

import json
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
CONFIG = json.loads((FOLDER / "config.json").read_text())

sys.path.append(str(FOLDER.parent))  # those are scripts that import each other by name
