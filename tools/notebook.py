"""Runs docs/notebook.ipynb: `python tools/notebook.py` writes into it what its cells print and show, without Jupyter."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
import sys
import types
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).parent.parent / "docs" / "notebook.ipynb"


class Printer:
    """What IPython gives to `_repr_pretty_`."""

    def __init__(self) -> None:
        self.shown = ""

    def text(self, text: str) -> None:
        self.shown += text


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells, which run in one new module."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    cells, number = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            number += 1
            outputs = outputs_of("".join(cell["source"]), number, vars(module))
            cell = {**cell, "execution_count": number, "outputs": outputs}
        cells.append(cell)
    return {**notebook, "cells": cells}


def outputs_of(code: str, number: int, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """What a cell prints, and the value of its last expression."""
    name = f"cell_{number}.py"
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, logged, value = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(logged):
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
    outputs: list[dict[str, Any]] = [
        {"name": name, "output_type": "stream", "text": lines(text)}
        for name, text in (("stdout", printed.getvalue()), ("stderr", logged.getvalue()))
        if text
    ]
    if value is not None:
        outputs.append(
            {
                "data": data_of(value),
                "execution_count": number,
                "metadata": {},
                "output_type": "execute_result",
            }
        )
    return outputs


def data_of(value: Any) -> dict[str, list[str]]:
    """A value as a notebook keeps it."""
    printer = Printer()
    pretty = getattr(type(value), "_repr_pretty_", None)
    printer.text(repr(value)) if pretty is None else pretty(value, printer, False)
    data = {"text/plain": lines(printer.shown)}
    page = getattr(type(value), "_repr_html_", None)
    return data if page is None else {"text/html": lines(page(value)), **data}


def lines(text: str) -> list[str]:
    """A text as notebooks keep it."""
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    done = executed(json.loads(NOTEBOOK.read_text()))
    NOTEBOOK.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
