"""The hot path: bind inputs, run, write state back after the last op that can fail, rebuild the results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from monograph.compat.amp import autocast_state
from monograph.compat.autograd import apply_of
from monograph.compat.global_state import set_grad_enabled
from monograph.compat.modes import hidden_from_dispatch_modes
from monograph.compat.ops import is_custom, is_random
from monograph.compat.tensors import negated_by_bit
from monograph.errors import BackendError, GraphBoundaryError, MonographError, NonfiniteError, TornStateError
from monograph.ir.call.tree import LEAF, unflatten
from monograph.ir.graph_signature import (
    Argument,
    ArgumentChanges,
    Assign,
    BoundProgram,
    Copy,
    CopyToArgument,
    CopyToGradient,
    Fixed,
    Gradient,
    HeldGradient,
    LiveView,
    Number,
    Part,
    ReadAfter,
    Recorded,
    Result,
    Target,
    Write,
)
from monograph.ir.meta import ScalarMeta, metas, value
from monograph.ir.port import FINITE, Role
from monograph.ir.program import Program
from monograph.runtime.custom_ops import checked_layouts
from monograph.runtime.rebind import bound_anew
from monograph.runtime.runner import Runner, is_promised, rehearse
from monograph.state.random import default_generators, read_generators, restore_generators
from monograph.state.swap import Swap


class Executor:
    """Runs one build. Nothing the user can see changes before every op has run, but what the runner writes itself."""

    def __init__(self, bound: BoundProgram, runner: Runner, program: Program) -> None:
        """`program` is what the runner runs: the program of `bound` after all passes."""
        self._runner = runner
        self.has_run = False
        self.after: Sequence[Callable[[], Any]] | None = (
            None  # what the graph does after each step, once it is known
        )
        self.undone = False  # the last run failed before its program was through
        self._bind_to(bound)
        paths = [port.path for port in program.outputs]
        self._finite = paths.index(FINITE) if FINITE in paths else None
        self._generators = _generators(bound)
        custom = [node for node in program.ops() if is_custom(node.target)]
        if custom and not runner.written:
            self._runner = self._checked_once(runner, custom)
        self._autocast = [device for device, dtype in autocast_state().items() if dtype is not None]
        self._single = bound.result_tree == LEAF

    def _bind_to(self, bound: BoundProgram) -> None:
        """Take inputs from where they are, and write to where outputs go."""
        self._bound = bound
        self._inputs = [
            _detached(source.value) if isinstance(source, Fixed) else None for source in bound.sources
        ]
        self._arguments = [(i, s.index) for i, s in enumerate(bound.sources) if isinstance(s, Argument)]
        self._numbers = [(i, s) for i, s in enumerate(bound.sources) if isinstance(s, Number)]
        self._gradients = [
            (i, s.parameter) for i, s in enumerate(bound.sources) if isinstance(s, HeldGradient)
        ]
        self._num_results = sum(port.role is Role.USER for port in bound.program.outputs)
        targets = list(enumerate(bound.targets, self._num_results))
        copied = [(i, t) for i, t in targets if isinstance(t, Copy) and i not in self._runner.written]
        copies = [(i, t) for i, t in copied if not is_promised(t.tensor)]
        promised = [(i, t) for i, t in copied if is_promised(t.tensor)]  # no foreach op takes these
        self._copied = [i for i, _ in copies]
        self._read_after = {t: i for i, t in targets if isinstance(t, ReadAfter)}
        self._live = [_detached(target.tensor) for _, target in copies]
        self._others = promised + [(i, target) for i, target in targets if not isinstance(target, Copy)]
        self.has_changes = bool(bound.changes)
        self._has_writes = bool(self._live or self._others or bound.writes or bound.changes)

    def given(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The tensors that it finds by itself, each with one on the memory that it had when it was found."""
        return [
            (source.value, there)
            for source, there in zip(self._bound.sources, self._inputs, strict=True)
            if isinstance(source, Fixed) and isinstance(there, torch.Tensor)
        ]

    def bind_anew(self, swap: Swap) -> None:
        """Work on what has taken the place of its tensors and containers."""
        self._bind_to(bound_anew(self._bound, swap))

    def bind(self, leaves: Sequence[Any]) -> list[Any]:
        """The program's inputs for a call with these leaves."""
        inputs = self._inputs.copy()
        for position, index in self._arguments:
            leaf = leaves[index]
            inputs[position] = (
                _detached(leaf) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf
            )
        for position, number in self._numbers:
            found = number.container[number.key]
            inputs[position] = found if number.index is None else found[number.index]
        for position, parameter in self._gradients:
            inputs[position] = parameter.grad
        return inputs

    def release(self) -> None:
        """Drop every reference to tensors; it cannot run any more."""
        self._inputs, self._live, self._others, self._gradients = [], [], [], []
        self._bound = self._bound.unbound()

    @property
    def bound(self) -> BoundProgram:
        """The program before its passes, and what its inputs and outputs are bound to."""
        return self._bound

    @property
    def held_tensors(self) -> list[torch.Tensor]:
        """The tensors that the step finds by itself, wherever they are kept: state, and others from outside."""
        fixed = (source.value for source in self._bound.sources if isinstance(source, Fixed))
        return [item for item in fixed if isinstance(item, torch.Tensor)]

    @property
    def takes_numbers(self) -> bool:
        """True if it computes with numbers that may be others in the next step."""
        inputs = self._bound.program.graph.find_nodes(op="placeholder")
        return any(isinstance(value(node), ScalarMeta) for node in inputs) or any(
            write.moves for write in self._bound.writes
        )

    @property
    def results(self) -> tuple[int | None, ...]:
        """For each leaf of what a call returns the output of the program that it is; None for what is no output."""
        found = self._bound.results
        return tuple(result.index if result.kind == "output" else None for result in found)

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
        An interrupt undoes the step while ops run, and lets it be completed once they have: never half of one.
        """
        inputs = self.bind(leaves) if inputs is None else inputs
        states = read_generators(self._generators) if self._generators else ()
        grad_mode = torch.is_grad_enabled()
        made: list[Sequence[Any]] = []  # what the runner gave, as soon as it has run
        gradients: dict[int, torch.Tensor] | None = None
        done: list[Any] = []
        self.undone = False
        try:
            known = [_known(write, inputs) for write in self._bound.writes]
            set_grad_enabled(False)
            self._run_program(inputs, made)
            set_grad_enabled(grad_mode)
            outputs = self._finished(made, inputs)
            self.has_run = True
            if self._finite is not None and not outputs[self._finite]:
                restore_generators(self._generators, states)
                raise NonfiniteError("the step made a NaN or an infinity")
            gradients = self._summed_gradients(outputs, leaves) if self._others else {}
            written, fault = self._written(known, outputs) if known else ([], None)
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
                if isinstance(error, Exception):
                    self._raise_in_place_of(error, inputs, states)
            elif not isinstance(error, Exception):
                outputs = self._finished(made, inputs)
                if gradients is None:
                    gradients = self._summed_gradients(outputs, leaves)
                # writes the same values again
                self._commit(outputs, leaves, gradients, self._written(known, outputs)[0])
                for action in after[len(done) :]:
                    action()
                if containers:
                    self._refill(outputs, leaves, containers, {})
            raise
        return self._results(outputs, leaves, containers)

    def _run_program(self, inputs: list[Any], made: list[Sequence[Any]]) -> None:
        """Add what the program gives to `made`, in one call of C: an interrupt finds all of it or nothing."""
        runner = self._runner
        prepared = inputs if runner.prepare is None else runner.prepare(inputs)
        if not self._autocast:
            made.extend(map(runner.run, (prepared,)))
            return
        with ExitStack() as stack:  # the casts are ops of the program already
            for device in self._autocast:
                stack.enter_context(torch.autocast(device, enabled=False))
            made.extend(map(runner.run, (prepared,)))

    def _raise_in_place_of(self, error: Exception, inputs: Sequence[Any], states: Any) -> None:
        """Raise the error for a run that failed, if that is not the error itself."""
        runner = self._runner
        if runner.written and (runner.has_begun is None or runner.has_begun()):
            raise _torn(error) from error
        if runner.failure is None or isinstance(error, (MonographError, torch.OutOfMemoryError)):
            return
        failure = runner.failure(inputs)
        restore_generators(self._generators, states)
        if failure is not None:
            raise failure from None
        raise BackendError(
            f"the compiled step failed before it changed anything: {_first_line(error)}",
            hint='op by op, the step does not fail with these arguments: graph.config.backend("aten")',
        ) from error

    def _finished(self, made: Sequence[Sequence[Any]], inputs: Sequence[Any]) -> Sequence[Any]:
        return made[0] if self._runner.finish is None else self._runner.finish(made[0], inputs)

    def _summed_gradients(self, outputs: Sequence[Any], leaves: Sequence[Any]) -> dict[int, torch.Tensor]:
        """By position the gradients of arguments that had one before: new and old together."""
        found = {}
        for position, target in self._others:
            if isinstance(target, Gradient) and target.tensor is None:
                before = leaves[target.index].grad
                if before is not None:
                    with torch.no_grad(), hidden_from_dispatch_modes():
                        found[position] = before + outputs[position]
        return found

    def _written(
        self, known: Sequence[Any], outputs: Sequence[Any]
    ) -> tuple[list[tuple[Write, Any]], Exception | None]:
        """What the step puts into Python objects, from what was known before it and from its outputs, and a fault."""

        def read_out(item: ReadAfter) -> Any:
            return outputs[self._read_after[item]].item()

        found, fault = [], None
        for write, given in zip(self._bound.writes, known, strict=True):
            try:
                found.append((write, write.value.after(given, read_out) if _waits(write) else given))
            except (ArithmeticError, ValueError) as error:
                error.add_note(f"in what build() computes for {write.about}")
                fault = error
        return found, fault

    def _checked_once(self, runner: Runner, custom: Sequence[fx.Node]) -> Runner:
        """Look in the first run at the layouts that custom ops give: their fake kernels may have reported others."""

        def run(inputs: list[Any]) -> Sequence[Any]:
            with checked_layouts(custom):
                outputs = runner.run(inputs)
            self._runner = runner
            return outputs

        return replace(runner, run=run)

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
            if self._live:
                torch._foreach_copy_(self._live, [outputs[position] for position in self._copied])
            for position, target in self._others:
                if position in gradients:
                    leaves[target.index].grad.copy_(gradients[position])  # type: ignore[union-attr]
                else:
                    _deliver(target, outputs[position], leaves)
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
            output = outputs[index] if result.live is None else _view(result.live, leaves)
            fenced[index] = _fenced(output) if result.requires_grad else output
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


def _waits(write: Write) -> bool:
    """True for a value that depends on outputs of the program."""
    return write.moves and not write.value.is_known


def _known(write: Write, inputs: Sequence[Any]) -> Any:
    """What is known before the step of a value that it writes: all of it, or what it is computed from."""
    if not write.moves:
        return write.value
    leaves = write.value.before(inputs)
    return write.value.after(leaves, None) if write.value.is_known else leaves


def _torn(error: Exception) -> TornStateError:
    return TornStateError(
        f"the compiled step failed in the middle, where it had begun to change parameters: {_first_line(error)}",
        hint="load a checkpoint with graph.load_state_dict(); the state of before the step is gone",
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _view(live: LiveView, leaves: Sequence[Any]) -> torch.Tensor:
    whole = live.target.tensor if isinstance(live.target, Copy) else leaves[live.target.index]
    whole = _detached(whole)
    with hidden_from_dispatch_modes():
        if live.dtype is not None:
            begin = whole.storage_offset() * whole.element_size() // live.dtype.itemsize
            view = torch.empty(0, dtype=live.dtype, device=whole.device)
            view = view.set_(whole.untyped_storage(), begin + live.distance, live.size, live.stride)
        else:
            view = whole.as_strided(live.size, live.stride, whole.storage_offset() + live.distance)
        view = view.conj() if live.conjugated else view
        return negated_by_bit(view) if live.negated else view


def _fenced(output: torch.Tensor) -> Any:
    with hidden_from_dispatch_modes():
        return _apply_boundary(output, _ANCHOR)


def _detached(item: Any) -> Any:
    """A tensor on the same memory that autograd does not follow; anything else as it is."""
    if not isinstance(item, torch.Tensor):
        return item
    with hidden_from_dispatch_modes():
        return item.detach()


def _deliver(target: Target, output: Any, leaves: Sequence[Any]) -> None:
    match target:
        case Copy(tensor):
            tensor.detach().copy_(output)
        case CopyToArgument(index, True) if not leaves[index].requires_grad:
            with torch.enable_grad():
                leaves[index].copy_(_fenced(output))
        case CopyToArgument(index):
            leaves[index].detach().copy_(output)
        case CopyToGradient(parameter):
            parameter.grad.copy_(output)  # type: ignore[union-attr]
        case Assign(container, key, _, int(index)):
            container[key] = leaves[index]
        case Assign(container, key, True):
            with torch.enable_grad():
                container[key] = _fenced(output)
        case Assign(container, key):
            container[key] = output
        case Part():
            target.deliver(output)
        case Recorded(log, path):
            log.put(path, output)
        case Gradient(None, index):
            leaves[index].grad = output
        case Gradient(torch.Tensor() as tensor):
            tensor.grad = output


def _generators(bound: BoundProgram) -> list[torch.Generator]:
    devices: set[torch.device] = set()
    for node in bound.program.ops():
        if is_random(node.target):
            devices |= {item.device for item in metas(value(node))}
    explicit = [source.value for source in bound.sources if isinstance(source, Fixed)]
    return default_generators(devices) + [item for item in explicit if isinstance(item, torch.Generator)]


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
