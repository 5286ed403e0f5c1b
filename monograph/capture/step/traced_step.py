"""The step under the trace: the order of it, from the inputs that it begins with to its results and side effects."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from monograph.capture.effects.arguments import Given, NewContent
from monograph.capture.effects.foreign_objects import Effects, undo_effects
from monograph.capture.effects.gradients import unseen_refused
from monograph.capture.effects.held_fakes import forget_cached, holds_fakes
from monograph.capture.effects.python_objects.counters import Counters
from monograph.capture.effects.python_objects.left import LeftInObjects
from monograph.capture.effects.side_effects import SideEffects
from monograph.capture.effects.state_outputs import in_parts
from monograph.capture.guards.sources.code_watch import CodeWatch
from monograph.capture.guards.sources.overlay import Overlay
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import Reads, record_reads
from monograph.capture.guards.sources.same_objects import Comparisons, RealObjects
from monograph.capture.numbers.known import known_value
from monograph.capture.numbers.moving import value_of
from monograph.capture.numbers.python_functions import functions_know_numbers
from monograph.capture.optimizers.checks import check_steps, check_trainable, steps_refused
from monograph.capture.optimizers.rules import StepRules
from monograph.capture.optimizers.scalers import step_or_skip
from monograph.capture.optimizers.tracing import Declared
from monograph.capture.process.settings import ProcessSettings
from monograph.capture.process.threads import OtherThreads
from monograph.capture.step.cond import branches_by_dynamo
from monograph.capture.step.free_tensors import guard_free_tensors, lift_free_tensors
from monograph.capture.step.hooks import carry_hooks, within
from monograph.capture.step.inputs import StepInputs
from monograph.capture.step.optimizers import TracedOptimizers
from monograph.capture.step.origins import OriginRecorder
from monograph.capture.step.replaced_functions import OpChoices, ReplacedFunctions
from monograph.capture.step.request import Request
from monograph.capture.step.results import StepResults, check_dense
from monograph.capture.step.roots import note_wrappers, roots_of, watched_classes
from monograph.capture.step.unread_inputs import (
    NumberConditions,
    drop_unasked_state,
    drop_unread_copies,
    drop_unread_numbers,
)
from monograph.capture.tensors.checkpoint_regions import shows_again
from monograph.capture.tensors.fakes import Input
from monograph.capture.tensors.functional.in_place import in_place_changes_explained
from monograph.capture.tensors.functional.lifting import drop_profiler, record_generators
from monograph.capture.tensors.readings import UNKNOWN, Readings
from monograph.capture.tensors.sparse_parts import note_histories
from monograph.compat.amp import ASKING_STEP, is_dynamic_scaler
from monograph.compat.autograd import checkpointed_regions, handles_noted, held_by, hooks_on_saved_values
from monograph.compat.distributed.random_ops import drawn_together
from monograph.compat.distributed.tensors import forms_without_symbols
from monograph.compat.fake_values import lists_by
from monograph.compat.modes import around_dispatch, current_tracer, other_threads_reported
from monograph.compat.optimizers import clipping_by_one_norm
from monograph.compat.patching import replace_here, replaced
from monograph.compat.traces.hidden_fakes import fakes_hidden
from monograph.compat.traces.tracing import trace, tracing_patches
from monograph.distributed.averages import AveragedGradients
from monograph.distributed.buffers import bypass_wrappers, take_over_buffers
from monograph.distributed.replicas import replicas_of
from monograph.distributed.whole_parameters import WholeParameters, modules_with_parts
from monograph.ir.call.tree import unflatten
from monograph.ir.call_text import ModuleCall, describe_leaves
from monograph.ir.port import Role
from monograph.ir.probes import probes_go_to
from monograph.state.snapshot import Snapshot


class TracedStep:
    """One trace of a step. `record()` gives the graph; `side_effects` what the step did besides computing.

    `declared` is the first state of each optimizer. `still` has the paths of numbers that are constants of this build,
    `known_counters` those of whole numbers in param groups that are inputs. `numbers` are those in Python objects that
    move while the trace runs.
    """

    def __init__(
        self,
        request: Request,
        modules: Mapping[str, nn.Module],
        with_values: bool,
        snapshot: Snapshot,
        declared: Mapping[str, list[Declared]],
        still: frozenset[str] = frozenset(),
        known_counters: frozenset[str] = frozenset(),
        numbers: Counters | None = None,
        choices: OpChoices | None = None,
    ) -> None:
        self.request, self.modules, self.snapshot = request, modules, snapshot
        self.still, self.known_counters, self._with_values = still, known_counters, with_values
        owned, numbers = request.owned, numbers or Counters()
        self._overlay = Overlay()
        self._begun = begun = StepInputs(
            *(request, modules, self._overlay, numbers, declared, known_counters),
            with_values=with_values,
            still=still,
        )
        self.inputs = inputs = begun.inputs
        whole = request.settings.accumulation_steps == 1
        self.readings = Readings(inputs, begun.call.leaves, inputs.moving.branches, allowed=whole)
        self.conditions = NumberConditions(inputs, self.readings)
        self.reach = Reach(owned.owner, owned.private, owned.unwrap, request.answers)
        self.side_effects = self._new_side_effects()
        self.results = StepResults(inputs, self.side_effects, request.probes, begun.micro)
        held = (owned.owner, *modules.values())
        self.objects = LeftInObjects(numbers, inputs, self._overlay, self.reach, self.side_effects, held)
        variables = {id(item.shown): item.path for item in inputs.items if item.role is Role.PARAM}
        checkpointed = request.settings.checkpointed
        self._recorder = OriginRecorder(modules, variables, request.observer, checkpointed)
        self.makers = self._recorder.makers
        self.replicas = replicas_of(owned, modules, request.settings)
        self.averaged = AveragedGradients(self.replicas, inputs.fake, self._recorder.phase)
        wholes = begun.wholes
        self._sharded = WholeParameters(modules_with_parts(modules.values(), wholes.kept), wholes)
        if self._sharded:
            self._recorder.run = self._sharded.run
        if begun.micro is not None:
            begun.micro.averaged = wholes.reduced_once(self.averaged.averaged_once)
        self._threads, self._settings = OtherThreads(), ProcessSettings()
        self._watch = CodeWatch(self.reach.started, self.reach.seen)
        around = self._recorder.phase, self._around_backward, partial(unseen_refused, self.inputs)
        self.rules = StepRules(owned, request.settings, request.before, *around)
        self.optimizers = TracedOptimizers(
            *(begun.optimizers, owned, self._overlay, self.rules, self._recorder, self._watch),
            with_values=with_values,
        )
        self.functions = ReplacedFunctions(
            *(inputs, self.readings, self.reach, self.rules, self._settings, self._watch, begun.micro),
            call=begun.call,
            whole=request.call,
            choices=choices or OpChoices(),
            takes_layers_whole=request.takes_layers_whole,
        )
        self.reads, self.effects = Reads(), Effects()  # of Python objects
        self.forgotten: list[str] = []  # functions whose caches got tensors of the trace
        self.literals: dict[int, torch.Tensor] = {}  # the inputs that are, by position

    def _new_side_effects(self) -> SideEffects:
        owned = self.request.owned
        return SideEffects(
            self.inputs,
            self.modules,
            self._begun.slots,
            self.request.settings.keep_gradients,
            self.reach,
            self._overlay,
            self.request.own,
            (owned.owner, owned.private),
        )

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        around = (self._begun.micro or self.averaged).around_backward()
        with around, in_place_changes_explained(current_tracer().graph):
            yield

    def values(self) -> Any:
        """Inside, ops compute real values besides if fakes carry them."""
        return self._begun.values()

    def moved(self) -> set[str]:
        """The paths of state that each micro-batch changes before its gradients are there."""
        return self._begun.micro.moved() if self._begun.micro is not None else set()

    def module_io(self) -> dict[str, tuple[ModuleCall, ...]]:
        """What went into each held module and came out, by path; build() itself has the path ""."""
        return {path: tuple(calls) for path, calls in self._recorder.calls.items()}

    def record(self) -> fx.GraphModule:
        """Trace the step. The graph changes its inputs in place, as eager does."""
        try:
            with self._threads.checked(), self.values(), forms_without_symbols(value_of), drawn_together():
                recorded = trace(self._run, self.inputs.mode, self.inputs.fakes, known_value)
        except Exception as error:
            error.args = tuple(
                self.readings.spelled(arg) if isinstance(arg, str) else arg for arg in error.args
            )
            raise
        finally:
            self._undo()
        inputs, readings, graph = self.inputs, self.readings, recorded.graph
        before = {id(item): position for position, item in enumerate(inputs.items)}
        self.conditions.note(graph)
        drop_unread_copies(graph, inputs, readings.tracer)
        drop_unread_numbers(graph, inputs, readings, self.objects.numbers, self.conditions)
        drop_unasked_state(graph, inputs, readings, self._is_unasked, self.conditions)
        self.objects.place({before[id(item)]: position for position, item in enumerate(inputs.items)})
        drop_profiler(graph)
        self.literals |= lift_free_tensors(recorded, inputs, self.reads, with_values=self._with_values)
        guard_free_tensors(inputs, self.reach)
        recorded.recompile()
        return recorded

    def _undo(self) -> None:
        self.forgotten = forget_cached(self.reach.caches)
        self.effects = undo_effects(self.reach, self.snapshot.covered, holds_fakes)
        self.effects.found += self.side_effects.hooks + self.side_effects.structure
        self.effects.lost += self._threads.started
        self.objects.numbers.remove()

    def _is_unasked(self, item: Input) -> bool:
        name, owner = self._begun.optimizers.owner_of(item.path)
        return bool(name) and not self.optimizers.was_asked_for(name, owner)

    # --- under the trace -----------------------------------------------------------------------------------------

    def _run(self, *_fakes: Any) -> list[Any]:
        roots = list(roots_of(self.request, self.modules, self.inputs))  # before ops are recorded
        tracer = current_tracer()
        self._recorder.attach(tracer)
        self.readings.tracer = tracer
        record_generators(tracer)
        self._begun.wholes.begin()
        self._begun.show_gradients()
        with ExitStack() as stack:
            self._show_fakes(stack)
            self._replace_functions(stack)
            carry_hooks(self.inputs, self._begun.call, self.functions.mode)
            self._watch_reads(stack, tracer.root)
            self._watch_code(stack, roots)
            # by names alone: an object that holds them would be one more that the step can be seen from
            returned, changed, _args, _kwargs, _given = self._build()
            self._update()
            self.reads.end()
            with self._watch.off():
                self._collect()
        owned, settings = self.request.owned, self.request.settings
        check_steps(owned, settings, self.optimizers.steps, self.inputs, self.rules.backward_at)
        check_trainable(self.inputs, self.functions.requires_grad_set)
        self.rules.check_old_gradients()
        outputs = self.results.collect(returned, changed, self._begun.leaves, self.reads)
        self.readings.close()
        check_dense(left := self.side_effects.state_outputs)
        left[:] = in_parts(left)
        return outputs + [state_output.value for state_output in left]

    def _show_fakes(self, stack: ExitStack) -> None:
        owned = self.request.owned
        self._begun.show()
        for cls in watched_classes(owned):
            self._overlay.watch(stack, cls)
        for registered in owned.optimizers:
            self.optimizers.take_over(registered)
        stack.enter_context(self.rules.hold())
        stack.enter_context(steps_refused(owned))
        if is_dynamic_scaler(owned.scaler):
            stack.enter_context(replaced(owned.scaler, ASKING_STEP, step_or_skip))

    def _replace_functions(self, stack: ExitStack) -> None:
        owned, threads = self.request.owned, self._threads
        owners = [self.request.build, *(item.optimizer for item in owned.optimizers), *self.modules.values()]
        stack.enter_context(tracing_patches(self._branches_by_dynamo, self.inputs.fake))
        stack.enter_context(fakes_hidden(self.inputs.mode))
        bypass_wrappers(stack, self.replicas, self.averaged, syncs=self._begun.micro is None)
        if self._sharded:
            replace_here(stack, nn.Module, "__getattr__", partial(self._sharded.read, nn.Module.__getattr__))
        if any(owned.whole.values()):
            stack.enter_context(clipping_by_one_norm())
        stack.enter_context(checkpointed_regions(shows_again, partial(within, self.functions.mode)))
        compared, vary = self.objects.numbers.compare, bool(self.inputs.moving.sizes)
        stack.enter_context(functions_know_numbers(*owners, compared=compared, sizes_vary=vary))
        stack.enter_context(lists_by(self.readings.listed, UNKNOWN))
        stack.enter_context(other_threads_reported(self.inputs.mode, threads.note_use, threads.note_start))
        stack.enter_context(self._recorder.watch_modules(self._watch))

    def _branches_by_dynamo(self, compile_branches: Callable[..., Any]) -> Callable[..., Any]:
        def asides() -> Sequence[Callable[[], AbstractContextManager[Any]]]:
            return (self.reads.paused, self._recorder.paused, self.readings.paused, self._watch.off)

        random = self.snapshot.random
        return branches_by_dynamo(compile_branches, readings=self.readings, random=random, asides=asides)

    def _watch_reads(self, stack: ExitStack, root: Any) -> None:
        recording = record_reads(self.request.owned, self.modules, self.snapshot, self._overlay)
        self.reads = stack.enter_context(recording)
        self.reads.pause, self.reads.resume = self._watch.pause, self._watch.resume
        self.reads.made[id(root)] = root
        for hook in hooks_on_saved_values():
            for holder in held_by(hook):
                self.reads.walk(holder, f"hook: {type(holder).__name__}")

    def _watch_code(self, stack: ExitStack, roots: Iterable[tuple[str, Any]]) -> None:
        inputs = self.inputs
        stack.enter_context(self.functions.mode)
        stack.enter_context(probes_go_to(self.results.record_probe))
        stack.enter_context(handles_noted(self.side_effects.module_hooks.handles))
        note_wrappers(self.reach, self.modules, self.replicas)
        self.reach.roots(roots)
        stack.enter_context(
            around_dispatch(self._watch.pause, self._watch.resume, self.functions.answer, UNKNOWN)
        )
        compared = Comparisons(inputs.by_real, inputs.note_comparison, self.objects.numbers.compare)
        stack.enter_context(self._watch.on(compared.look))

    def _build(self) -> tuple[Any, Sequence[NewContent], Any, Any, Given]:
        """What build() gave and left in its arguments, and what it was given, which stays alive while that is looked at."""
        request, leaves = self.request, self._begun.leaves
        args, kwargs = unflatten(request.call.tree, iter(leaves))
        shown = describe_leaves(zip(request.call.paths(), leaves, strict=True))
        given = Given(request.call, args, kwargs)
        if self._begun.micro is None:
            take_over_buffers(self.replicas, self.inputs.fake, self._recorder.phase)
        with self.rules.autocast(), self._settings.kept():
            returned = request.build(*args, **kwargs)
        self.functions.note_written()
        changed = self.results.kept_changes(given.new_content())
        self._recorder.calls[""] = [ModuleCall(shown, describe_leaves([("", returned)]))]
        note_histories([returned, *(content.values for content in changed)])
        return returned, changed, args, kwargs, given

    def _update(self) -> None:
        self._begun.wholes.check()
        self.averaged.check_all_found()
        self.optimizers.step_automatic()
        self.rules.end()
        self._settings.check()
        with self._recorder.phase("update"):
            self._begun.wholes.share()
        for average in self.request.owned.averages:
            with self._recorder.phase("average", average.path):
                self._begun.update_average(average)
        self.optimizers.close()

    def _collect(self) -> None:
        """What the step has changed in objects, while this thread sees it."""
        effects, reads = self.side_effects, self.reads
        self.functions.check_memory()
        real = RealObjects(self.inputs.real_of)
        real.put_into(self.reach.sources)
        effects.tensors.keep_parameters(reads, real)
        effects.tensors.collect_of_objects(reads)
        effects.collect_structure(reads)
        effects.collect_tensor_attributes(self.reach.stored)
        contents = {id(live): saved for _, live, saved in self.snapshot.containers}
        effects.tensors.collect_containers(reads, contents, self.reach.containers)
        self.optimizers.collect_writes(effects.state_outputs)
        micro_batches = self.request.settings.accumulation_steps
        with self._watch.off():
            self.objects.collect(reads, self.snapshot.covered, micro_batches)
