"""Does code only make tensors of an array? Then its numbers are read by the step itself, and not by Python."""

from __future__ import annotations

import dis
from collections.abc import Sequence
from types import CodeType

# functions of torch that record where the numbers are, and read none of them
_CONVERTERS = frozenset({"from_numpy", "as_tensor", "asarray", "frombuffer", "from_dlpack", "tensor"})
_TORCH = "torch"
_LOADS = frozenset({"LOAD_FAST", "LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CONST"})
_CALLS = frozenset({"PRECALL", "CALL"})  # the first one is gone since Python 3.12
_GETS_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
# local variables, names that get a value, and names of arguments
_OTHERS = frozenset(
    {
        *(
            "LOAD_FAST",
            "LOAD_FAST_CHECK",
            "STORE_FAST",
            "DELETE_FAST",
            "LOAD_CLOSURE",
            "MAKE_CELL",
            "KW_NAMES",
        ),
        *("STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "STORE_NAME", "STORE_DEREF"),
    }
)


def only_converts(code: CodeType, name: str) -> bool:
    """True if each time that code asks for an attribute or a variable of this name, it makes a tensor of it at once.

    `torch.from_numpy(self.mask)`, and so by way of a local variable. Where the bytecode is not understood: False.
    """
    instructions = list(dis.get_instructions(code))
    return all(
        _is_converted(instructions, index)
        for index, item in enumerate(instructions)
        if _spells(item.argval, name) and item.opname not in _OTHERS
    )


def _spells(argument: object, name: str) -> bool:
    return argument == name or (isinstance(argument, (tuple, frozenset)) and name in argument)


def _is_converted(instructions: Sequence[dis.Instruction], index: int) -> bool:
    """True if what is loaded at `index` is the first argument of a function of torch that makes a tensor of it."""
    item, following = instructions[index], instructions[index + 1]
    if item.opname not in _LOADS | {"LOAD_ATTR"} or item.opname == "LOAD_CONST":
        return False
    if following.opname == "STORE_FAST":
        uses = [place for place, other in enumerate(instructions) if _spells(other.argval, following.argval)]
        return all(
            instructions[place].opname == "STORE_FAST"
            or (instructions[place].opname == "LOAD_FAST" and _is_argument(instructions, place))
            for place in uses
        )
    return _is_argument(instructions, index)


def _is_argument(instructions: Sequence[dis.Instruction], index: int) -> bool:
    first = index
    if instructions[index].opname == "LOAD_ATTR":
        first -= 1
        while instructions[first].opname == "LOAD_ATTR":
            first -= 1
        if instructions[first].opname not in _LOADS:
            return False
    if first < 2:
        return False
    module, function = instructions[first - 2 : first]
    made = function.opname in _GETS_ATTRIBUTE and function.argval in _CONVERTERS
    return made and module.argval == _TORCH and _is_passed(instructions[index + 1 :])


def _is_passed(following: Sequence[dis.Instruction]) -> bool:
    """True if the value on top of the stack goes into a call as it is, after more arguments of plain names."""
    depth = 1
    for item in following:
        if item.opname in _CALLS:
            return item.arg == depth
        if item.opname in _LOADS:
            depth += 1
        elif item.opname != "KW_NAMES" and not (item.opname == "LOAD_ATTR" and depth > 1):
            return False
    return False
