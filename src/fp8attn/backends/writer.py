"""The part of a backend that writes pages, which is the same on every GPU."""

from __future__ import annotations


class Writer:
    """The methods that write pages, with the same kernels on every GPU."""

    def __init__(self) -> None:
        from ..kernels.append import append, from_dense

        self.append = append
        self.from_dense = from_dense
