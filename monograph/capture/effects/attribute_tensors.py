"""Tensors that build() puts into attributes: by themselves, or in lists, tuples and dicts there."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from monograph.capture.effects.attributes import NOTHING, OF_MODULES, Attributes
from monograph.capture.effects.containers import containers_in
from monograph.capture.effects.foreign_objects import Effect
from monograph.capture.effects.held_fakes import holds_fakes
from monograph.capture.effects.state_outputs import StateOutput, fits
from monograph.capture.effects.structure import tensor_attributes
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.sources.overlay import real_attributes_of
from monograph.capture.guards.sources.reads import Reads
from monograph.capture.guards.sources.same_objects import RealObjects
from monograph.capture.guards.sources.values import is_plain
from monograph.capture.tensors.fakes import Inputs
from monograph.compat.fakes import is_fake
from monograph.errors import CaptureError
from monograph.ir.call.tree import LEAF, Tree, flatten, leaf_paths
from monograph.ir.graph_signature import Assign, Copy, Part
from monograph.state.find import overlapping


@dataclass
class AttributeTensors:
    """Collects them: each is written into the tensor that was there, if it has its form, or takes its place."""

    attributes: Attributes
    inputs: Inputs
    state_outputs: list[StateOutput]
    carried: set[str] = field(default_factory=set)  # lists, tuples and dicts whose tensors are written back
    _done: set[int] = field(default_factory=set)  # ids of the containers in these

    def keep_parameters(self, reads: Reads, real: RealObjects) -> None:
        """A parameter that build() puts into an attribute is the parameter itself."""
        for _, owner, before in self.attributes.objects(reads):
            seen = self.attributes.seen(owner)
            for name, value in self.attributes.public(owner).items():
                new = value is not before.get(name, NOTHING) and (id(owner), name) in reads.written
                if new and name not in OF_MODULES:
                    seen[name] = real.instead_of(value)

    def collect_of_objects(self, reads: Reads) -> None:
        """Tensors that build() put into attributes of objects besides the held modules."""
        for entered in list(reads.entered.values()):  # looking at one may enter others
            for name, value in self.attributes.seen(entered.owner).items():
                old = entered.before.get(name, NOTHING)
                if self._is_tensor(value) and not self._unchanged(value, old):
                    path, table = f"{entered.label}.{name}", real_attributes_of(entered.owner)
                    self._collect(path, table, name, self.inputs.fake(value), old)

    def collect_of_tensors(self, stored: Collection[str]) -> Iterator[Effect]:
        """What build() has put into Python attributes of state, under the names that code stores to; gives the others."""
        for item in self.inputs.items:
            if not isinstance(item.real, torch.Tensor):
                continue
            for effect in tensor_attributes(item.path, item.owner, item.shown, stored):
                ((name, value),) = effect.after.items() or [("", None)]
                old = effect.before.get(name)
                if isinstance(value, torch.Tensor) and is_fake(value):
                    self._collect(effect.label, vars(item.owner), name, value, old)
                elif holds_fakes(value):
                    raise CaptureError(
                        f"build() puts an object that holds tensors of the step into {effect.label}",
                        hint="keep them in an attribute of a module or of the graph, or in the state of an optimizer",
                    )
                else:
                    yield effect

    def _collect(self, path: str, table: Any, name: str, value: torch.Tensor, old: Any) -> None:
        """A tensor that is new in an attribute: copied into the one that was there, if it has its form."""
        if table is not None and self._takes_copies(path, value, old):
            self.state_outputs.append(StateOutput(value, Copy(old), path, OwnPlace(table, name, path)))
        else:
            self.state_outputs.append(StateOutput(value, Assign(table, name), path))

    def _takes_copies(self, path: str, value: torch.Tensor, old: Any) -> bool:
        """True if a tensor of the same form can be written where this one was."""
        return _is_real(old) and fits(value, old) and not self.share_memory({path: old})

    def _is_tensor(self, value: Any) -> bool:
        """True for tensors of the trace, and for tensors from outside that are no parameters."""
        return is_fake(value) or (_is_real(value) and not isinstance(value, nn.Parameter))

    def _unchanged(self, leaf: Any, old: Any) -> bool:
        return leaf is old or (isinstance(old, torch.Tensor) and self.inputs.by_real.get(id(old)) is leaf)

    def share_memory(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if some of these tensors share memory, with each other or with state: each needs its own."""
        if len({id(tensor) for tensor in tensors.values()}) < len(tensors):
            return True
        known = {id(tensor) for tensor in tensors.values()}
        state = {k: t for k, t in self.inputs.tensors().items() if id(t) not in known}
        return any(set(pair) & tensors.keys() for pair in overlapping(state | dict(tensors)))

    # --- containers ------------------------------------------------------------------------------------------------

    def collect_containers(self, reads: Reads, contents: Mapping[int, Any], known: Set[int]) -> None:
        """Tensors that build() put into lists, tuples, dicts and new objects: `self.hidden = (h, c)`.

        `contents` has what containers held before, by their id; `known` are the ids of those that were there.
        """
        for path, owner, before in self.attributes.objects(reads):
            for name, value in self.attributes.public(owner).items():
                old = before.get(name, NOTHING)
                is_put = value is not old
                if is_put and ((id(owner), name) not in reads.written or was_there(value, known)):
                    continue  # what is in one that was there is looked after by itself
                leaves: list[Any] = []
                tree = flatten(value, leaves, () if is_put else None)
                if tree != LEAF and any(map(is_fake, leaves)):
                    target = Assign(real_attributes_of(owner), name) if is_put else None
                    former = _former(old, contents)
                    self._collect_container(f"{path}.{name}", tree, leaves, value, former, target)

    def _collect_container(
        self, path: str, tree: Tree, leaves: list[Any], value: Any, old: Any, target: Assign | None
    ) -> None:
        before: list[Any] = []
        if flatten(old, before) == tree:
            known = enumerate(zip(leaves, before, strict=True))
            new = [(at, leaf, real) for at, (leaf, real) in known if not self._unchanged(leaf, real)]
            places = list(leaf_paths(tree, path)) if new else []
            moved = [(places[at], self._in_trace(leaf), real) for at, leaf, real in new]
            fit = all(is_fake(leaf) and _is_real(real) and fits(leaf, real) for _, leaf, real in moved)
            if not moved or (fit and not self.share_memory({place: real for place, _, real in moved})):
                own = _places_in(path, tree, value, before, target, {id(real) for _, _, real in moved})
                self.state_outputs += [
                    StateOutput(leaf, Copy(real), at, own.get(at)) for at, leaf, real in moved
                ]
                self._note_carried(path, value)
                return
        if target is None or not all(map(_is_leaf, leaves)):
            return  # lost: a list that grew in place, or what has no form
        made = [index for index, leaf in enumerate(leaves) if is_fake(leaf)]
        shared, places = list(leaves), list(leaf_paths(tree, path))
        for index in made:
            part = Part(target.container, target.key, tree, shared, index, index == made[-1])
            self.state_outputs.append(StateOutput(leaves[index], part, places[index]))
        self._note_carried(path, value)

    def _note_carried(self, path: str, value: Any) -> None:
        self.carried.add(path)
        self._done.update(map(id, containers_in(value)))

    def _in_trace(self, leaf: Any) -> Any:
        """What stands for a tensor from outside in the trace; anything else as it is."""
        return self.inputs.fake(leaf) if _is_real(leaf) else leaf

    def not_carried(self, reads: Reads) -> set[int]:
        """The ids of lists, deques and dicts in attributes whose content after the step nothing writes back yet."""
        found = {
            id(item)
            for _, owner, _ in self.attributes.objects(reads)
            for name, value in self.attributes.public(owner).items()
            if name not in OF_MODULES
            for item in containers_in(value)
        }
        return found - self._done


def was_there(value: Any, known: Set[int]) -> bool:
    """True for a container or an object that is older than the step, whose ids of containers are `known`."""
    attributes = real_attributes_of(value)
    return id(value if attributes is None else attributes) in known


def _places_in(
    path: str, tree: Tree, values: Any, before: Sequence[Any], target: Assign | None, moved: Collection[int]
) -> dict[str, OwnPlace]:
    """Where the tensors that a step replaces are, by their paths: in a value that is new, or in one that stays."""
    if not moved:
        return {}
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


def _is_real(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and not is_fake(leaf)


def _is_leaf(leaf: Any) -> bool:
    return is_plain(leaf) or isinstance(leaf, torch.Tensor)
