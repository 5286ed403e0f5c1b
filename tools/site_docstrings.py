"""Examples in docstrings become blocks of code on the site: Markdown takes `>>>` for quotations.

mkdocs.yml names this file; Griffe, which reads the package for the reference, calls the class.
"""

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Examples(Extension):
    """Fences the examples of each docstring."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """A docstring with each example in a block of its own."""
    return EXAMPLE.sub(lambda example: f"```pycon\n{example.group()}\n```", text)
