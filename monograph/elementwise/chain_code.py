"""The C code of chains: a function for each, a loop over the elements, in rows where an argument is repeated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.compat.ops import named_arguments, schema_arguments
from monograph.elementwise.chains import Chain
from monograph.elementwise.formulas import ALL_FORMULAS, ONE_THREAD, constant
from monograph.elementwise.kinds import C_TYPES, HEAD, Choose
from monograph.ir.meta import form

PIECE = 8192  # elements of a row where nothing says how long it is
_LARGEST = {torch.float32: "FLT_MAX", torch.float64: "DBL_MAX"}


@dataclass(frozen=True)
class ChainCode:
    """A chain, and the name of its function in the code of all."""

    chain: Chain
    name: str


def code_of(chains: Iterable[Chain], choose: Choose) -> tuple[str, list[ChainCode]]:
    """The code of chains, and these with their functions; without those of which a formula does not hold here.

    Chains that are alike have one function: sizes are its arguments.
    """
    known: dict[str, str] = {}
    found: list[ChainCode] = []
    for chain in chains:
        try:
            text = _Writer(chain, choose).text()
        except LookupError:
            continue
        found.append(ChainCode(chain, known.setdefault(text, f"chain{len(known)}")))
    functions = [text.replace("NAME", name) for text, name in known.items()]
    return "\n".join([HEAD, *functions]), found


class _Writer:
    """Writes the function of a chain: `int NAME(long count, long width, tensors, numbers, results)`.

    It gives 1, and has written nothing, if its ops have to run one by one.
    """

    def __init__(self, chain: Chain, choose: Choose) -> None:
        self._chain, self._choose = chain, choose
        self._names = {node: f"x{index}" for index, node in enumerate(chain.tensors)}
        self._names |= {node: f"g{index}" for index, node in enumerate(chain.numbers)}
        self._names |= {node: f"v{index}" for index, node in enumerate(chain.nodes)}
        self._kind = C_TYPES[chain.dtype]

    def text(self) -> str:
        """The function. Raises LookupError if a formula does not hold."""
        chain = self._chain
        parameters = ["long count", "long width"]
        parameters += [f"const {self._type(node)}* p{i}" for i, node in enumerate(chain.tensors)]
        parameters += [f"double g{index}" for index in range(len(chain.numbers))]
        parameters += [f"{self._type(node)}* r{index}" for index, node in enumerate(chain.results)]
        pointers = [f"p{index}" for index in range(len(chain.tensors))]
        pointers += [f"r{index}" for index in range(len(chain.results))]
        outside = [f"typedef {self._kind} T;", f"if (!({' && '.join(pointers)})) return 1;"]
        outside += self._refusals()
        outside += self._loads("single", "*p{0}")
        singles = [f"{self._type(node)} x{index}" for index, node in self._placed("single")]
        rows = self._loads("column", "p{0}[row]")
        rows += self._pointers("whole", "p{0} + first") + self._pointers("row", "p{0}")
        rows += [f"{self._type(node)}* m{i} = r{i} + first;" for i, node in enumerate(chain.results)]
        inside = self._loads("whole", "q{0}[i]") + self._loads("row", "q{0}[i]")
        inside += [
            f"const {self._type(node)} {self._names[node]} = {self._value(node)};" for node in chain.nodes
        ]
        inside += [f"m{index}[i] = {self._names[node]};" for index, node in enumerate(chain.results)]
        row = (
            f"static void NAME_row(long row, {', '.join((*parameters, *singles))}) {{\n"
            + _lines(2, outside[:1])
            + "  const long first = row * width, left = count - first, length = left < width ? left : width;\n"
            + _lines(2, rows)
            + "  #pragma GCC ivdep\n"
            + "  for (long i = 0; i < length; i++) {\n"
            + _lines(4, inside)
            + "  }\n}\n"
        )
        given = ", ".join(re.findall(r"(\w+)(?:, |$)", ", ".join((*parameters, *singles))))
        return row + (
            f"int NAME({', '.join(parameters)}) {{\n"
            + _lines(2, outside)
            + "  const long rows = (count + width - 1) / width;\n"
            + f"  if (count <= {ONE_THREAD}) {{\n"
            + f"    for (long row = 0; row < rows; row++) NAME_row(row, {given});\n"
            + "    return 0;\n  }\n"
            + "  #pragma omp parallel for\n"
            + f"  for (long row = 0; row < rows; row++) NAME_row(row, {given});\n"
            + "  return 0;\n}"
        )

    def _refusals(self) -> list[str]:
        """Numbers that eager's kernels do not take, or for which they compute the last elements otherwise."""
        largest = _LARGEST[self._chain.dtype]
        lines = [
            f"if (!(fabs(g{index}) <= {largest})) return 1;" for index in range(len(self._chain.numbers))
        ]
        for node in self._chain.nodes:
            formula = ALL_FORMULAS[node.target]
            if formula.unless:
                lines.append(f"if ({formula.refused(self._arguments(node))}) return 1;")
        return lines

    def _loads(self, kind: str, text: str) -> list[str]:
        return [
            f"const {self._type(node)} x{index} = {text.format(index)};" for index, node in self._placed(kind)
        ]

    def _pointers(self, kind: str, text: str) -> list[str]:
        return [
            f"const {self._type(node)}* q{index} = {text.format(index)};"
            for index, node in self._placed(kind)
        ]

    def _placed(self, kind: str) -> list[tuple[int, fx.Node]]:
        """The tensors that are spread in a way, with their numbers."""
        tensors = enumerate(self._chain.tensors)
        return [(index, node) for index, node in tensors if self._chain.place(node).kind == kind]

    def _type(self, node: fx.Node) -> str:
        made = form(node)
        assert made is not None
        return C_TYPES.get(made.dtype, "bool")

    def _value(self, node: fx.Node) -> str:
        return ALL_FORMULAS[node.target].written(self._choose(node), self._arguments(node))

    def _arguments(self, node: fx.Node) -> dict[str, str]:
        given = named_arguments(node.target, node.args, node.kwargs)
        return {
            item.name: self._spelled(given.get(item.name, item.default))
            for item in schema_arguments(node.target)
        }

    def _spelled(self, item: Any) -> str:
        if isinstance(item, fx.Node):
            return self._names[item] if form(item) is not None else f"((T){self._names[item]})"
        return constant(item, "T")


def _lines(indent: int, lines: Sequence[str]) -> str:
    return "".join(f"{' ' * indent}{line}\n" for line in lines)
