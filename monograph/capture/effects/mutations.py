"""The side effects of a traced step: new state, re-assigned buffers, gradients, counters."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch
from torch import nn

from monograph.capture.effects.arguments import GivenContainer, NewContent
from monograph.capture.effects.foreign_objects import Effect
from monograph.capture.effects.held_fakes import holds_fakes
from monograph.capture.effects.put_again import PutAgain
from monograph.capture.effects.structure import removed_attributes, submodule_effects, tensor_attributes
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.sources.overlay import Overlay, attributes_of, is_hooks
from monograph.capture.guards.sources.places import Content
from monograph.capture.guards.sources.reads import MISSING, Reads, is_plain
from monograph.capture.guards.sources.same_objects import RealObjects
from monograph.capture.guards.sources.values import same
from monograph.capture.numbers.moving import is_moving
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.autograd import held_by
from monograph.compat.fakes import is_fake
from monograph.compat.modules import BUFFERS, PARAMETERS
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.errors import CaptureError, HookError
from monograph.ir.call.sparse import is_sparse
from monograph.ir.call.tree import LEAF, Tree, flatten, leaf_paths, with_parts
from monograph.ir.graph_signature import (
    Argument,
    Assign,
    Copy,
    Fixed,
    Gradient,
    HeldGradient,
    Part,
    Refill,
    Result,
    Target,
    Write,
)
from monograph.ir.port import Role, gradient_path
from monograph.state.find import Slot, overlapping

_NOTHING = object()


@dataclass(frozen=True)
class StateOutput:
    """An output that is not returned to the caller: its value in the trace, where it goes, and its path."""

    value: Any
    target: Target
    path: str
    place: OwnPlace | None = None  # where build() put it, if it is copied into what was there


def _places_in(
    path: str, tree: Tree, values: Any, before: Sequence[Any], target: Assign | None, moved: Collection[int]
) -> dict[str, OwnPlace]:
    """Where the tensors that a step replaces are, by their paths: in a value that is new, or in one that stays."""
    paths = list(leaf_paths(tree, path))
    indexes = tuple(index for index, item in enumerate(before) if id(item) in moved)
    if target is not None:
        place = OwnPlace(target.container, target.key, path, indexes)
        return {paths[index]: place for index in indexes}
    if type(values) not in (dict, list):
        return {}
    keys = list(values) if isinstance(values, dict) else list(range(len(values)))
    if any(isinstance(values[key], (list, tuple, dict)) for key in keys):
        return {}  # deeper inside
    return {paths[index]: OwnPlace(values, keys[index], paths[index]) for index in indexes}


@dataclass(frozen=True)
class _Change:
    """An attribute that build() set to a plain value; `is_new` if there was none."""

    path: str
    owner: Any
    name: str
    old: Any
    value: Any
    is_new: bool


_OF_MODULES = frozenset(nn.Module().__dict__)  # the attributes that each module has


@dataclass
class SideEffects:
    """Collects outputs of a trace. Slots must be the places of module state before the trace, as the trace sees them."""

    inputs: Inputs
    modules: Mapping[str, nn.Module]
    slots: Sequence[Slot]
    keep_gradients: bool
    may_read_dict: Callable[[dict[str, Any], str], bool]  # says whether an attribute may be read unseen
    overlay: Overlay
    loaded: Collection[str]  # the names of attributes that code which ran asks for
    own: Collection[torch.Tensor] = ()  # tensors that nobody but the graph has
    private: tuple[Any, Collection[str]] = (
        None,
        (),
    )  # the graph, and its attributes that are no step's business
    state_outputs: list[StateOutput] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    refills: list[Refill] = field(default_factory=list)  # of containers among the arguments
    result_tree: Tree = LEAF
    without_gradient: list[str] = field(default_factory=list)
    handles: list[Any] = field(
        default_factory=list
    )  # weak references to those of hooks that build() registers
    hooks: list[Effect] = field(default_factory=list)  # that it leaves on modules
    structure: list[Effect] = field(default_factory=list)  # submodules and attributes that come and go
    carried: set[str] = field(default_factory=set)  # lists, tuples and dicts whose tensors are written back
    gone: list[OwnPlace] = field(
        default_factory=list
    )  # where another thread has put something else meanwhile
    _done: set[int] = field(default_factory=set)  # ids of the containers in these

    def __post_init__(self) -> None:
        self._originals = {(id(slot.container), slot.key): (slot, slot.tensor) for slot in self.slots}
        self._attributes = {path: dict(self._seen(module)) for path, module in self.modules.items()}
        modules = self.modules.items()
        self._hooks = {path: self._hooks_of(_table_of(module)) for path, module in modules}
        self._places = Counter(id(slot.tensor) for slot in self.slots)

    def _seen(self, owner: Any) -> dict[str, Any]:
        """The attributes of an object as the trace sees them."""
        return self.overlay.attributes(owner)

    def _public(self, owner: Any) -> dict[str, Any]:
        """The attributes of an object that are a step's business."""
        graph, hidden = self.private
        return {k: v for k, v in self._seen(owner).items() if owner is not graph or k not in hidden}

    def places(self) -> dict[tuple[int, str], torch.Tensor]:
        """The state tensors of modules before the step, by the id of the dict where each is and its name there."""
        found = self._originals.values()
        return {(id(self.overlay.there(slot.container)), slot.key): tensor for slot, tensor in found}

    # --- results ---------------------------------------------------------------------------------------------------

    def collect_results(
        self, returned: Any, changed: Sequence[NewContent], given: Sequence[Any]
    ) -> list[Any]:
        """Classify what build() returned and what it left in its arguments; gives the values that the program must compute.

        To be called when all new state is collected: a tensor that gets another value is returned as it was. `given`
        are the leaves of the arguments.
        """
        self._replaced = {
            id(state_output.target.tensor)
            for state_output in self.state_outputs
            if isinstance(state_output.target, Copy)
        }
        leaves: list[Any] = []
        found: list[Any] = []
        self.result_tree = with_parts(flatten(returned, found), iter(found), is_fake, leaves)
        outputs: list[Any] = []
        positions: dict[int, int] = {}
        self.results = [self._result(leaf, outputs, positions, "returns") for leaf in leaves]
        own = {id(leaf): index for index, leaf in enumerate(given)}
        self.refills = [self._refill(content, outputs, positions, own) for content in changed]
        return outputs

    def _refill(
        self, content: NewContent, outputs: list[Any], positions: dict[int, int], own: Mapping[int, int]
    ) -> Refill:
        leaves: list[Any] = []
        found: list[Any] = []
        tree = with_parts(flatten(list(content.values), found, ()), iter(found), is_fake, leaves)
        results = []
        for leaf in leaves:
            if isinstance(leaf, GivenContainer):
                results.append(Result("container", index=leaf.index))
            elif id(leaf) in own:
                results.append(Result("argument", index=own[id(leaf)]))
            else:
                about = f"puts into argument {content.path}"
                results.append(self._result(leaf, outputs, positions, about))
        return Refill(content.container, content.path, content.keys, tree, tuple(results), content.put)

    def _result(self, leaf: Any, outputs: list[Any], positions: dict[int, int], does: str) -> Result:
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
            if (real is not None and id(real) not in self._replaced) or not is_fake(leaf):
                return Result("fixed", value=leaf if real is None else real)
        if id(leaf) not in positions:
            positions[id(leaf)] = len(outputs)
            outputs.append(leaf)
        needs_grad = isinstance(leaf, torch.Tensor) and leaf.requires_grad
        return Result("output", index=positions[id(leaf)], requires_grad=needs_grad)

    # --- modules ---------------------------------------------------------------------------------------------------

    def collect_modules(self) -> None:
        """Buffers and attributes that build() re-assigned, and tensors it put into new attributes."""
        self._check_hooks()
        for path, module in self.modules.items():
            seen = self._seen(module)
            for table in (seen[PARAMETERS], seen[BUFFERS], seen):
                for name, value in list(table.items()):
                    if isinstance(value, torch.Tensor) and is_fake(value):
                        self._collect_tensor(f"{path}.{name}", table, name, value, seen)
        for slot in self.slots:
            if not isinstance(slot.container.get(slot.key), torch.Tensor) and slot.role is not Role.CAPTURED:
                raise CaptureError(f"build() removes {slot.path}", hint="a static graph keeps its state")

    def _collect_tensor(
        self, path: str, table: dict[str, Any], name: str, value: torch.Tensor, seen: Mapping[str, Any]
    ) -> None:
        slot, real = self._originals.get((id(table), name), (None, None))
        if real is not None and self.inputs.by_real[id(real)] is value:
            return
        if is_sparse(value):
            raise CaptureError(
                f"build() puts a sparse tensor into {path}, where it would stay after the step",
                hint="keep its values there, and put it together in each step: torch.sparse_coo_tensor()",
            )
        if table is seen[PARAMETERS] or (slot is None and table is seen[BUFFERS]):
            raise CaptureError(
                f"build() replaces or registers {path}",
                hint="register parameters and buffers before the capture",
            )
        tied = self._places[id(real)] > 1  # one tensor at two places, which hold different values from now on
        if real is not None and fits(value, real) and not tied:
            self.state_outputs.append(
                StateOutput(value, Copy(real), path, OwnPlace(self.overlay.there(table), name, path))
            )
        elif table is seen or (tied and real is not None and fits(value, real)):
            known = real is not None and not tied  # of another shape: it takes the place of what is an input
            target = Assign(self.overlay.there(table), name)
            self.state_outputs.append(StateOutput(value, target, f"{path}.next" if known else path))
        elif real is not None:
            raise CaptureError(
                f"build() assigns to buffer {path} a tensor {tuple(value.shape)} {value.dtype}; "
                f"it holds {tuple(real.shape)} {real.dtype}",
                hint="a static graph keeps the shapes and dtypes of its state",
            )

    def _check_hooks(self) -> None:
        """Hooks that build() leaves on modules are put there once the step has run, if nobody can take them away."""
        for path, module in self.modules.items():
            there, seen = _table_of(module), self._seen(module)
            if self._hooks_of(there) != self._hooks[path]:
                raise self._hook_error(path)
            for name in self._hooks[path]:
                before, after = there[name], seen[name]
                if dict(before) == dict(after):
                    continue
                handles = [handle for reference in self.handles if (handle := reference()) is not None]
                kept = any(handle.hooks_dict_ref() is after for handle in handles)
                if kept or any(map(holds_fakes, chain.from_iterable(map(held_by, after.values())))):
                    raise self._hook_error(path)
                table, copy = Content(f"{path}.{name}", before), Content("", after)
                self.hooks.append(Effect(table.label, table, table.now(), copy.now()))

    def _hook_error(self, path: str) -> HookError:
        return HookError(
            f"build() registers or removes a hook of {path}, which stays after the step",
            hint="register hooks before the first step; a model that does it in its first call "
            "can be called once eagerly, in each process that trains it",
        )

    def _hooks_of(self, attributes: Mapping[str, Any]) -> dict[str, dict[int, Any]]:
        """Those that are there: a handle from before the step removes one of these."""
        return {name: dict(table) for name, table in attributes.items() if is_hooks(name, table)}

    def collect_structure(self, reads: Reads) -> None:
        """Submodules that build() replaces, and attributes that it takes away."""
        objects = list(self._python_objects(reads))
        modules = [(path, owner) for path, owner, _ in objects if isinstance(owner, nn.Module)]
        self.structure += submodule_effects(modules, self.overlay, reads.made)
        for path, owner, before in objects:
            if id(owner) not in reads.made:
                self.structure += removed_attributes(path, owner, self._seen(owner), before)

    def collect_tensor_attributes(self, stored: Collection[str]) -> None:
        """What build() has put into Python attributes of state, under the names that code stores to."""
        for item in self.inputs.items:
            if not isinstance(item.real, torch.Tensor):
                continue
            for effect in tensor_attributes(item.path, item.real, item.fake, stored):
                ((name, value),) = effect.after.items() or [("", None)]
                old = effect.before.get(name)
                if isinstance(value, torch.Tensor) and is_fake(value):
                    self._collect_assigned(effect.label, vars(item.real), name, value, old)
                elif holds_fakes(value):
                    raise CaptureError(
                        f"build() puts an object that holds tensors of the step into {effect.label}",
                        hint="keep them in an attribute of a module or of the graph, or in the state of an optimizer",
                    )
                else:
                    self.structure.append(effect)

    def own_memory(self) -> list[tuple[OwnPlace, Any]]:
        """Places whose tensors the step replaces, with copies for them.

        A step writes into the tensor that is there, where eager mode puts a new one: it must be nobody else's.
        """
        copies = {id(tensor): tensor for tensor in self.own}
        places: dict[tuple[int, Any], OwnPlace] = {}
        for index, state_output in enumerate(self.state_outputs):
            if state_output.place is None or not isinstance(state_output.target, Copy):
                continue
            places[id(state_output.place.container), state_output.place.key] = state_output.place
            old = state_output.target.tensor
            if id(old) not in copies:
                copies[id(old)] = copy = old.detach().clone()
                self.state_outputs[index] = replace(state_output, target=Copy(copy))
                for item in self.inputs.items:
                    if item.real is old:
                        item.source = Fixed(copy)
        found = []
        for place in places.values():
            tensors = place.tensors()
            if all(id(tensor) in copies for tensor in tensors):
                found.append((place, place.with_tensors([copies[id(tensor)] for tensor in tensors])))
            else:
                self.gone.append(place)
        return found

    def keep_parameters(self, reads: Reads, real: RealObjects) -> None:
        """A parameter that build() puts into an attribute is the parameter itself."""
        for _, owner, before in self._python_objects(reads):
            seen = self._seen(owner)
            for name, value in self._public(owner).items():
                new = value is not before.get(name, _NOTHING) and (id(owner), name) in reads.written
                if new and name not in _OF_MODULES:
                    seen[name] = real.instead_of(value)

    def collect_objects(self, reads: Reads) -> None:
        """Tensors that build() put into attributes of objects besides the held modules."""
        for entered in list(reads.entered.values()):  # looking at one may enter others
            for name, value in self._seen(entered.owner).items():
                old = entered.before.get(name, _NOTHING)
                if is_fake(value) and not self._unchanged(value, old):
                    path, table = f"{entered.label}.{name}", attributes_of(entered.owner)
                    self._collect_assigned(path, table, name, value, old)

    def _collect_assigned(self, path: str, table: Any, name: str, value: torch.Tensor, old: Any) -> None:
        """A tensor that is new in an attribute: copied into the one that was there, if it has its form."""
        if table is not None and self._takes_copies(path, value, old):
            self.state_outputs.append(StateOutput(value, Copy(old), path, OwnPlace(table, name, path)))
        else:
            self.state_outputs.append(StateOutput(value, Assign(table, name), path))

    def collect_containers(self, reads: Reads, contents: Mapping[int, Any]) -> None:
        """Tensors that build() put into lists, tuples and dicts: `self.hidden = (h, c)`.

        `contents` has what containers held before, by their id.
        """
        for path, owner, before in self._python_objects(reads):
            for name, value in self._public(owner).items():
                old = before.get(name, _NOTHING)
                if value is not old and (id(owner), name) not in reads.written:
                    continue
                leaves: list[Any] = []
                tree = flatten(value, leaves)
                if tree != LEAF and any(map(is_fake, leaves)):
                    target = None if value is old else Assign(attributes_of(owner), name)
                    former = _former(old, contents)
                    self._collect_container(f"{path}.{name}", tree, leaves, value, former, target)

    def _collect_container(
        self, path: str, tree: Tree, leaves: list[Any], value: Any, old: Any, target: Assign | None
    ) -> None:
        before: list[Any] = []
        places = list(leaf_paths(tree, path))
        if flatten(old, before) == tree:
            known = zip(places, leaves, before, strict=True)
            moved = [
                (place, self._in_trace(leaf), real)
                for place, leaf, real in known
                if not self._unchanged(leaf, real)
            ]
            fit = all(is_fake(leaf) and _is_real(real) and fits(leaf, real) for _, leaf, real in moved)
            if not moved or (fit and not self.share_memory({place: real for place, _, real in moved})):
                own = _places_in(path, tree, value, before, target, {id(real) for _, _, real in moved})
                self.state_outputs += [
                    StateOutput(leaf, Copy(real), at, own.get(at)) for at, leaf, real in moved
                ]
                self.carried.add(path)
                self._done.update(map(id, containers_in(value)))
                return
        if target is None or not all(map(_is_leaf, leaves)):
            return  # lost: a list that grew in place, or what has no form
        made = [index for index, leaf in enumerate(leaves) if is_fake(leaf)]
        shared = list(leaves)
        for index in made:
            part = Part(target.container, target.key, tree, shared, index, index == made[-1])
            self.state_outputs.append(StateOutput(leaves[index], part, places[index]))
        self.carried.add(path)
        self._done.update(map(id, containers_in(value)))

    def _in_trace(self, leaf: Any) -> Any:
        """What stands for a tensor of the state in the trace; anything else as it is."""
        return self.inputs.by_real.get(id(leaf), leaf) if _is_real(leaf) else leaf

    def not_carried(self, reads: Reads) -> set[int]:
        """The ids of lists, deques and dicts in attributes whose content after the step nothing writes back yet."""
        found = {
            id(item)
            for _, owner, _ in self._python_objects(reads)
            for name, value in self._public(owner).items()
            if name not in _OF_MODULES
            for item in containers_in(value)
        }
        return found - self._done

    def _takes_copies(self, path: str, value: torch.Tensor, old: Any) -> bool:
        """True if a tensor of the same form can be written where this one was."""
        return _is_real(old) and fits(value, old) and not self.share_memory({path: old})

    def _unchanged(self, leaf: Any, old: Any) -> bool:
        return leaf is old or (isinstance(old, torch.Tensor) and self.inputs.by_real.get(id(old)) is leaf)

    def share_memory(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if some of these tensors share memory, with each other or with state: each needs its own."""
        if len({id(tensor) for tensor in tensors.values()}) < len(tensors):
            return True
        known = {id(tensor) for tensor in tensors.values()}
        state = {k: t for k, t in self.inputs.tensors().items() if id(t) not in known}
        return any(set(pair) & tensors.keys() for pair in overlapping(state | dict(tensors)))

    def plain_writes(self, reads: Reads) -> list[tuple[dict[str, Any], str, Any]]:
        """Attributes that build() set to plain values without reading them before: they are kept."""
        return [
            (_table_of(change.owner), change.name, change.value)
            for change in self._plain_changes(reads)
            if not self._changes_what_it_read(reads, change)
        ]

    def put_again(self, reads: Reads) -> PutAgain:
        """Attributes that build() set before it asked for them: somebody may change them between two steps."""
        found = [
            (_table_of(owner), name, value)
            for _, owner, _ in self._python_objects(reads)
            for name, value in self._public(owner).items()
            if reads.was_written_first(owner, name) and reads.is_in_instance(owner, name)
            if is_plain(value) and not holds_fakes(value)
        ]
        _, others = self.exchanged(reads)
        return PutAgain([*found, *((write.container, write.key, write.value) for write in others)])

    def moving_writes(self, reads: Reads) -> list[Write]:
        """Attributes that build() read and then set to another plain value: the next step begins with that one."""
        return [
            Write(
                _table_of(change.owner),
                change.name,
                change.value,
                f"{change.path} ({_before(reads, change.owner, change.name)!r} to {change.value!r})",
            )
            for change in self._plain_changes(reads)
            if self._changes_what_it_read(reads, change)
        ]

    def _changes_what_it_read(self, reads: Reads, change: _Change) -> bool:
        owner, name = change.owner, change.name
        if isinstance(change.old, torch.Tensor):
            return True  # state is guarded in each build
        if self.may_read_dict(_table_of(owner), name):
            return True
        if change.is_new and not reads.found_on_class(owner, name):
            return self._may_have_missed(reads, owner, name)
        return reads.was_read(owner, name) and not same(reads.value_read(owner, name), change.value)

    def _may_have_missed(self, reads: Reads, owner: Any, name: str) -> bool:
        """True if build() may have asked for an attribute that was not there, before it made it."""
        return name in self.loaded and not reads.was_written_first(owner, name)

    def made_lazily(self, reads: Reads) -> list[Write]:
        """Attributes that build() may have missed, and made: objects of Python, which only this one step makes."""
        return [
            write
            for owner, name, write, is_new in self._objects_put(reads)
            if is_new and self._may_have_missed(reads, owner, name)
        ]

    def exchanged(self, reads: Reads) -> tuple[list[Write], list[Write]]:
        """Objects of Python that build() put where it may have read another one; and those that it only put there."""
        read: list[Write] = []
        others: list[Write] = []
        for owner, name, write, is_new in self._objects_put(reads):
            if (id(owner), name) not in reads.written:
                continue
            table = _table_of(owner)
            if is_new and not self._may_have_missed(reads, owner, name):
                others.append(write)
            elif not is_new:
                asked = reads.was_asked_for(owner, name) or self.may_read_dict(table, name)
                (read if asked else others).append(write)
        return read, others

    def _objects_put(self, reads: Reads) -> Iterator[tuple[Any, str, Write, bool]]:
        """Objects of Python that build() has put into attributes, and that hold nothing of the trace; is it new there?"""
        for path, owner, before in self._python_objects(reads):
            for name, value in self._seen(owner).items():
                if (
                    self._is_object(value)
                    and value is not before.get(name, _NOTHING)
                    and f"{path}.{name}" not in self.carried
                    and not (name.startswith("_") and name in before and _is_torchs_layer(owner))
                    and not holds_fakes(value)
                ):
                    write = Write(_table_of(owner), name, value, f"{path}.{name}")
                    yield owner, name, write, name not in before

    def _is_object(self, value: Any) -> bool:
        is_tensor = issubclass(type(value), torch.Tensor)
        tensor = is_tensor and (is_fake(value) or not isinstance(value, nn.Parameter))
        return not is_plain(value) and not tensor and not is_moving(value)

    def check_micro_batches_alike(self, reads: Reads) -> None:
        """Raise CaptureError for an attribute that a later micro-batch finds otherwise than the first."""
        targets = [state_output.target for state_output in self.state_outputs]
        begun = {(id(item.container), item.key) for item in targets if isinstance(item, (Assign, Part))}
        found = [write.about for write in self.moving_writes(reads)]
        found += [
            f"{path}.{name}"
            for path, owner, _ in self._python_objects(reads)
            for name in self._seen(owner)
            if (id(attributes_of(owner)), name) in begun and reads.was_asked_for(owner, name)
        ]
        buffers = [slot for slot in self.slots if slot.role is Role.BUFFER]
        there = self.overlay.there
        found += [slot.path for slot in buffers if (id(there(slot.container)), slot.key) in begun]
        found = [f"the attribute {path}" for path in found] + [effect.label for effect in self.structure]
        if found:
            raise CaptureError(
                f"build() reads and changes {found[0]}: with gradient accumulation the second "
                "micro-batch would find another value than the first",
                hint="let it be a tensor of one shape from the start (register_buffer), or run the model once "
                "before the first step",
            )

    def _plain_changes(self, reads: Reads) -> Iterator[_Change]:
        for path, owner, before in self._python_objects(reads):
            for name, value in self._seen(owner).items():
                old = before.get(name, _NOTHING)
                if (
                    value is not old
                    and is_plain(value)
                    and not isinstance(old, torch.SymInt | torch.SymFloat)
                ):
                    yield _Change(f"{path}.{name}", owner, name, old, value, name not in before)

    def changed_numbers(self, reads: Reads) -> Iterator[tuple[str, Any, str]]:
        """Attributes that build() read as a number and set to another one: what they are called, object and name."""
        for path, owner, before in self._python_objects(reads):
            table = attributes_of(owner)
            for name, value in self._seen(owner).items():
                old = before.get(name, _NOTHING)
                if table is None or value is old or type(old) not in (int, float):
                    continue
                moved = is_moving(value) or (type(value) in (int, float) and not same(old, value))
                if moved and (self.may_read_dict(table, name) or reads.was_read(owner, name)):
                    yield f"{path}.{name}", owner, name

    def new_numbers(self, reads: Reads) -> Iterator[tuple[Any, str, str, Any]]:
        """Attributes that got a number which moves."""
        for path, owner, before in self._python_objects(reads):
            for name, value in self._seen(owner).items():
                if is_moving(value) and value is not before.get(name, _NOTHING):
                    yield attributes_of(owner), name, f"{path}.{name}", value

    def lost_writes(self, reads: Reads) -> list[str]:
        """Attributes that build() only sets, to what no replay can set again: objects that hold tensors of the step.

        Raises CaptureError if build() has read the attribute before: the next step would begin with something else than
        in eager mode.
        """
        lost = []
        for path, owner, before in self._python_objects(reads):
            for name, value in self._seen(owner).items():
                label = f"{path}.{name}"
                if (
                    value is before.get(name, _NOTHING)
                    or (id(owner), name) not in reads.written
                    or not self._is_object(value)
                    or label in self.carried
                    or (name.startswith("_") and _is_torchs_layer(owner))
                ):
                    continue
                if is_symbolic(value) and reads.was_read(owner, name):
                    raise CaptureError(
                        f"build() goes on from {label}, and sets it to a number that it reads out of a tensor of the step",
                        hint="hold it in a buffer of a module, and add the tensor: buffer.add_(loss.detach())",
                    )
                asked = reads.was_asked_for(owner, name) or self.may_read_dict(_table_of(owner), name)
                if asked and holds_fakes(value):
                    raise not_repeatable(label)
                lost.append(label)
        return lost

    def _python_objects(self, reads: Reads) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        for path, module in self.modules.items():
            yield path, module, self._attributes[path]
        for entered in list(reads.entered.values()):  # looking at one may enter others
            yield entered.label, entered.owner, entered.before

    # --- gradients ---------------------------------------------------------------------------------------------------

    def collect_gradients(self) -> None:
        """Gradients that stay: of parameters if they are kept, of arguments always, as eager leaves them."""
        for item in self.inputs.items:
            tensor = item.fake
            asked = isinstance(tensor, torch.Tensor) and (tensor.is_leaf or tensor.retains_grad)
            gradient = tensor.grad if asked else None
            if item.role is Role.PARAM:
                if gradient is None and item.real.requires_grad:
                    self.without_gradient.append(item.path)
                held = self.inputs.by_fake.get(id(gradient))
                source = None if held is None else held.source
                if isinstance(source, HeldGradient) and source.parameter is item.real:
                    continue  # it was there before: what was added to it goes into it
                if self.keep_gradients and (item.real.requires_grad or item.real.grad is not None):
                    self.state_outputs.append(
                        StateOutput(gradient, Gradient(item.real), gradient_path(item.path))
                    )
            elif gradient is not None and isinstance(item.source, Argument):
                self.state_outputs.append(
                    StateOutput(gradient, Gradient(None, item.source.index), gradient_path(item.path))
                )


def _table_of(owner: Any) -> dict[str, Any]:
    """The dict of an object's attributes, which may be empty; another one for an object that keeps none."""
    found = attributes_of(owner)
    return {} if found is None else found


def _before(reads: Reads, owner: Any, name: str) -> Any:
    known = reads.value_read(owner, name)
    return None if known is MISSING else known


def _is_torchs_layer(owner: Any) -> bool:
    """True for layers that keep books of their own, such as the list of weights of an LSTM."""
    layers = [cls for cls in type(owner).__mro__ if cls.__module__.startswith("torch.nn.modules.")]
    return any(cls is not nn.Module for cls in layers)


def _former(value: Any, contents: Mapping[int, Any]) -> Any:
    """A nested container as it was before build() changed what is in it."""
    value = contents.get(id(value), value)
    if isinstance(value, dict):
        made = value.copy()
        for key, item in value.items():
            dict.__setitem__(made, key, _former(item, contents))
        return made
    if type(value) is list:
        return [_former(item, contents) for item in value]
    if isinstance(value, tuple):
        items = [_former(item, contents) for item in value]
        return tuple(items) if type(value) is tuple else tuple.__new__(type(value), items)
    return value


def containers_in(value: Any) -> Iterator[Any]:
    """The containers in a value, itself among them."""
    if issubclass(type(value), (list, tuple, dict, set, deque)):  # a dead proxy has no class of its own
        yield value
        for item in list(value.values()) if isinstance(value, dict) else list(value):
            yield from containers_in(item)


def not_repeatable(label: str) -> CaptureError:
    """The error for a place where a step leaves what no replay can make."""
    return CaptureError(
        f"build() puts an object that holds tensors of the step into {label}, and no replay can do that",
        hint="keep the tensors themselves there: in an attribute, a list, a tuple, a dict or a dataclass",
    )


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_fake(leaf)


def _is_leaf(leaf: Any) -> bool:
    return is_plain(leaf) or isinstance(leaf, torch.Tensor)


def fits(value: torch.Tensor, real: torch.Tensor) -> bool:
    """True if `value` can be copied into `real` as it is."""
    return value.shape == real.shape and value.dtype == real.dtype and value.device == real.device
