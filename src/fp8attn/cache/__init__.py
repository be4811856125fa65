"""The cache of a model.

| file | what |
|---|---|
| `paged.py` | `PagedKVCache`: append and attention, operations that move sequences |
| `step.py` | `Steps`: which tokens the layers append |
| `page_table.py` | `PageTable`: the pages of each sequence, copy-on-write; windows; the static form |
| `layer.py` | the pages of one layer |
| `ahead.py` | which kernels the next tokens need, to compile them side by side |
| `storage.py` | sequences in files |

docs/pages.md explains them.
"""

from .page_table import OutOfPagesError
from .paged import PagedKVCache

__all__ = ["OutOfPagesError", "PagedKVCache"]
