"""Whether custom ops give what their fake kernels report: shapes, strides and types that the rest depends on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.compat.modes import watching_results
from monograph.ir.call.nested import leaves_in
from monograph.ir.meta import TensorMeta, origin, tensor_meta, value
from monograph.runtime.runner import Runner
from monograph.user_code.lines import Origin


class WrongDescription(RuntimeError):
    """A custom op has given something else than its fake kernel reports; `where` is the line that calls it."""

    def __init__(self, message: str, where: Origin) -> None:
        super().__init__(message)
        self.where = where


@contextmanager
def checked_layouts(nodes: Iterable[fx.Node]) -> Iterator[None]:
    """Compare the results of these ops with their descriptions while a step runs; ops may run in another order.

    Raises WrongDescription for a result that no node with its op describes.
    """
    expected: dict[Any, list[Any]] = defaultdict(list)
    places = dict[Any, Origin]()
    for node in nodes:
        expected[node.target].append(value(node))
        places.setdefault(node.target, origin(node))

    def see(target: Any, result: Any) -> None:
        if target not in expected:
            return
        found = _forms(result)
        if not any(_fits(found, list(leaves_in(described))) for described in expected[target]):
            raise WrongDescription(
                f"{target} gives {', '.join(map(_text, found))}; its fake kernel reports "
                f"{', '.join(_text(item) for item in leaves_in(expected[target][0]))}",
                places[target],
            )

    with watching_results(see):
        yield


def _forms(result: Any) -> list[TensorMeta | None]:
    return [tensor_meta(item) if isinstance(item, torch.Tensor) else None for item in leaves_in(result)]


def _fits(found: list[TensorMeta | None], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(
        not isinstance(b, TensorMeta) or (a is not None and _key(a) == _key(b))
        for a, b in zip(found, expected, strict=True)
    )


def _key(item: TensorMeta) -> tuple[Any, ...]:
    """What is compared, in numbers: the first step has the sizes of the capture.

    Fakes are often wrong about steps along dimensions of one element, and ops that run take them as they are.
    """
    steps = zip(item.shape, item.stride, strict=True)
    return [*map(int, item.shape)], [int(step) for size, step in steps if size != 1], item.dtype


def _text(item: TensorMeta | None) -> str:
    return "no tensor" if item is None else f"shape {item.shape}, strides {item.stride}, {item.dtype}"


def checked_once(runner: Runner, custom: Sequence[fx.Node], after: Callable[[Runner], object]) -> Runner:
    """A runner that looks in its first run at the layouts that custom ops give: their fake kernels may have reported
    others. `after` gets the plain one then.
    """

    def run(inputs: list[Any]) -> Sequence[Any]:
        with checked_layouts(custom):
            outputs = runner.run(inputs)
        after(runner)
        return outputs

    return replace(runner, run=run)
