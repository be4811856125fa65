"""The cache of a model: `page_table` says which sequence has which page, `layer` holds a layer's pages, `paged` is what users call, and
`storage` saves sequences to files."""

from .page_table import OutOfPagesError
from .paged import PagedKVCache

__all__ = ["OutOfPagesError", "PagedKVCache"]
