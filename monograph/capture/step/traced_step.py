"""The step under the trace: the user's build() and the optimizers run once on fakes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import compress
from typing import Any

import torch
from torch import fx, nn

from monograph.capture.accumulation.batches import check_no_state, micro_call
from monograph.capture.accumulation.gradients import MicroGradients, check_no_gradients
from monograph.capture.effects.arguments import Given
from monograph.capture.effects.foreign_objects import Effects, undo_effects
from monograph.capture.effects.held_fakes import forget_cached, holds_fakes
from monograph.capture.effects.python_objects.changed_numbers import (
    changed_numbers,
    check_contents,
    numbers_put,
)
from monograph.capture.effects.python_objects.counters import Counters, Uncounted, is_number
from monograph.capture.effects.python_objects.growth import Grown, collect_growth
from monograph.capture.effects.python_objects.number_places import Place, is_known, value_before
from monograph.capture.effects.python_objects.stored import StoredThings, collect_stored
from monograph.capture.effects.side_effects import SideEffects
from monograph.capture.effects.state_outputs import StateOutput
from monograph.capture.guards.sources.code_watch import CodeWatch
from monograph.capture.guards.sources.overlay import Overlay, real_attributes_of
from monograph.capture.guards.sources.places import Content
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import Reads, record_reads
from monograph.capture.guards.sources.same_objects import Comparisons, RealObjects
from monograph.capture.guards.tensor_forms import Form, OwnGradient, as_guard
from monograph.capture.numbers.arithmetic import Condition
from monograph.capture.numbers.known import known_value, literals_of
from monograph.capture.numbers.moving import is_moving
from monograph.capture.numbers.python_functions import functions_know_numbers
from monograph.capture.optimizers.checks import check_steps, check_trainable
from monograph.capture.optimizers.foreign_scalers import foreign_scalers_refused
from monograph.capture.optimizers.rules import StepRules
from monograph.capture.optimizers.skipped_steps import step_or_skip
from monograph.capture.optimizers.tracing import Declared
from monograph.capture.process.settings import ProcessSettings
from monograph.capture.process.threads import OtherThreads
from monograph.capture.step.cond import branches_by_dynamo
from monograph.capture.step.hooks import carry_hooks, within
from monograph.capture.step.optimizer_inputs import OptimizerInputs
from monograph.capture.step.optimizers import TracedOptimizers
from monograph.capture.step.origins import OriginRecorder
from monograph.capture.step.replaced_functions import ReplacedFunctions
from monograph.capture.step.request import Request
from monograph.capture.step.roots import roots_of, watched_classes
from monograph.capture.tensors import sparse
from monograph.capture.tensors.checkpoint_regions import shows_again
from monograph.capture.tensors.fakes import Input, Inputs
from monograph.capture.tensors.functional.functionalise import (
    drop_profiler,
    lift_constants,
    record_generators,
)
from monograph.capture.tensors.functional.in_place import in_place_changes_explained
from monograph.capture.tensors.readings import UNKNOWN, Readings
from monograph.compat.amp import ASKING_STEP, is_dynamic_scaler
from monograph.compat.autograd import checkpointed_regions, handles_noted, held_by, hooks_on_saved_values
from monograph.compat.fake_values import fake_values
from monograph.compat.fakes import fake_mode, is_fake, lists_by, make_fake
from monograph.compat.modes import around_dispatch, current_tracer, other_threads_reported
from monograph.compat.patching import replaced
from monograph.compat.symbolic_numbers import recorded_conditions
from monograph.compat.tracing import trace, tracing_patches
from monograph.errors import AliasError, CaptureError
from monograph.ir.call.sparse import is_sparse
from monograph.ir.call.tree import unflatten
from monograph.ir.call_text import ModuleCall, describe_leaves
from monograph.ir.graph_signature import (
    ArgumentChanges,
    Between,
    Counted,
    Fixed,
    HeldGradient,
    Number,
    ReadAfter,
    Recorded,
    Write,
)
from monograph.ir.port import FREE, PROBES, READ_OUT, Role, gradient_path
from monograph.ir.probes import numbered, probes_go_to
from monograph.state.averages import Average
from monograph.state.find import average_slots, kept_parameters, module_slots, parameter_paths, scaler_slots
from monograph.state.snapshot import Snapshot


@dataclass
class TracedStep:
    """One trace of a step. `record()` gives the graph; `side_effects` what the step did besides computing."""

    request: Request
    modules: Mapping[str, nn.Module]
    with_values: bool
    snapshot: Snapshot
    declared: Mapping[str, list[Declared]] = field(default_factory=dict)  # first state, by optimizer
    still: frozenset[str] = frozenset()  # the paths of numbers that are constants of this build
    overlay: Overlay = field(default_factory=Overlay)
    reads: Reads = field(default_factory=Reads)
    effects: Effects = field(default_factory=Effects)  # in objects that the graph does not hold; undone
    branches: list[Condition] = field(default_factory=list)  # taken in Python on such numbers
    unraised: list[Condition] = field(default_factory=list)  # that arithmetic of the program does not raise
    known_counters: frozenset[str] = frozenset()  # whole numbers in param groups that the step moves: inputs
    numbers: Counters = field(default_factory=Counters)  # in Python objects: they move while this trace runs
    number_writes: list[Write] = field(
        default_factory=list
    )  # what they become, and others that come from them
    overwritten: list[Place] = field(
        default_factory=list
    )  # plain numbers before the step, moving ones after it
    grown: Grown = field(default_factory=lambda: Grown([], [], []))  # lists that this step only adds to
    stored: StoredThings = field(default_factory=StoredThings)  # tensors in objects outside
    forgotten: list[str] = field(default_factory=list)  # functions whose caches got tensors of the trace
    changes_arguments: bool = False  # besides the values of tensors, for a micro-batch alone
    argument_changes: ArgumentChanges = field(default_factory=ArgumentChanges)
    literals: dict[int, torch.Tensor] = field(default_factory=dict)  # the inputs that are, by position

    def __post_init__(self) -> None:
        self.inputs = Inputs(fake_mode(), self.with_values, self.still)
        self.numbers.put(self.inputs, self.overlay)
        self.names = parameter_paths(self.modules)
        owned = self.request.owned
        for module in self.modules.values():
            self.overlay.enter(module)
        if owned.scaler is not None and (seen := self.overlay.enter(owned.scaler)) is not None:
            seen.update({name: table.copy() for name, table in seen.items() if isinstance(table, dict)})
        self.slots = list(module_slots(self.modules, self.overlay.of))
        for slot in self.slots:
            self.inputs.add_state(slot)
        self._of_optimizers = OptimizerInputs(self.inputs, self.names, self.declared, self.known_counters)
        for held in self.request.owned.optimizers:
            self._of_optimizers.add(held)
        self._scaler_slots = list(scaler_slots(owned.scaler, self.overlay.of))
        for slot in self._scaler_slots:
            self.inputs.add_state(slot)
        self._average_weights: dict[str, Any] = {}
        for average in owned.averages:
            for slot in average_slots(average):
                self.inputs.add_state(slot)
            number = Number(average, "weight")
            self._average_weights[average.path] = self.inputs.add_number(
                number, Role.HYPER, f"ema_weight/{average.path}"
            )
        steps = self.request.settings.accumulation_steps
        if steps > 1:
            check_no_state(self.request.call, self.inputs.by_real)
            check_no_gradients(owned, self.request.settings)
        self._call = micro_call(self.request.call, steps) if steps > 1 else self.request.call
        self._leaves = self.inputs.add_arguments(self._call)
        whole = self.request.call.replicated
        self.readings = Readings(
            self.inputs, self._call.leaves, self.inputs.moving.branches, allowed=steps == 1
        )
        self._micro = MicroGradients(self.inputs, self.slots, whole) if steps > 1 else None
        self._held_gradients = self._add_held_gradients()
        self.numbers.add_to(self.inputs)
        self.reach = Reach(owned.owner, owned.private, owned.unwrap, self.request.answers)
        keep, unseen = self.request.settings.keep_gradients, self.reach.may_read_dict
        self.side_effects = SideEffects(
            self.inputs,
            self.modules,
            self.slots,
            keep,
            unseen,
            self.overlay,
            self.reach.names,
            self.request.own,
            (owned.owner, owned.private),
        )
        variables = {id(item.fake): item.path for item in self.inputs.items if item.role is Role.PARAM}
        self._recorder = OriginRecorder(self.modules, variables, self.request.observer)
        self._probes: dict[str, torch.Tensor] = {}
        self._threads = OtherThreads()
        self._settings = ProcessSettings()
        self._watch = CodeWatch(self.reach.started, self.reach.seen)
        self._rules = StepRules(
            owned,
            self.request.settings,
            doing=self._recorder.phase,
            around_backward=self._around_backward,
        )
        self.optimizers = TracedOptimizers(
            self._of_optimizers,
            owned,
            self.overlay,
            self._rules,
            self._recorder,
            with_values=self.with_values,
        )
        self.functions = ReplacedFunctions(
            self.inputs,
            self.readings,
            self.reach,
            self._rules,
            self._settings,
            self._micro,
            call=self._call,
            whole=self.request.call,
        )

    @contextmanager
    def _around_backward(self) -> Iterator[None]:
        around = self._micro.around_backward() if self._micro is not None else nullcontext()
        with around, in_place_changes_explained(current_tracer().graph):
            yield

    def _add_held_gradients(self) -> list[tuple[Any, Any]]:
        """Gradients that are there already and are added to; gives pairs of fakes, parameter and gradient."""
        pairs = []
        owners: dict[int, str] = {}
        for parameter in kept_parameters(self.request.owned, self.request.settings):
            if parameter.grad is not None:
                name = self.names[id(parameter)]
                if (owner := owners.setdefault(id(parameter.grad), name)) != name:
                    raise AliasError(
                        f"{owner} and {name} have one tensor as their gradient",
                        hint="give each parameter a gradient of its own, or none",
                    )
                fake = make_fake(self.inputs.mode, parameter.grad.detach())
                path = gradient_path(name)
                self.inputs.add(fake, Role.GRAD, path, HeldGradient(parameter))
                pairs.append((self.inputs.fake(parameter), fake))
        return pairs

    def record(self) -> fx.GraphModule:
        """Trace the step. The graph changes its inputs in place, as eager does."""
        try:
            with self._threads.checked(), self.values():
                recorded = trace(self._run, self.inputs.mode, self.inputs.fakes, known_value)
        except Exception as error:
            error.args = tuple(
                self.readings.spelled(arg) if isinstance(arg, str) else arg for arg in error.args
            )
            raise
        finally:
            self.forgotten = forget_cached(self.reach.caches)
            self.effects = undo_effects(
                self.reach.sources, self.snapshot.covered, holds_fakes, self.reach.is_forgotten
            )
            self.effects.found += self.side_effects.hooks + self.side_effects.structure
            self.effects.lost += self._threads.started
            self.numbers.remove()
        self._note_conditions(recorded.graph)
        self._drop_unread_numbers(recorded.graph)
        self._drop_unasked_state(recorded.graph)
        drop_profiler(recorded.graph)
        self._lift_free_tensors(recorded)
        recorded.recompile()
        return recorded

    def _note_conditions(self, graph: fx.Graph) -> None:
        moving, checked = self.inputs.moving, {*self.inputs.symbols, *self.readings.symbols}
        self.branches = recorded_conditions(self.inputs.mode) + moving.conditions(graph)
        self.unraised = moving.unraised(graph, checked)

    def _decided(self) -> set[str]:
        """The names of numbers in conditions."""
        return {name for _, names in (*self.branches, *self.unraised) for name in names}

    def _drop_unread_numbers(self, graph: fx.Graph) -> None:
        """A counter that no op and no branch reads is no input: it is moved beside the program."""
        if not self.numbers.leaves:
            return
        inputs, nodes = self.inputs, graph.find_nodes(op="placeholder")
        if inputs.moving.too_wide:
            raise Uncounted("a product")
        used = {
            str(item.fake.node.name)
            for item, node in zip(inputs.items, nodes, strict=True)
            if is_moving(item.fake) and (node.users or id(item) in self.readings.inputs_read)
        }
        kept = self.numbers.bind(used | self._decided())
        self._note_conditions(graph)
        unread = [isinstance(i.source, Counted) and i.fake.node.name not in kept for i in inputs.items]
        self._drop_inputs(nodes, unread)

    def _drop_inputs(self, nodes: Sequence[fx.Node], gone: Sequence[bool]) -> None:
        inputs = self.inputs
        for node in compress(nodes, gone):
            node.graph.erase_node(node)
        inputs.items = [item for item, lost in zip(inputs.items, gone, strict=True) if not lost]
        inputs.symbols = {
            item.fake.node.name: at for at, item in enumerate(inputs.items) if is_moving(item.fake)
        }

    def _drop_unasked_state(self, graph: fx.Graph) -> None:
        """State that the step did not ask for is no input: that of a parameter without a gradient."""
        items, nodes = self.inputs.items, graph.find_nodes(op="placeholder")
        decided = self._decided()

        def is_gone(item: Input, node: fx.Node) -> bool:
            name, owner = self._of_optimizers.owner_of(item.path)
            if not name or item.role is not Role.OPTIM or self.optimizers.was_asked_for(name, owner):
                return False
            moving = is_moving(item.fake) and item.fake.node.name in decided
            return not (node.users or moving or id(item) in self.readings.inputs_read)

        self._drop_inputs(nodes, list(map(is_gone, items, nodes)))

    def _collect_numbers(self) -> None:
        """Numbers that move, and that build() has left in Python objects."""
        if self._micro is not None:
            return
        found = self.numbers.collect(self.inputs, self.overlay)
        for table, name, label, value in self.side_effects.new_numbers(self.reads):
            found.append(self.numbers.written(self.inputs, Place(table, name, table, label), value))
        self.reach.take_imports()
        self.reach.drop_forgotten()
        for source, place, value in numbers_put(self.reach.sources, self.overlay, self.numbers):
            if not self.numbers.can_be_written(self.inputs, value):
                continue  # of a trace that failed, which the user has kept
            found.append(self.numbers.written(self.inputs, place, value))
            before = value_before(source, place)
            if is_number(before):
                self.overwritten.append(place)
            if isinstance(source, Content):
                place.container[place.key] = before
            else:
                source.restore(place.key, before)
        self.grown = collect_growth(self.reach, self.inputs, self.overlay, self._written_number)
        if self.numbers.places:
            check_contents(self.reach.sources, self.numbers)
        self.side_effects.state_outputs += self.grown.state_outputs
        covered = self.snapshot.covered - self.side_effects.not_carried(self.reads)
        self.stored = collect_stored(
            self.reach.sources, covered, self.inputs, self.overlay, self.side_effects.share_memory
        )
        self.side_effects.state_outputs += self.stored.state_outputs
        self.number_writes = found + self.grown.writes
        leaves = [leaf for write in self.number_writes if write.moves for leaf in write.value.leaves]
        for leaf in dict.fromkeys(leaf for leaf in leaves if isinstance(leaf, ReadAfter)):
            self.side_effects.state_outputs.append(
                StateOutput(self.inputs.read_out[leaf.name], leaf, f"{READ_OUT}{leaf.name}")
            )

    def changed_numbers(self) -> list[Place]:
        """The places where this trace has changed one number into another."""
        attributes = [
            Place(table, name, table, label)
            for label, owner, name in self.side_effects.changed_numbers(self.reads)
            if (table := real_attributes_of(owner)) is not None
        ]
        return changed_numbers(self.effects, [*self._owned(attributes), *self.overwritten])

    def moved_numbers(self) -> list[Place]:
        """The places of this step whose numbers have changed since some build was made."""
        return self._owned(place for place in self.request.moved if is_known(place, self.reach.sources))

    def _owned(self, places: Iterable[Place]) -> list[Place]:
        held = {
            id(real_attributes_of(owner)): owner
            for owner in (self.request.owned.owner, *self.modules.values())
        }
        return [replace(place, owner=held.get(id(place.container))) for place in places]

    def _written_number(self, container: Any, key: Any, label: str, value: Any) -> Write:
        return self.numbers.written(self.inputs, Place(container, key, container, label), value)

    def values(self) -> Any:
        """Inside, ops compute real values besides if fakes carry them."""
        return fake_values(self.inputs.mode, infer_kernels=True) if self.with_values else nullcontext()

    def _lift_free_tensors(self, recorded: fx.GraphModule) -> None:
        """Tensors from outside become inputs; state that leaked past the fakes becomes the input it is."""
        inputs = self.inputs
        placeholders = [node for node in recorded.graph.nodes if node.op == "placeholder"]
        known = {
            id(item.real): node
            for item, node in zip(inputs.items, placeholders, strict=True)
            if item.real is not None
        }
        known |= {id(item.fake): node for item, node in zip(inputs.items, placeholders, strict=True)}
        literals = literals_of(recorded)
        labels = {
            id(value): f"{entered.label}.{name}"
            for entered in self.reads.entered.values()
            for name, value in entered.before.items()
            if issubclass(type(value), torch.Tensor)
        }
        for tensor in lift_constants(recorded, known):
            real = inputs.free.get(id(tensor), tensor)
            faked = is_fake(tensor)
            fake = tensor if faked else make_fake(inputs.mode, real, with_value=self.with_values)
            if id(tensor) in literals:
                self.literals[len(inputs.items)] = tensor
            path = labels.pop(id(real), str(len(inputs.items)))
            inputs.add(fake, Role.CAPTURED, f"{FREE}{path}", Fixed(real))
        used, label = {id(item.real) for item in inputs.items}, "a tensor that build() asks"
        for stand_in_id, real in inputs.free.items():
            if id(real) not in used:
                self.reach.sources.append(as_guard(Form(label, real, followed=False)))
            if stand_in_id in inputs.asked_for_gradient_of_free:
                whole = id(real.grad) in used
                self.reach.sources.append(as_guard(OwnGradient(label, real, whole, followed=False)))

    def moved(self) -> set[str]:
        """The paths of state that each micro-batch changes before its gradients are there."""
        return self._micro.moved() if self._micro is not None else set()

    def module_io(self) -> dict[str, tuple[ModuleCall, ...]]:
        """What went into each held module and came out, by path; build() itself has the path ""."""
        return {path: tuple(calls) for path, calls in self._recorder.calls.items()}

    # --- under the trace -----------------------------------------------------------------------------------------

    def _run(self, *_stand_ins: Any) -> list[Any]:
        request, inputs = self.request, self.inputs
        roots = list(roots_of(request, self.modules, inputs))  # before what looks at tensors is recorded
        tracer = current_tracer()
        self._recorder.attach(tracer)
        self.readings.tracer = tracer
        record_generators(tracer)
        for parameter, gradient in self._held_gradients:
            parameter.grad = gradient
        with ExitStack() as stack:
            self._show_stand_ins()
            for cls in watched_classes(request.owned):
                self.overlay.watch(stack, cls)
            for held in request.owned.optimizers:
                self.optimizers.take_over(held)
            stack.enter_context(self._rules.hold())
            stack.enter_context(foreign_scalers_refused(request.owned.scaler))
            if is_dynamic_scaler(request.owned.scaler):
                stack.enter_context(replaced(request.owned.scaler, ASKING_STEP, step_or_skip))
            stack.enter_context(tracing_patches(self._branches_by_dynamo))
            stack.enter_context(checkpointed_regions(shows_again, partial(within, self.functions.mode)))
            stack.enter_context(functions_know_numbers(request.build, *self._owners()))
            stack.enter_context(lists_by(self.readings.listed, UNKNOWN))
            stack.enter_context(
                other_threads_reported(inputs.mode, self._threads.note_use, self._threads.note_start)
            )
            stack.enter_context(self._recorder.watch_modules())
            carry_hooks(self.inputs, self._call, self.functions.mode)
            self.reads = stack.enter_context(
                record_reads(request.owned, self.modules, self.snapshot, self.overlay)
            )
            self.reads.made[id(tracer.root)] = tracer.root
            for hook in hooks_on_saved_values():
                for holder in held_by(hook):
                    self.reads.walk(holder, f"hook: {type(holder).__name__}")
            stack.enter_context(self.functions.mode)
            stack.enter_context(probes_go_to(self._record_probe))
            stack.enter_context(handles_noted(self.side_effects.handles))
            self.reach.roots(roots)
            stack.enter_context(around_dispatch(self._watch.off, self.functions.answer, UNKNOWN))
            compared = Comparisons(lambda real: inputs.by_real.get(id(real)), inputs.note_comparison)
            stack.enter_context(self._watch.on(compared.look))
            args, kwargs = unflatten(request.call.tree, iter(self._leaves))
            shown = describe_leaves(zip(request.call.paths(), self._leaves, strict=True))
            given = Given(request.call, args, kwargs)
            with self._rules.autocast(), self._settings.kept():
                returned = request.build(*args, **kwargs)
            changed = given.new_content()
            if self._micro is not None:  # each micro-batch has containers of its own
                self.changes_arguments, changed = bool(changed), []
            self._recorder.calls[""] = [ModuleCall(shown, describe_leaves([("", returned)]))]
            sparse.note_histories([returned, *(content.values for content in changed)])
            self.optimizers.step_automatic()
            self._rules.end()
            self._settings.check()
            for average in request.owned.averages:
                self._update_average(average)
            self.optimizers.close()
            real = RealObjects(inputs.real_of)
            real.put_into(self.reach.sources)
            self.side_effects.keep_parameters(self.reads, real)
            self.side_effects.collect_objects(self.reads)
            self.side_effects.collect_structure(self.reads)
            self.side_effects.collect_tensor_attributes(self.reach.stored)
            contents = {id(live): saved for _, live, saved in self.snapshot.containers}
            self.side_effects.collect_containers(self.reads, contents)
            self.optimizers.collect_writes(self.side_effects.state_outputs)
            with self._watch.off():
                self._collect_numbers()
        check_steps(request.owned, request.settings, self.optimizers.steps, inputs)
        check_trainable(inputs)
        self.side_effects.collect_modules()
        outputs = self.side_effects.collect_results(returned, changed, self._leaves)
        self.argument_changes = replace(self.inputs.changes(), refills=tuple(self.side_effects.refills))
        self.side_effects.collect_gradients()
        if self._micro is not None:
            self._micro.check_arguments()
            self.side_effects.check_micro_batches_alike(self.reads)
            self.changes_arguments |= bool(self.argument_changes)
            self.argument_changes = ArgumentChanges()
            parts = self._micro.parts()
            self.side_effects.state_outputs += [
                StateOutput(gradient, Between(), path) for path, gradient in parts
            ]
        for path, tensor in self._probes.items():
            target = Recorded(self.request.probes, path)
            self.side_effects.state_outputs.append(StateOutput(tensor, target, f"{PROBES}{path}"))
        self.readings.close()
        for state_output in self.side_effects.state_outputs:
            if is_sparse(state_output.value):
                raise CaptureError(
                    f"the step leaves a sparse tensor in {state_output.path}",
                    hint="keep a dense one: a graph writes dense tensors alone",
                )
        return outputs + [state_output.value for state_output in self.side_effects.state_outputs]

    def _owners(self) -> list[object]:
        return [held.optimizer for held in self.request.owned.optimizers] + list(self.modules.values())

    def _record_probe(self, name: str, what: str, tensor: torch.Tensor) -> None:
        self._probes[numbered(name, what, self._probes)] = tensor

    def _update_average(self, average: Average) -> None:
        fake = self.inputs.fake
        weights = list(map(fake, average.weights.values()))
        with torch.no_grad(), self._recorder.phase("average", average.path):
            torch._foreach_lerp_(
                weights, list(map(fake, average.parameters())), self._average_weights[average.path]
            )

    def _branches_by_dynamo(self, compile_branches: Callable[..., Any]) -> Callable[..., Any]:
        def asides() -> Sequence[Callable[[], AbstractContextManager[Any]]]:
            return (self.reads.paused, self._recorder.paused, self.readings.paused, self._watch.off)

        random = self.snapshot.random
        return branches_by_dynamo(compile_branches, readings=self.readings, random=random, asides=asides)

    def _show_stand_ins(self) -> None:
        """Let this thread find fakes in modules and in the scaler."""
        for slot in (*self.slots, *self._scaler_slots):
            slot.container[slot.key] = self.inputs.fake(slot.tensor)
