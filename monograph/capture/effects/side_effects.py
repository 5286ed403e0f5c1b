"""What a traced step does besides computing what it returns, collected in the order in which one may hide another."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from monograph.capture.effects.arguments import NewContent
from monograph.capture.effects.attribute_tensors import AttributeTensors
from monograph.capture.effects.attribute_values import AttributeValues
from monograph.capture.effects.attributes import Attributes
from monograph.capture.effects.foreign_objects import BY_HAND, Effect, not_alike
from monograph.capture.effects.gradients import gradients_left
from monograph.capture.effects.identities import keep_identities, written_in_trace
from monograph.capture.effects.module_state import ModuleState
from monograph.capture.effects.results import Results
from monograph.capture.effects.state_outputs import StateOutput, take_own_memory
from monograph.capture.effects.structure import ModuleHooks, removed_attributes, submodule_effects
from monograph.capture.guards.own_places import OwnPlace
from monograph.capture.guards.sources.overlay import Overlay, real_attributes_of
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import Reads
from monograph.capture.tensors.fakes import Inputs
from monograph.distributed.replicas import SYNCS_NEXT
from monograph.ir.call.tree import LEAF, Tree
from monograph.ir.graph_signature import Assign, Part, Refill, Result
from monograph.ir.port import Role
from monograph.state.find import Slot


@dataclass
class SideEffects:
    """Collects outputs of a trace. Slots must be the places of module state before the trace, as the trace sees them.

    What its parts collect is asked of them: `tensors` and `values` in attributes, `module_state`, `module_hooks`.
    """

    inputs: Inputs
    modules: Mapping[str, nn.Module]
    slots: Sequence[Slot]
    keep_gradients: bool
    reach: Reach  # of the code that ran
    overlay: Overlay
    own: Collection[torch.Tensor] = ()  # tensors that nobody but the graph has
    # the graph, and its attributes that are no step's business
    private: tuple[Any, Collection[str]] = (None, ())
    state_outputs: list[StateOutput] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    refills: list[Refill] = field(default_factory=list)  # of containers among the arguments
    result_tree: Tree = LEAF
    without_gradient: list[str] = field(default_factory=list)
    hooks: list[Effect] = field(default_factory=list)  # that it leaves on modules
    structure: list[Effect] = field(default_factory=list)  # submodules and attributes that come and go
    kept: list[OwnPlace] = field(
        default_factory=list
    )  # places where each step puts the tensors of eager mode
    known_elsewhere: set[int] = field(default_factory=set)  # ids of tensors that it leaves in other objects
    # where another thread has put something else meanwhile
    gone: list[OwnPlace] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.attributes = Attributes(self.overlay, self.modules, self.private)
        self.tensors = AttributeTensors(self.attributes, self.inputs, self.state_outputs)
        carried = self.tensors.carried
        self.values = AttributeValues(self.attributes, self.reach, carried)
        self.module_state = ModuleState(self.inputs, self.overlay, self.slots, self.reach.line_of)
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
        is_written = written_in_trace()
        self.kept += keep_identities(self.state_outputs, self.inputs, is_written, self.known_elsewhere)
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
        # a wrapper's buffers are taken over once
        numbers = [write for write in self.values.moving(reads) if write.key != SYNCS_NEXT]
        found = [write.about for write in numbers]
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
            is_number = bool(numbers) and type(numbers[0].value) in (int, float, complex)
            of_one_shape = (
                "let it be a tensor of one shape from the start (register_buffer), or run the model once "
                "before the first step, where that gives it its last value"
            )
            raise not_alike(found[0], BY_HAND if is_number else of_one_shape)
