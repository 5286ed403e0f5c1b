"""The hot path: bind inputs, run, write state back after the last op that can fail, rebuild the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from monograph.compat.amp import AUTOCAST_DEVICES, without_autocast
from monograph.compat.autograd import apply_of
from monograph.compat.global_state import set_grad_enabled
from monograph.compat.modes import hidden_from_dispatch_modes
from monograph.compat.ops import is_custom
from monograph.errors import GraphBoundaryError, NonfiniteError
from monograph.ir.call.tree import LEAF, unflatten
from monograph.ir.graph_signature import (
    ArgumentChanges,
    BoundProgram,
    Gradient,
    Result,
    Write,
)
from monograph.ir.port import FINITE
from monograph.ir.program import Program
from monograph.runtime.binding import InputTable, Outputs, generators_of
from monograph.runtime.custom_ops import checked_once
from monograph.runtime.deliver import deliver, held_gradient
from monograph.runtime.failures import raise_in_place_of
from monograph.runtime.live_view import live_view
from monograph.runtime.python_values import Values, known_before, values_after
from monograph.runtime.rebind import bound_anew
from monograph.runtime.repetition import Repetition, repetition
from monograph.runtime.runner import Runner, rehearse
from monograph.state.random import read_generators, restore_generators
from monograph.state.signals import held_back
from monograph.state.swap import Swap


class Executor:
    """Runs one build. Nothing the user can see changes before every op has run, but what the runner writes itself."""

    def __init__(self, bound: BoundProgram, runner: Runner, program: Program) -> None:
        """`program` is what the runner runs: the program of `bound` after all passes."""
        self._runner = runner
        self.has_run = False
        self.steps = 0  # that it has made
        self.after: Sequence[Callable[[], Any]] | None = (
            None  # what the graph does after each step, once it is known
        )
        self.undone = False  # the last run failed before its program was through
        self._bind_to(bound)
        paths = [port.path for port in program.outputs]
        self._finite = paths.index(FINITE) if FINITE in paths else None
        self._generators = generators_of(bound)
        custom = [node for node in program.ops() if is_custom(node.target)]
        if custom and (runner.update is not None or not runner.written):
            self._runner = checked_once(runner, custom, self._use)
        self._single = bound.result_tree == LEAF

    def _use(self, runner: Runner) -> None:
        self._runner = runner

    def _bind_to(self, bound: BoundProgram) -> None:
        """Take inputs from where they are, and write to where outputs go."""
        self._bound = bound
        self._inputs, self._outputs = InputTable.of(bound), Outputs.of(bound, self._runner.written)
        self.has_changes = bool(bound.changes)
        self._adds_gradients, self._has_values = self._outputs.add_gradients, bool(bound.writes)
        self._has_writes = bool(self._outputs.live or self._outputs.others or bound.writes or bound.changes)

    def given(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that it finds by itself, each with one on the memory that it had when it was found."""
        return self._inputs.given(self._bound)

    def bind_anew(self, swap: Swap) -> None:
        """Work on what has taken the place of its tensors and containers."""
        self._bind_to(bound_anew(self._bound, swap))

    def bind(self, leaves: Sequence[Any]) -> list[Any]:
        """The program's inputs for a call with these leaves."""
        fixed, arguments, numbers, gradients = self._inputs
        inputs = fixed.copy()
        for position, index in arguments:
            leaf = leaves[index]
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                with hidden_from_dispatch_modes():
                    leaf = leaf.detach()
            inputs[position] = leaf
        for position, number in numbers:
            found = number.container[number.key]
            inputs[position] = found if number.index is None else found[number.index]
        for position, parameter in gradients:
            inputs[position] = held_gradient(parameter)
        return inputs

    def release(self) -> None:
        """Drop every reference to tensors; it cannot run any more."""
        self._inputs = self._inputs._replace(fixed=[], gradients=[])
        self._outputs = self._outputs._replace(live=[], others=[])
        self._bound = self._bound.unbound()

    @property
    def bound(self) -> BoundProgram:
        """The program before its passes, and what its inputs and outputs are bound to."""
        return self._bound

    def rehearse(self, inputs: list[Any]) -> list[Any]:
        """The program's outputs for inputs in memory of their own, which it may change. Nothing that lives is."""
        return rehearse(self._runner, self._bound.program, inputs)

    @property
    def changes(self) -> ArgumentChanges:
        """What the step leaves in its arguments besides the values of tensors."""
        return self._bound.changes

    def run(
        self,
        leaves: Sequence[Any],
        after: Sequence[Callable[[], Any]] = (),
        containers: Sequence[Any] = (),
        *,
        inputs: list[Any] | None = None,
    ) -> Any:
        """Run the program for a call with these leaves, commit the new state, do what comes `after`, give the result.

        `containers` are those of the call, where the step changes some; `inputs` are the program's, if they are bound
        already.
        An interrupt undoes the step while ops run, and lets it be completed once they have: never half of one. It is
        met when it comes, since holding it back would cost each call.
        """
        inputs = self.bind(leaves) if inputs is None else inputs
        states = read_generators(self._generators) if self._generators else ()
        grad_mode = torch.is_grad_enabled()
        made: list[Sequence[Any]] = []  # what the runner gave, as soon as it has run
        gradients: dict[int, torch.Tensor] | None = None
        done: list[Any] = []
        self.undone = False
        try:
            known = known_before(self._bound.writes, inputs) if self._has_values else ()
            set_grad_enabled(False)
            self._run_program(inputs, made)
            set_grad_enabled(grad_mode)
            outputs = self._finished(made, inputs)
            self.has_run = True
            if self._finite is not None and not outputs[self._finite]:
                restore_generators(self._generators, states)
                raise NonfiniteError("the step made a NaN or an infinity")
            gradients = self._summed_gradients(outputs, leaves) if self._adds_gradients else {}
            written, fault = self._written(known, outputs) if known else ((), None)
            if fault is not None and not self._runner.written:
                restore_generators(self._generators, states)
                raise fault
            if self._has_writes:
                self._commit(outputs, leaves, gradients, written)
            for action in after:
                done.append(action())
            if fault is not None:  # state was written already: the step is done, but for this number
                raise fault
        except BaseException as error:
            self.undone = not made
            torch.set_grad_enabled(grad_mode)  # an interrupt may fall between the lines that would do it
            if not made:
                restore_generators(self._generators, states)
                if isinstance(error, Exception) or self._runner.update is not None:
                    restore = partial(restore_generators, self._generators, states)
                    raise_in_place_of(error, self._runner, inputs, restore)
            elif not isinstance(error, Exception):
                if gradients is None:
                    gradients = self._summed_gradients(self._finished(made, inputs), leaves)
                self._complete(made, inputs, known, leaves, gradients, after[len(done) :], containers)
            raise
        self.steps += 1
        return self._results(outputs, leaves, containers)

    def numbers(self) -> list[Any]:
        """The numbers of now that the program reads in Python."""
        return [number.read() for _, number in self._inputs.numbers]

    @property
    def number_places(self) -> list[tuple[int, Any]]:
        """Where those are: the id of the container, and the key."""
        return [(id(number.container), number.key) for _, number in self._inputs.numbers]

    def repeated(
        self, stacks: Sequence[torch.Tensor], numbers: Sequence[Sequence[Any]] = ()
    ) -> Repetition | None:
        """A loop of runs with the parts of stacks as leaves, each with the `numbers` of its own if there are any.

        None where a run needs more of Python than to be counted.
        """
        needs = self._has_writes or self._generators or self._finite is not None or not self.has_run
        if needs or self._runner.repeat is None or _is_casting():
            return None
        taken = {position: stacks[index] for position, index in self._inputs.arguments}
        inputs, moving = self.bind(stacks), dict[int, Sequence[Any]]()
        for (position, _), values in zip(self._inputs.numbers, zip(*numbers, strict=True), strict=False):
            inputs[position] = values[0]
            if any(value is not values[0] for value in values):
                moving[position] = values
        return repetition(self._runner, self._bound, inputs, taken, moving, fenced_off)

    def _run_program(self, inputs: list[Any], made: list[Sequence[Any]]) -> None:
        """Add what the program gives to `made`, in one call of C: an interrupt finds all of it or nothing."""
        runner = self._runner
        prepared = inputs if runner.prepare is None else runner.prepare(inputs)
        with without_autocast() if _is_casting() else nullcontext():
            if runner.update is None:
                made.extend(map(runner.run, (prepared,)))
                return
            results = runner.run(prepared)
            with held_back():
                made.extend(map(runner.update, (results,)))

    def _complete(
        self,
        made: Sequence[Sequence[Any]],
        inputs: Sequence[Any],
        known: Sequence[Any],
        leaves: Sequence[Any],
        gradients: Mapping[int, torch.Tensor],
        after: Sequence[Callable[[], Any]],
        containers: Sequence[Any],
    ) -> None:
        """Do what is left of a step whose ops have run, and that an interrupt has cut short."""
        with held_back():
            outputs = self._finished(made, inputs)
            written, _ = self._written(known, outputs)
            self._commit(outputs, leaves, gradients, written)  # the same values again
            self.steps += 1
            for action in after:
                action()
            if containers:
                self._refill(outputs, leaves, containers, {})

    def _finished(self, made: Sequence[Sequence[Any]], inputs: Sequence[Any]) -> Sequence[Any]:
        return made[0] if self._runner.finish is None else self._runner.finish(made[0], inputs)

    def _summed_gradients(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
        """By position the gradients of arguments that had one before: new and old together."""
        found = {}
        for position, target in self._outputs.others:
            if isinstance(target, Gradient) and target.tensor is None:
                before = leaves[target.index].grad
                if before is not None:
                    with torch.no_grad(), hidden_from_dispatch_modes():
                        found[position] = before + outputs[position]
        return found

    def _written(self, known: Sequence[Any], outputs: Sequence[Any]) -> Values:
        return values_after(self._bound.writes, known, outputs, self._outputs.read_after)

    def _commit(
        self,
        outputs: Sequence[Any],
        leaves: Sequence[Any],
        gradients: Mapping[int, torch.Tensor],
        written: Sequence[tuple[Write, Any]],
    ) -> None:
        """Write all new state. Doing it twice writes the same."""
        with torch.no_grad(), hidden_from_dispatch_modes():
            for index, shape in self._bound.changes.resized:
                leaves[index].resize_(shape)
            copied, live, others, _ = self._outputs
            if live:
                torch._foreach_copy_(live, [outputs[position] for position in copied])
            for position, target in others:
                if position in gradients:
                    leaves[target.index].grad.copy_(gradients[position])  # type: ignore[union-attr]
                else:
                    deliver(target, outputs[position], leaves, fenced_off)
            for write, new in written:
                write.container[write.key] = new
            for index, requires_grad in self._bound.changes.requires_grad:
                leaves[index].requires_grad_(requires_grad)

    def _results(self, outputs: Sequence[Any], leaves: Sequence[Any], containers: Sequence[Any]) -> Any:
        """What build() returned; what it left in containers is put there."""
        fenced: dict[int, Any] = {}  # a tensor returned twice is one object, as in eager mode
        made = [self._made(result, outputs, leaves, fenced) for result in self._bound.results]
        if containers:
            self._refill(outputs, leaves, containers, fenced)
        return made[0] if self._single else unflatten(self._bound.result_tree, iter(made))

    @staticmethod
    def _made(result: Result, outputs: Sequence[Any], leaves: Sequence[Any], fenced: dict[int, Any]) -> Any:
        if result.kind != "output":
            return leaves[result.index] if result.kind == "argument" else result.value
        index = result.index
        if not (result.requires_grad or result.live is not None):
            return outputs[index]
        if index not in fenced:
            output = outputs[index] if result.live is None else live_view(result.live, leaves)
            fenced[index] = fenced_off(output) if result.requires_grad else output
        return fenced[index]

    def _refill(
        self,
        outputs: Sequence[Any],
        leaves: Sequence[Any],
        containers: Sequence[Any],
        fenced: dict[int, Any],
    ) -> None:
        """Put into the containers of the call what build() left there."""
        refills = self._bound.changes.refills
        content = []
        for refill in refills:
            made = [
                containers[result.index]
                if result.kind == "container"
                else self._made(result, outputs, leaves, fenced)
                for result in refill.results
            ]
            content.append(unflatten(refill.tree, iter(made)))
        for refill, values in zip(refills, content, strict=True):
            refill.put(containers[refill.container], refill.keys, values)


def _is_casting() -> bool:
    """True if autocast is on around the call."""
    return any(map(torch.is_autocast_enabled, AUTOCAST_DEVICES))


def fenced_off(output: torch.Tensor) -> Any:
    """An output that required grad in build(): it still does, and going back from it is an error."""
    with hidden_from_dispatch_modes():
        return _apply_boundary(output, _ANCHOR)


_ANCHOR = torch.zeros((), requires_grad=True)  # lets an output require grad as eager's would; never changed


class _Boundary(torch.autograd.Function):
    """An output that required grad in build(): it still says so, and explains itself if autograd comes back."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return output.data  # no view to autograd: the user may change it in place, as eager's

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        raise GraphBoundaryError(
            "an output of a Graph was used in a backward() outside of it; the graph keeps no autograd history",
            hint="put the loss and its backward() into build(), or detach() the output",
        )


_apply_boundary = apply_of(_Boundary)
