"""Which module of two versions is the first that gives other values: both run once more in eager mode."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

from monograph.ir.call.tree import flatten
from monograph.testing.alignment.calls import Call
from monograph.testing.alignment.case import Case
from monograph.testing.alignment.copies import copied
from monograph.testing.alignment.step import forward, seed_all

_Given = dict[tuple[str, int], list[torch.Tensor]]  # by the path of a module, and which of its calls it was


def first_that_differs(case: Case, call: Call) -> str | None:
    """A sentence about it; None where two modules were not compared, or none of their parts has such a counterpart."""
    if not (isinstance(case.target, nn.Module) and isinstance(case.reference, nn.Module)):
        return None
    try:
        ours, theirs = (_given_in(module, call) for module in (case.target, case.reference))
    except Exception:  # whatever a model raises: the difference itself is reported all the same
        return None
    rtol, atol = case.tolerance.numbers()
    for (path, number), wanted in theirs.items():
        found = ours.get((path, number))
        if found is None or not wanted:
            continue
        try:
            torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, equal_nan=True, check_dtype=False)
        except AssertionError:
            kind = type(case.target.get_submodule(path)).__name__
            which = f"in its call {number + 1} " if number else ""
            return f"{path} ({kind}) is the first module that {which}gives other values in eager mode"
    return None


def _given_in(module: nn.Module, call: Call) -> _Given:
    """What each part of a copy of it gives, in the order in which they return."""
    found, counts, trial = _Given(), Counter[str](), copied(module)

    def note(path: str, result: Any) -> None:
        leaves: list[Any] = []
        flatten(result, leaves)
        found[path, counts[path]] = [
            leaf.detach().clone() for leaf in leaves if isinstance(leaf, torch.Tensor)
        ]
        counts[path] += 1

    for path, part in trial.named_modules():
        if path:
            part.register_forward_hook(lambda _part, _given, result, path=path: note(path, result))
    seed_all(call.seed)
    with torch.no_grad():
        forward(trial, call.copied(), through_clones=True)
    return found
