"""Docstrings as mkdocstrings reads them: with an empty line before each section, which the style of this repository
leaves out.
"""

import re

import griffe

SECTION = re.compile(r"(?<=\S)\n(?=(?:Args|Attributes|Returns|Yields|Raises):\n)")


class SectionsApart(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **kwargs: object) -> None:
        if obj.docstring is not None:
            obj.docstring.value = SECTION.sub("\n\n", obj.docstring.value)
