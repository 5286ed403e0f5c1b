"""Calls of chains: Python functions that make the results, and the proof that these have the bits of eager's kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from monograph.compat.modes import outside_of_function_modes, outside_of_modes
from monograph.elementwise.chain_code import PIECE, ChainCode
from monograph.elementwise.chains import Chain
from monograph.elementwise.parts import is_plain
from monograph.elementwise.proof import same_bits, special_values
from monograph.ir.meta import TensorMeta, form

_LONG, _POINTER, _NUMBER = ctypes.c_long, ctypes.c_void_p, ctypes.c_double
# Elements that a chain is tried on: several pieces and what is left over, or rows; all on one thread.
_TRIED = (3 * PIECE + 37, *range(1, 70, 4))
_ROWS, _MOST_WIDTH = 61, 509

OpByOp = Callable[..., Any]


def function_of(chain: Chain, library: ctypes.CDLL, name: str) -> Callable[..., int]:
    """The function of a chain: `(count, width, tensors, numbers, results)`, addresses as numbers."""
    found = getattr(library, name)
    found.argtypes = [
        _LONG,
        _LONG,
        *[_POINTER] * len(chain.tensors),
        *[_NUMBER] * len(chain.numbers),
        *[_POINTER] * len(chain.results),
    ]
    run: Callable[..., int] = found
    return run


def call_of(code: ChainCode, library: ctypes.CDLL, op_by_op: OpByOp) -> Callable[..., Any]:
    """A function from a chain's tensors and numbers to its results: one, or a tuple of several.

    `op_by_op` takes the same and gives a tuple of all results: it runs where memory holds other numbers than the tensors, or none.
    """
    chain = code.chain
    tensors = [f"x{index}" for index in range(len(chain.tensors))]
    numbers = [f"g{index}" for index in range(len(chain.numbers))]
    results = [f"r{index}" for index in range(len(chain.results))]
    names: dict[str, Any] = {
        "run": function_of(chain, library, code.name),
        "op_by_op": op_by_op,
        "like": torch.empty_like,
        "empty": torch.empty_strided,
    }
    lines = [f"def chain({', '.join((*tensors, *numbers))}):"]
    instead = f"op_by_op({', '.join((*tensors, *numbers))}){'[0]' if len(results) == 1 else ''}"
    if unsure := [
        f"{x}.is_neg()" for x, node in zip(tensors, chain.tensors, strict=True) if _may_be_neg(node)
    ]:
        lines.append(f"    if {' or '.join(unsure)}: return {instead}")
    for name, node in zip(results, chain.results, strict=True):
        made = form(node)
        assert made is not None
        names[f"made_{name}"] = made.shape, made.stride
        like = _same(chain, made)
        new = f"empty(*made_{name}, dtype=type_{name}, device='cpu')" if like is None else f"like(x{like})"
        names[f"type_{name}"] = made.dtype
        lines.append(f"    {name} = {new}")
    pointers = [f"{name}.data_ptr()" for name in tensors], [f"{name}.data_ptr()" for name in results]
    given = ", ".join((str(chain.size), str(chain.width or PIECE), *pointers[0], *numbers, *pointers[1]))
    lines += [f"    if run({given}): return {instead}", f"    return {', '.join(results)}"]
    text = compile("\n".join(lines), "<monograph chain>", "exec")
    exec(text, names)  # made from our own program, never loaded from a file
    made_function: Callable[..., Any] = names["chain"]
    made_function.makes_memory = True  # type: ignore[attr-defined]
    made_function.__module__ = "chain"
    made_function.__qualname__ = "_".join(str(node.target).split(".")[1] for node in chain.nodes[:4])
    return made_function


def _same(chain: Chain, made: TensorMeta) -> int | None:
    """The number of an input of the same form as a result."""
    for index, node in enumerate(chain.tensors):
        given = form(node)
        if given is not None and (given.layout, given.dtype) == (made.layout, made.dtype):
            return index
    return None


def _may_be_neg(node: fx.Node) -> bool:
    """True if only the tensor itself says whether its memory holds its numbers."""
    made = form(node)
    return (
        (node.op == "placeholder" or not is_plain(node)) and made is not None and made.dtype is not torch.bool
    )


def has_eagers_bits(code: ChainCode, library: ctypes.CDLL) -> bool:
    """True if the code of a chain computes what its ops compute, for values of all sorts."""
    chain = code.chain
    run = function_of(chain, library, code.name)
    lengths = [(_ROWS, min(chain.width, _MOST_WIDTH))] if chain.width else [(1, item) for item in _TRIED]
    values = special_values(chain.dtype, 1)[:, 0]
    source = torch.Generator().manual_seed(1)
    with outside_of_modes(), outside_of_function_modes(), torch.no_grad():
        for rows, width in lengths:
            for plain in (True, False):
                inputs = _drawn(chain, rows, width, None if plain else values, source)
                expected = [item.contiguous() for item in computed(chain, inputs)]
                results = [torch.empty_like(item) for item in expected]
                pointers = [inputs[node].data_ptr() for node in chain.tensors]
                numbers = [inputs[node] for node in chain.numbers]
                length = width if chain.width else PIECE
                if run(rows * width, length, *pointers, *numbers, *(item.data_ptr() for item in results)):
                    return False
                if not all(map(same_bits, results, expected)):
                    return False
    return True


def _drawn(
    chain: Chain, rows: int, width: int, values: torch.Tensor | None, source: torch.Generator
) -> dict[fx.Node, Any]:
    """Inputs of a chain of so many elements: of these values, or as training meets them."""
    shapes = {"whole": (rows, width), "column": (rows, 1), "row": (width,), "single": ()}
    inputs: dict[fx.Node, Any] = dict.fromkeys(chain.numbers, 0.25)
    for node in chain.tensors:
        shape, made = shapes[chain.place(node).kind], form(node)
        assert made is not None
        if values is None:
            drawn = torch.randn(shape, generator=source, dtype=torch.float64).to(chain.dtype)
        else:
            drawn = values[torch.randint(len(values), shape, generator=source)]
        drawn = drawn > 0 if made.dtype is torch.bool else drawn
        is_repeated = made.shape == chain.layout.shape  # by its strides
        inputs[node] = drawn.expand(rows, width) if is_repeated else drawn
    return inputs


def computed(chain: Chain, inputs: Mapping[fx.Node, Any]) -> Sequence[torch.Tensor]:
    """What the ops of a chain compute one by one."""
    known = dict(inputs)
    for node in chain.nodes:
        args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
        known[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return [known[node] for node in chain.results]
