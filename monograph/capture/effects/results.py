"""What build() returns, and what it leaves in its arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from monograph.capture.effects.arguments import GivenContainer, NewContent
from monograph.capture.effects.held_fakes import holds_fakes
from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.distributed.tensors import is_sharded, local_of
from monograph.compat.fakes import is_fake
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.errors import CaptureError
from monograph.ir.call.tree import Tree, flatten, with_parts
from monograph.ir.graph_signature import Argument, Copy, Refill, Result


class Results:
    """Classifies leaves: those that are outputs of the program, and others, which a call gets elsewhere.

    To be made when all new state is collected: a tensor that gets another value is returned as it was.
    """

    def __init__(self, inputs: Inputs, state_outputs: Iterable[StateOutput]) -> None:
        self.inputs = inputs
        self.outputs: list[Any] = []  # the values that the program must compute
        self._positions: dict[int, int] = {}  # among these, by their ids
        self._with_history = set[int]()  # parts of DTensors that require grad, by their ids
        targets = (state_output.target for state_output in state_outputs)
        self._replaced = {id(target.tensor) for target in targets if isinstance(target, Copy)}

    def returned(self, value: Any) -> tuple[list[Result], Tree]:
        """The leaves of what build() returned, and its form."""
        found: list[Any] = []
        tree, leaves = self._taken_apart(flatten(value, found), found)
        return [self._result(leaf, "returns") for leaf in leaves], tree

    def _taken_apart(self, tree: Tree, leaves: Sequence[Any]) -> tuple[Tree, list[Any]]:
        """The form and the leaves with the parts of sparse tensors and of DTensors in their place."""
        self._with_history |= {
            id(local_of(leaf)) for leaf in leaves if is_sharded(leaf) and leaf.requires_grad
        }
        found: list[Any] = []
        return with_parts(tree, iter(leaves), is_fake, found), found

    def left_in_arguments(self, changed: Iterable[NewContent], given: Iterable[Any]) -> list[Refill]:
        """What build() left in containers among its arguments, whose leaves are `given`."""
        own = {id(leaf): index for index, leaf in enumerate(given)}
        return [self._refill(content, own) for content in changed]

    def _refill(self, content: NewContent, own: Mapping[int, int]) -> Refill:
        found: list[Any] = []
        tree, leaves = self._taken_apart(flatten(list(content.values), found, ()), found)
        results = []
        for leaf in leaves:
            if isinstance(leaf, GivenContainer):
                results.append(Result("container", index=leaf.index))
            elif id(leaf) in own:
                results.append(Result("argument", index=own[id(leaf)]))
            else:
                results.append(self._result(leaf, f"puts into argument {content.path}"))
        return Refill(content.container, content.path, content.keys, tree, tuple(results), content.put)

    def _result(self, leaf: Any, does: str) -> Result:
        if not isinstance(leaf, torch.Tensor) and not is_symbolic(leaf):
            if holds_fakes(leaf):
                raise CaptureError(
                    f"build() {does} a {type(leaf).__module__}.{type(leaf).__qualname__} that holds tensors of the step",
                    hint="use the tensors themselves, in tuples, lists, dicts or dataclasses",
                )
            return Result("fixed", value=leaf)
        item = self.inputs.by_fake.get(id(leaf))
        if item is not None and isinstance(item.source, Argument):
            return Result("argument", index=item.source.index)
        if isinstance(leaf, torch.Tensor):
            real = self.inputs.real_of(leaf)
            real = leaf if real is None and not is_fake(leaf) else real
            if real is not None and id(real) not in self._replaced:
                return Result("fixed", value=real)
            leaf = self.inputs.fake(leaf)
        if id(leaf) not in self._positions:
            self._positions[id(leaf)] = len(self.outputs)
            self.outputs.append(leaf)
        needs_grad = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        needs_grad |= id(leaf) in self._with_history
        return Result("output", index=self._positions[id(leaf)], requires_grad=needs_grad)
