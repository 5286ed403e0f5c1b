"""The step of a graph in eager mode: the reference that a capture is measured against."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from monograph.capture.accumulation.batches import check_no_state, micro_call
from monograph.capture.accumulation.gradients import Untouched, check_no_gradients
from monograph.capture.optimizers.rules import StepRules
from monograph.capture.step.generators import KnownGenerators
from monograph.capture.step.request import Request
from monograph.compat.distributed.forms import shard_form, shard_of
from monograph.compat.distributed.tensors import awaited_part, is_sharded, part_of
from monograph.compat.modes import FunctionMode, outside_of_modes
from monograph.compat.patching import replaced
from monograph.compat.tensors import GRADIENT_GETTER, GRADIENT_SETTER, storage_key
from monograph.compat.traces.branches import unseen_function_mode
from monograph.distributed.averages import AveragedGradients
from monograph.distributed.buffers import summed_later, take_over_buffers
from monograph.distributed.replicas import replicas_of
from monograph.eager_parts import EagerParts, in_parts
from monograph.ir.call.nested import tensors_in
from monograph.ir.call.tree import flatten, unflatten
from monograph.ir.port import Role
from monograph.ir.probes import numbered, probes_go_to
from monograph.state.find import Owned, RegisteredOptimizer, Slot, module_slots
from monograph.state.random import RandomState


def eager_step(
    request: Request, arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
) -> tuple[Any, Mapping[str, int]]:
    """Run build() and the updates as the graph does them. Gradients are None before, and stay as they come.

    `arguments` are those of the call: build() may change the containers among them. Each micro-batch gets its own.
    In a pipeline this process has the state of all stages meanwhile (`whole_model`).
    Gives what build() returned, and how often each optimizer has stepped.
    """
    owned = request.owned
    seen = _Seen(request)
    with in_parts(owned, request.settings) as parts:
        returned, stepped = _step(request, arguments, seen, parts)
    for average in owned.averages:
        average.update()
    seen.finish()
    return returned, stepped


def _step(
    request: Request,
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]],
    seen: _Seen,
    parts: EagerParts,
) -> tuple[Any, Mapping[str, int]]:
    call, owned, steps = request.call, request.owned, request.settings.accumulation_steps
    sums = _Sums(request, parts)
    if steps > 1:
        sums.check()
    with outside_of_modes():  # what watches the step
        replicas = replicas_of(owned, owned.named_modules(), request.settings)
    averaged = AveragedGradients([item for item in replicas if item.wrapper is None])
    sums.averaged = averaged.averaged
    around_backward = sums.around_backward if steps > 1 else averaged.around_backward
    rules = StepRules(owned, request.settings, around_backward=around_backward)
    watched = _Watched(rules, follow=steps > 1)
    looks = steps > 1 or owned.scaler is not None
    looking = watched.functions() if looks else nullcontext()
    with rules.hold(), watched.optimizers(owned), looking, probes_go_to(seen.record):
        returned = []
        take_over_buffers([item for item in replicas if item.wrapper is None])
        for index in range(steps):
            rules.complete = index == steps - 1
            seen.begin()
            micro = micro_call(call, steps, index) if steps > 1 else call
            own = steps > 1 or call.replicated
            args, kwargs = unflatten(call.tree, iter(micro.leaves)) if own else arguments
            watched.of_gradients.clear()
            around = sums.micro_step(watched, last=rules.complete) if steps > 1 else nullcontext()
            with around, rules.autocast(), summed_later(replicas, later=not rules.complete):
                returned.append(request.build(*args, **kwargs))
            if not rules.complete:
                returned[-1] = sums.without_state(returned[-1])
        for registered in owned.optimizers:
            if not registered.manual:
                registered.stepped.step()
        rules.end()
    return returned[0] if len(returned) == 1 else _packed(returned, watched), rules.stepped


class _Seen:
    """What probes record in an eager step."""

    def __init__(self, request: Request) -> None:
        self._log = request.probes
        self._found: dict[str, list[torch.Tensor]] = {}
        self._taken: dict[str, None] = {}  # by the present micro-batch

    def begin(self) -> None:
        """A micro-batch begins, or the update."""
        self._taken.clear()

    def record(self, name: str, what: str, tensor: torch.Tensor) -> None:
        """To be given each probe."""
        path = numbered(name, what, self._taken)
        self._taken[path] = None
        self._found.setdefault(path, []).append(tensor)

    def finish(self) -> None:
        """The step is over."""
        for path, items in self._found.items():
            joined = items[0] if len(items) == 1 else _joined(tuple(items), ())
            self._log.put(path, joined)


class _Watched:
    """Steps of optimizers, and reading of gradients, go through the rules; what is made of gradients is known."""

    def __init__(self, rules: StepRules, follow: bool) -> None:
        self._rules, self._follow = rules, follow
        self.of_gradients: dict[int, torch.Tensor] = {}  # by id; only with `follow`

    @contextmanager
    def optimizers(self, owned: Owned) -> Iterator[None]:
        """Let `step()` go through the rules."""
        with ExitStack() as stack:
            for registered in owned.optimizers:
                step = partial(self._step, registered, registered.optimizer.step)
                stack.enter_context(replaced(registered.optimizer, "step", step))
            yield

    @contextmanager
    def functions(self) -> Iterator[None]:
        """See every torch function; the functions take no notice."""
        with unseen_function_mode(), FunctionMode(self._see):
            yield

    def _step(
        self, registered: RegisteredOptimizer, original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        return self._rules.step(registered, partial(original, *args, **kwargs))

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func == GRADIENT_SETTER and args[1] is not None:
            self._rules.gradient_is_set(args[0])
        returned = func(*args, **kwargs)
        read = func == GRADIENT_GETTER and returned is not None
        if read:
            self._rules.gradient_was_read(args[0])
        if self._follow and (
            read or any(id(item) in self.of_gradients for item in tensors_in((args, kwargs)))
        ):
            in_place = returned is None and func != GRADIENT_SETTER  # such as `x[0] = norm`
            made = tensors_in(args[:1] if in_place else returned)
            self.of_gradients |= {id(item): item for item in made}
        return returned


class _Sums:
    """Gradients over micro-batches. What build() does with incomplete sums is undone."""

    def __init__(self, request: Request, parts: EagerParts) -> None:
        self._request, self._parts = request, parts
        self._modules = request.owned.named_modules()
        self._slots = list(module_slots(self._modules))
        self._parameters = {slot.path: slot.tensor for slot in self._slots if slot.role is Role.PARAM}
        self._summed = {path: parts.summed(item) for path, item in self._parameters.items()}
        self._left = Untouched(self._parameters)
        self._sums: dict[str, torch.Tensor | None] = dict.fromkeys(self._parameters)
        self._last = False
        self.averaged: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda _parameter, total: total
        self._state: _State | None = None  # when the last backward() had ended

    def check(self) -> None:
        """Refuse what a capture refuses as well."""
        check_no_state(self._request.call, {id(slot.tensor) for slot in self._slots})
        check_no_gradients(self._request.owned, self._request.settings)

    @contextmanager
    def micro_step(self, watched: _Watched, *, last: bool) -> Iterator[None]:
        """To be entered around build(): it finds no gradients."""
        self._last, self._state, self._left = last, None, Untouched(self._parameters)
        for parameter in (*self._parameters.values(), *self._summed.values()):
            parameter.grad = None
        yield
        if self._state is not None:
            self._state.restore(watched.of_gradients)

    def without_state(self, returned: Any) -> Any:
        """Results with copies in the place of views of state: later micro-batches may change it."""
        state = [slot.tensor for slot in self._slots if _is_held(slot)]
        leaves: list[Any] = []
        tree = flatten(returned, leaves)
        memory, own = set(map(_memory, state)), set(map(id, state))

        def copied(leaf: Any) -> Any:
            view = isinstance(leaf, torch.Tensor) and id(leaf) not in own and _memory(leaf) in memory
            return leaf.clone() if view else leaf

        return unflatten(tree, map(copied, leaves))

    @contextmanager
    def around_backward(self) -> Iterator[None]:
        """backward() adds to the sums."""
        self._left.check()
        for path, parameter in self._summed.items():
            parameter.grad = self._sums[path]
        yield
        self._sums = {path: parameter.grad for path, parameter in self._summed.items()}
        if not self._last:
            self._state = _State(self._request, self._modules, self._slots)
        for path, parameter in self._parameters.items():
            total = self._sums[path]
            parameter.grad = None if total is None else self._shown(path, parameter, total)
        self._left.note()

    def _shown(self, path: str, parameter: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """What build() finds in the place of a sum."""
        if self._summed[path] is not parameter:
            found: torch.Tensor = self._parts.mean(parameter, total)
            return found
        return self.averaged(parameter, total) if self._last else total.clone()


class _State:
    """Values of state and of random generators, to be set back where an incomplete gradient has changed them.

    No Snapshot: only what comes of gradients goes back, and all else that build() has done stays.
    """

    def __init__(self, request: Request, modules: Mapping[str, nn.Module], slots: Sequence[Slot]) -> None:
        self._random, self._generators = RandomState.now(touched=True), KnownGenerators(request, modules)
        self._saved = [(slot, slot.tensor, slot.tensor.detach().clone()) for slot in slots if _is_held(slot)]

    def restore(self, of_gradients: Mapping[int, torch.Tensor]) -> None:
        """Parameters, and what was made of gradients, have their values again."""
        self._random.restore()
        self._generators.restore()
        changed = set(map(_memory, of_gradients.values()))
        for slot, tensor, value in self._saved:
            now = slot.container.get(slot.key)
            if slot.role is Role.PARAM or (isinstance(now, torch.Tensor) and _memory(now) in changed):
                slot.container[slot.key] = tensor
                with torch.no_grad():
                    tensor.copy_(value)


def _is_held(slot: Slot) -> bool:
    return isinstance(slot.container.get(slot.key), torch.Tensor)


def _packed(returned: list[Any], watched: _Watched) -> Any:
    """Results of micro-batches as one: scalars stacked, batches joined; of the update there is one result."""
    once = set(map(_memory, watched.of_gradients.values()))
    columns: list[list[Any]] = []
    for item in returned:
        leaves: list[Any] = []
        tree = flatten(item, leaves)
        columns.append(leaves)
    rows = zip(*columns, strict=True)
    return unflatten(tree, iter([_joined(row, once) for row in rows]))


def _joined(items: tuple[Any, ...], once: Collection[int]) -> Any:
    """`once` has the memory of what depends on the summed gradients."""
    last = items[-1]
    if is_sharded(last):  # what this process has of each
        return shard_of(shard_form(last), (_joined(tuple(map(awaited_part, items)), once),))
    if not isinstance(last, torch.Tensor) or _memory(last) in once:
        return last
    if all(item is last for item in items):
        return last
    return torch.cat(items) if last.dim() else torch.stack(items)


def _memory(tensor: torch.Tensor) -> int:
    """What tensors on one memory share; a sparse tensor has memory of its own."""
    tensor = part_of(tensor)
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)
