"""Sizes that vary as symbols of torch, for its compilers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monograph.compat.fakes import compute_in_python
from monograph.sizes.place import size_places
from monograph.sizes.size import Size, expression_of


def fake_inputs(examples: Sequence[tuple[Any, ...]]) -> tuple[tuple[Any, ...], Any, Callable[[], list[str]]]:
    """Fakes of tensors described as (shape, stride, dtype, device), their mode, and what gives what was assumed of sizes."""
    fakes: Any = importlib.import_module("torch._subclasses.fake_tensor")
    symbols = _SizeSymbols([shape for shape, *_ in examples])
    mode = fakes.FakeTensorMode(allow_non_fake_inputs=True, shape_env=symbols.environment)
    if symbols.environment is not None:
        compute_in_python(mode)
    with mode:
        inputs = tuple(
            torch.empty_strided(
                [*map(symbols.number, shape)], [*map(symbols.number, stride)], dtype=dtype, device=device
            )
            for shape, stride, dtype, device in examples
        )
    return inputs, mode, symbols.assumed


class _SizeSymbols:
    """The sizes that vary in some shapes, by their names; `environment` is None if there are none.

    What: ShapeEnv, its symbols and guards, and the printer of sympy's expressions. Why: code for a range of sizes.
    Degraded path: an error, and the step then runs on the aten backend.
    """

    def __init__(self, shapes: Sequence[Sequence[int]]) -> None:
        named = {
            name: int(shapes[place.position][place.dim]) // place.parts
            for name, place in size_places(shapes).items()
        }
        self.environment: Any = None
        self._numbers: dict[str, Any] = {}
        if named:
            symbolic: Any = importlib.import_module("torch.fx.experimental.symbolic_shapes")
            self.environment = symbolic.ShapeEnv(specialize_zero_one=True, duck_shape=False)
        for name, example in named.items():
            source = importlib.import_module("torch._dynamo.source").ConstantSource(name)
            symbol = self.environment.create_symbol(
                example, source=source, dynamic_dim=symbolic.DimDynamic.DYNAMIC, constraint_dim=None
            )
            self._numbers[name] = self.environment.create_symintnode(symbol, hint=example, source=source)

    def number(self, size: int) -> Any:
        """A size as torch computes with it. Raises NameError for one of a name that no shape has alone."""
        if not isinstance(size, Size):
            return size
        return eval(expression_of(size).as_part(), {}, dict(self._numbers))

    def assumed(self) -> list[str]:
        """What has been decided on the sizes, as Python over the names."""
        guards = () if self.environment is None else self.environment.guards
        return [self._text(guard.expr) for guard in guards]

    def _text(self, expression: Any) -> str:
        printers: Any = importlib.import_module("torch.utils._sympy.printers")
        symbol = importlib.import_module("sympy").Symbol
        names = {number.node.expr: symbol(name) for name, number in self._numbers.items()}
        text: str = printers.PythonPrinter().doprint(expression.xreplace(names))
        return text
