"""Copies of what is aligned: a state of their own, and the same code."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.library import Library

from monograph import UnsupportedTensorError
from monograph.compat.ops import CustomOp
from monograph.testing.alignment.step import Target, module_of

T = TypeVar("T")

_CODE = (
    ModuleType,
    CustomOp,
    Library,
)  # it has no state of the module that holds it, and cannot be copied


def copied_target(target: Target) -> Target:
    """A module, or a method of one, with parameters and buffers of its own; functions are what they are."""
    module = module_of(target)
    if module is None:
        return target
    try:
        return copied(target)
    except Exception as error:  # whatever the parts of the module raise
        path, why = _uncopied(module) or ("", error)
        raise UnsupportedTensorError(
            f"align() works on copies, and copy.deepcopy of {path or 'the module'} failed: {why}",
            hint="hold it outside of the module, or give its class a __deepcopy__",
        ) from error


def copied(item: T) -> T:
    """A deep copy that has the same ops, libraries of ops and Python modules."""
    return copy.deepcopy(item, _same_code(item))


def _same_code(item: object) -> dict[int, Any]:
    """What `copy.deepcopy` takes for copied already."""
    return {id(code): code for code in _code_in(item, set())}


def _code_in(item: object, seen: set[int]) -> Iterator[object]:
    if isinstance(item, _CODE):
        yield item
        return
    if id(item) in seen or isinstance(item, (torch.Tensor, type, FunctionType)):
        return
    seen.add(id(item))
    held: list[object] = list(vars(item).values()) if hasattr(item, "__dict__") else []
    if isinstance(item, dict):
        held += item.values()
    elif isinstance(item, (list, tuple, set, frozenset)):
        held += item
    elif isinstance(item, MethodType):
        held.append(item.__self__)
    for entry in held:
        yield from _code_in(entry, seen)


def _uncopied(module: nn.Module) -> tuple[str, Exception] | None:
    """The first attribute that cannot be copied, by its path, and why."""
    for path, part in module.named_modules():
        for name, item in [
            *part.named_parameters(recurse=False),
            *part.named_buffers(recurse=False),
            *vars(part).items(),
        ]:
            try:
                if name != "_modules":  # they come on their own
                    copied(item)
            except Exception as error:
                return f"{path}.{name}".removeprefix("."), error
    return None
