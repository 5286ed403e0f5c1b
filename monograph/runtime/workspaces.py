"""What kernels of libraries take for themselves while they run: each is run once, on zeros, and what it allocates is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import fx

from monograph.compat.inductor.checks.any_values import LIBRARY_KERNELS, SPACES_OF_ANY_VALUES
from monograph.compat.modes import outside_of_function_modes, outside_of_modes
from monograph.compat.ops import OpOverload, schema_of, writes_to_inputs
from monograph.runtime.one_piece import most_allocated

_MOST_BYTES: Final = 1 << 30  # of arguments that are made


class Workspaces:
    """The bytes that kernels take, each remembered by its arguments."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def allocated_by(self, op: Any, arguments: Callable[[], tuple[Sequence[Any], Mapping[str, Any]]]) -> int:
        """The most bytes that a kernel on the CPU holds of what it makes, its results among them.

        `arguments` gives those by place and by name, with tensors on the device `meta`; it is asked for kernels of libraries
        alone. Gives 0 for others, and for what cannot be run here.
        """
        if not _is_of_library(op):
            return 0
        given: list[str] = []
        args, kwargs = arguments()
        call = fx.node.map_aggregate((tuple(args), dict(kwargs)), lambda item: _noted(item, given))
        key = repr((op, given))
        if key not in self._known:
            self._known[key] = _tried(op, *call)
        return self._known[key]


def _is_of_library(op: Any) -> bool:
    if not isinstance(op, OpOverload) or writes_to_inputs(op):
        return False
    schema = schema_of(op)
    if any(
        item.name == "workspace" for item in schema.arguments
    ):  # of another op, and no kernel looks at what is in it
        return False
    space, _, name = str(schema.name).partition("::")
    return space in SPACES_OF_ANY_VALUES or (space == "aten" and name in LIBRARY_KERNELS)


def _noted(item: Any, given: list[str]) -> Any:
    is_tensor = isinstance(item, torch.Tensor)
    given.append(f"{tuple(item.shape)} {item.stride()} {item.dtype}" if is_tensor else repr(item))
    return item


def _tried(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    nbytes = 0

    def made(item: Any) -> Any:
        nonlocal nbytes
        if not isinstance(item, torch.Tensor):
            return item
        nbytes += item.untyped_storage().nbytes()
        if nbytes > _MOST_BYTES:
            raise MemoryError
        return torch.empty_strided(item.shape, item.stride(), dtype=item.dtype, device="cpu").zero_()

    try:
        with outside_of_modes(), outside_of_function_modes(), torch.no_grad():
            given, named = fx.node.map_aggregate((tuple(args), dict(kwargs)), made)
            return most_allocated(lambda: op(*given, **named)) or 0
    except (MemoryError, RuntimeError):  # too large, or nothing that it takes
        return 0
