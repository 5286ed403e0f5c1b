"""The branches that Python took in a captured step, as data: what has to hold before each call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from monograph.artifact.bounds.describe import check_graph
from monograph.artifact.programs import expressions
from monograph.artifact.programs.expressions import Expression
from monograph.artifact.programs.serialize import GRAPH_KEYS, graph_from_json, graph_to_json
from monograph.capture.tensors.conditions import NUMBER, Conditions, ReadOut
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.leaves import Json, check, list_of, typed
from monograph.ir.size_numbers import reads_sizes
from monograph.sizes.size import Size

_LISTS: Final = {"i": "inputs", "n": "numbers"}


@dataclass(frozen=True)
class Branches:
    """The branches that a program was captured with: a text for people and a check for each."""

    checks: tuple[tuple[str, Expression], ...]
    read_out: ReadOut | None

    def broken_by_sizes(self) -> str | None:
        """The first branch that would not be taken whatever the inputs are, where sizes are numbers already."""
        for about, holds in self.checks:
            try:
                if not holds(dict.fromkeys(_LISTS.values(), ())):
                    return about
            except IndexError:  # it is about an input
                continue
            except (ArithmeticError, TypeError, ValueError):
                return about
        return None

    def broken(self, inputs: Sequence[Any]) -> str | None:
        """The first branch that would not be taken with these inputs."""
        if not self.checks:
            return None
        numbers = () if self.read_out is None else self.read_out(inputs)
        scope = {"inputs": inputs, "numbers": numbers}
        for about, holds in self.checks:
            try:
                if not holds(scope):
                    return about
            except (ArithmeticError, TypeError, ValueError):
                return about
        return None


def branches_to_json(conditions: Conditions, sizes: Mapping[tuple[int, int], Size]) -> Json:
    """The branches; `sizes` are those of inputs that vary, by position and dimension.

    `Refused` where a number that decides one is computed with a size that varies.
    """
    checks = [
        [about, expressions.to_json(text, _LISTS, sizes)]
        for about, text in zip(conditions.about, conditions.texts, strict=True)
    ]
    read_out = conditions.read_out
    if read_out is None:
        return {"checks": checks, "numbers": None}
    if reads_sizes(read_out.module.graph):
        texts = zip(conditions.about, conditions.texts, strict=True)
        about = next(about for about, text in texts if NUMBER.search(text))
        raise Refused(
            f"`{about}` is computed with a size that varies, which no artifact can hold",
            "config.dynamic(False): each size has a build then, and the artifact has them all",
        )
    names = [node.name for node in read_out.module.graph.find_nodes(op="placeholder")]
    slice_of = {"positions": list(read_out.positions), "inputs": names, **graph_to_json(read_out.module)}
    return {"checks": checks, "numbers": slice_of}


def branches_from_json(value: Json, num_inputs: int, *, trust: bool) -> Branches:
    check(
        type(value) is dict and tuple(value) == ("checks", "numbers"), "the branches of a program are wrong"
    )
    read_out, num_numbers = None, 0
    if (numbers := value["numbers"]) is not None:
        keys = ("positions", "inputs", *GRAPH_KEYS)
        check(type(numbers) is dict and tuple(numbers) == keys, "the branches of a program are wrong")
        names = [typed(name, str) for name in list_of(numbers["inputs"])]
        module = graph_from_json(numbers, names, trust=trust)
        positions = list_of(numbers["positions"], len(names))
        check(
            all(type(p) is int and 0 <= p < num_inputs for p in positions),
            "the branches of a program are wrong",
        )
        results = module.graph.output_node().args[0]
        check(isinstance(results, tuple), "the branches of a program are wrong")
        check_graph(module)
        read_out, num_numbers = ReadOut(tuple(positions), module), len(results)  # type: ignore[arg-type]
    lengths = dict(zip(_LISTS.values(), (num_inputs, num_numbers), strict=True))
    checks = [list_of(item, 2) for item in list_of(value["checks"])]
    return Branches(
        tuple((typed(about, str), expressions.from_json(item, lengths)) for about, item in checks), read_out
    )
