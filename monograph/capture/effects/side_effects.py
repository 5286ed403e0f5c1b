"""What a traced step does besides computing what it returns, collected in the order in which one may hide another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from monograph.capture.effects.arguments import NewContent
from monograph.capture.effects.attribute_tensors import AttributeTensors
from monograph.capture.effects.attribute_values import AttributeValues, PutAgain
from monograph.capture.effects.attributes import Attributes
from monograph.capture.effects.foreign_objects import Effect
from monograph.capture.effects.gradients import gradients_left
from monograph.capture.effects.module_state import ModuleState
from monograph.capture.effects.results import Results
from monograph.capture.effects.state_outputs import StateOutput, take_own_memory
from monograph.capture.effects.structure import ModuleHooks, removed_attributes, submodule_effects
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.sources.overlay import Overlay, real_attributes_of
from monograph.capture.guards.sources.reads import Reads
from monograph.capture.guards.sources.same_objects import RealObjects
from monograph.capture.tensors.fakes import Inputs
from monograph.errors import CaptureError
from monograph.ir.call.tree import LEAF, Tree
from monograph.ir.graph_signature import Assign, Part, Refill, Result, Write
from monograph.ir.port import Role
from monograph.state.find import Slot


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
    hooks: list[Effect] = field(default_factory=list)  # that it leaves on modules
    structure: list[Effect] = field(default_factory=list)  # submodules and attributes that come and go
    gone: list[OwnPlace] = field(
        default_factory=list
    )  # where another thread has put something else meanwhile

    def __post_init__(self) -> None:
        self.attributes = Attributes(self.overlay, self.modules, self.private)
        self.tensors = AttributeTensors(self.attributes, self.inputs, self.state_outputs)
        carried = self.tensors.carried
        self.values = AttributeValues(self.attributes, self.may_read_dict, self.loaded, carried)
        self.module_state = ModuleState(self.inputs, self.overlay, self.slots)
        self.module_hooks = ModuleHooks(self.overlay, self.modules)

    def collect_structure(self, reads: Reads) -> None:
        """Submodules that build() replaces, and attributes that it takes away."""
        objects = list(self.attributes.objects(reads))
        modules = [(path, owner) for path, owner, _ in objects if isinstance(owner, nn.Module)]
        self.structure += submodule_effects(modules, self.overlay, reads.made)
        for path, owner, before in objects:
            if id(owner) not in reads.made:
                self.structure += removed_attributes(path, owner, self.attributes.seen(owner), before)

    def collect_tensor_attributes(self, stored: Collection[str]) -> None:
        """What build() has put into Python attributes of state, under the names that code stores to."""
        self.structure += self.tensors.collect_of_tensors(stored)

    def collect_modules(self) -> None:
        """Hooks that build() left on modules, buffers and attributes that it re-assigned, tensors in new attributes."""
        self.hooks += self.module_hooks.left()
        self.module_state.collect(self.modules, self.state_outputs)

    def collect_results(
        self, returned: Any, changed: Sequence[NewContent], given: Sequence[Any]
    ) -> list[Any]:
        """Classify what build() returned and what it left in its arguments; gives the values that the program must compute.

        To be called when all new state is collected. `given` are the leaves of the arguments.
        """
        results = Results(self.inputs, self.state_outputs)
        self.results, self.result_tree = results.returned(returned)
        self.refills = results.left_in_arguments(changed, given)
        return results.outputs

    def collect_gradients(self) -> None:
        """Gradients that stay: of parameters if they are kept, of arguments always, as eager leaves them."""
        found = gradients_left(self.inputs, self.without_gradient, keep_gradients=self.keep_gradients)
        self.state_outputs.extend(found)

    def own_memory(self) -> list[tuple[OwnPlace, Any]]:
        """Places whose tensors the step replaces, with copies for them that nobody else has."""
        found, self.gone = take_own_memory(self.state_outputs, self.inputs, self.own)
        return found

    def check_micro_batches_alike(self, reads: Reads) -> None:
        """Raise CaptureError for an attribute that a later micro-batch finds otherwise than the first."""
        targets = [state_output.target for state_output in self.state_outputs]
        begun = {(id(item.container), item.key) for item in targets if isinstance(item, (Assign, Part))}
        found = [write.about for write in self.moving_writes(reads)]
        found += [
            f"{path}.{name}"
            for path, owner, _ in self.attributes.objects(reads)
            for name in self.attributes.seen(owner)
            if (id(real_attributes_of(owner)), name) in begun and reads.was_asked_for(owner, name)
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

    # --- what its parts collect ------------------------------------------------------------------------------------

    def places(self) -> dict[tuple[int, str], torch.Tensor]:
        """The state tensors of modules before the step, by the id of the dict where each is and its name there."""
        return self.module_state.places()

    @property
    def handles(self) -> list[Any]:
        """Weak references to the handles of hooks that build() registers."""
        return self.module_hooks.handles

    @property
    def carried(self) -> set[str]:
        """Lists, tuples and dicts whose tensors are written back."""
        return self.tensors.carried

    def keep_parameters(self, reads: Reads, real: RealObjects) -> None:
        """A parameter that build() puts into an attribute is the parameter itself."""
        self.tensors.keep_parameters(reads, real)

    def collect_objects(self, reads: Reads) -> None:
        """Tensors that build() put into attributes of objects besides the held modules."""
        self.tensors.collect_of_objects(reads)

    def collect_containers(self, reads: Reads, contents: Mapping[int, Any]) -> None:
        """Tensors that build() put into lists, tuples and dicts. `contents` has what these held before, by their id."""
        self.tensors.collect_containers(reads, contents)

    def not_carried(self, reads: Reads) -> set[int]:
        """The ids of lists, deques and dicts in attributes whose content after the step nothing writes back yet."""
        return self.tensors.not_carried(reads)

    def share_memory(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """True if some of these tensors share memory, with each other or with state."""
        return self.tensors.share_memory(tensors)

    def plain_writes(self, reads: Reads) -> list[tuple[dict[str, Any], str, Any]]:
        """Attributes that build() set to plain values without reading them before: they are kept."""
        return self.values.kept(reads)

    def moving_writes(self, reads: Reads) -> list[Write]:
        """Attributes that build() read and then set to another plain value: the next step begins with that one."""
        return self.values.moving(reads)

    def put_again(self, reads: Reads) -> PutAgain:
        """Attributes that build() set before it asked for them: somebody may change them between two steps."""
        return self.values.put_again(reads)

    def made_lazily(self, reads: Reads) -> list[Write]:
        """Attributes that build() may have missed, and made: objects of Python, which only this one step makes."""
        return self.values.made_lazily(reads)

    def exchanged(self, reads: Reads) -> tuple[list[Write], list[Write]]:
        """Objects of Python that build() put where it may have read another one; and those that it only put there."""
        return self.values.exchanged(reads)

    def changed_numbers(self, reads: Reads) -> Iterator[tuple[str, Any, str]]:
        """Attributes that build() read as a number and set to another one."""
        return self.values.changed_numbers(reads)

    def new_numbers(self, reads: Reads) -> Iterator[tuple[Any, str, str, Any]]:
        """Attributes that got a number which moves."""
        return self.values.new_numbers(reads)

    def lost_writes(self, reads: Reads) -> list[str]:
        """Attributes that build() only sets, to what no replay can set again."""
        return self.values.lost(reads)
