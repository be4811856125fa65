"""The cache of a model.

| file | what |
|---|---|
| `paged.py` | `PagedKVCache`: append and attention |
| `sequences.py` | the rest of its methods: sizes, and operations that move sequences |
| `page_table.py` | the pages of each sequence, copy-on-write; windows |
| `layer.py` | the pages of one layer |
| `step.py` | one append of all layers; the static form |
| `ahead.py` | which kernels the next tokens need, to compile them side by side |
| `storage.py` | sequences in files |

docs/pages.md explains them.
"""

from .page_table import OutOfPagesError
from .paged import PagedKVCache

__all__ = ["OutOfPagesError", "PagedKVCache"]
