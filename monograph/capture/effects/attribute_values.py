"""Plain values and objects of Python that build() puts into attributes: kept, put there again by each step, or refused."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from monograph.capture.effects.attributes import NOTHING, Attributes, Changed, table_of
from monograph.capture.effects.held_fakes import holds_fakes, holds_numbers_alone, not_repeatable
from monograph.capture.guards.sources.overlay import real_attributes_of
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.reads import MISSING, Reads
from monograph.capture.guards.sources.values import is_plain, same
from monograph.capture.numbers.moving import is_moving, kind_of
from monograph.compat.fakes import is_fake
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.errors import CaptureError
from monograph.ir.graph_signature import Write


@dataclass(frozen=True)
class PutAgain:
    """What each step leaves in dicts of attributes, by name, whatever it finds. Mostly it is there already."""

    places: Sequence[tuple[dict[str, Any], str, Any]]

    def apply(self) -> None:
        """As after the step."""
        for table, name, value in self.places:
            if table.get(name, NOTHING) is not value:
                table[name] = value


@dataclass
class AttributeValues:
    """Says of each new value of an attribute what a replay does with it."""

    attributes: Attributes
    reach: Reach  # of the code that ran
    carried: Collection[str]  # the paths of those whose tensors are written back

    # --- plain values ----------------------------------------------------------------------------------------------

    def kept(self, reads: Reads) -> list[tuple[dict[str, Any], str, Any]]:
        """Attributes that build() set to plain values without reading them before: they are kept."""
        for change in self.attributes.changed(reads):
            if change.path not in self.carried and _holds_ints(change.value):
                # a build for the present sizes and numbers can do that
                raise not_repeatable(change.path, self.reach.line_of(change.path))
        return [
            (table_of(change.owner), change.name, change.value)
            for change in self._plain(reads)
            if not self._changes_what_it_read(reads, change)
        ]

    def moving(self, reads: Reads) -> list[Write]:
        """Attributes that build() read and then set to another plain value: the next step begins with that one."""
        return [
            Write(
                table_of(change.owner),
                change.name,
                change.value,
                f"{change.path} ({_before(reads, change.owner, change.name)!r} to {change.value!r})",
            )
            for change in self._plain(reads)
            if self._changes_what_it_read(reads, change)
        ]

    def put_again(self, reads: Reads, moving: Iterable[Write]) -> PutAgain:
        """Attributes that build() set before it asked for them: somebody may change them between two steps.

        `moving` are numbers that each step writes anew; their places show again what was there before.
        """
        written = {(id(write.container), write.key) for write in moving}
        found = [
            (table_of(owner), name, value)
            for _, owner, _ in self.attributes.objects(reads)
            for name, value in self.attributes.public(owner).items()
            if reads.was_written_first(owner, name) and reads.is_in_instance(owner, name)
            if is_plain(value) and not holds_fakes(value) and (id(table_of(owner)), name) not in written
        ]
        _, others = self._exchanged(reads)
        return PutAgain([*found, *((write.container, write.key, write.value) for write in others)])

    def _plain(self, reads: Reads) -> Iterator[Changed]:
        return (
            change
            for change in self.attributes.changed(reads)
            if is_plain(change.value) and not isinstance(change.old, torch.SymInt | torch.SymFloat)
        )

    def _changes_what_it_read(self, reads: Reads, change: Changed) -> bool:
        owner, name = change.owner, change.name
        if isinstance(change.old, torch.Tensor):
            return True  # state is guarded in each build
        if self.reach.may_read_dict(table_of(owner), name):
            return True
        if change.is_new and not reads.found_on_class(owner, name):
            return self._may_have_missed(reads, owner, name)
        return reads.was_read(owner, name) and not same(reads.value_read(owner, name), change.value)

    def _may_have_missed(self, reads: Reads, owner: Any, name: str) -> bool:
        """True if build() may have asked for an attribute that was not there, before it made it."""
        return name in self.reach.names and not reads.was_written_first(owner, name)

    # --- numbers that move -----------------------------------------------------------------------------------------

    def changed_numbers(self, reads: Reads) -> Iterator[tuple[str, Any, str]]:
        """Attributes that build() read as a number and set to another one: what they are called, object and name."""
        for change in self.attributes.changed(reads):
            owner, name, value = change.owner, change.name, change.value
            table = real_attributes_of(owner)
            if table is None or type(change.old) not in (int, float):
                continue
            moved = is_moving(value) or (type(value) in (int, float) and not same(change.old, value))
            if moved and (self.reach.may_read_dict(table, name) or reads.was_read(owner, name)):
                yield change.path, owner, name

    def new_numbers(self, reads: Reads) -> Iterator[tuple[Any, str, str, Any]]:
        """Attributes that got a number which moves."""
        for change in self.attributes.changed(reads):
            if is_moving(change.value):
                yield real_attributes_of(change.owner), change.name, change.path, change.value

    def only_put(self, reads: Reads) -> Iterator[Changed]:
        """Attributes that build() set to a container or another object without asking for them, and that no others look after."""
        for change in self.attributes.changed(reads):
            owner, name = change.owner, change.name
            if (
                _is_object(change.value)
                and (id(owner), name) in reads.written
                and change.path not in self.carried
                and real_attributes_of(owner) is not None
                and not reads.was_asked_for(owner, name)
                and not self.reach.may_read_dict(table_of(owner), name)
            ):
                yield change

    # --- objects of Python -----------------------------------------------------------------------------------------

    def made_lazily(self, reads: Reads) -> list[Write]:
        """Attributes that build() may have missed, and made: objects of Python, which only this one step makes."""
        return [
            _write(change)
            for change in self._objects_put(reads)
            if change.is_new and self._may_have_missed(reads, change.owner, change.name)
        ]

    def exchanged(self, reads: Reads) -> list[Write]:
        """Objects of Python that build() put where it may have read another one."""
        read, _ = self._exchanged(reads)
        return read

    def _exchanged(self, reads: Reads) -> tuple[list[Write], list[Write]]:
        """The same, and those that it only put there."""
        read: list[Write] = []
        others: list[Write] = []
        for change in self._objects_put(reads):
            owner, name = change.owner, change.name
            if (id(owner), name) not in reads.written:
                continue
            if change.is_new and not self._may_have_missed(reads, owner, name):
                others.append(_write(change))
            elif not change.is_new:
                asked = reads.was_asked_for(owner, name) or self.reach.may_read_dict(table_of(owner), name)
                (read if asked else others).append(_write(change))
        return read, others

    def _objects_put(self, reads: Reads) -> Iterator[Changed]:
        """Objects of Python that build() has put into attributes, and that hold nothing of the trace."""
        for change in self.attributes.changed(reads):
            if (
                _is_object(change.value)
                and change.path not in self.carried
                and not (change.name.startswith("_") and not change.is_new and _is_torchs_layer(change.owner))
                and not holds_fakes(change.value)
            ):
                yield change

    def check_put(self, reads: Reads, *, in_parts: bool = False) -> None:
        """Raise CaptureError for an attribute that build() sets to what no replay can make.

        That are objects that hold tensors of the step, and numbers where micro-batches have one each (`in_parts`).
        """
        for change in self.attributes.changed(reads):
            owner, name, value = change.owner, change.name, change.value
            if (
                (id(owner), name) not in reads.written
                or not _is_object(value)
                or change.path in self.carried
                or (name.startswith("_") and _is_torchs_layer(owner))
            ):
                continue
            if is_symbolic(value) and reads.was_read(owner, name):
                raise CaptureError(
                    f"build() goes on from {change.path}, and sets it to a number that it reads out of a tensor of the step",
                    where=self.reach.line_of(change.path),
                    hint="hold it in a buffer of a module, and add the tensor: buffer.add_(loss.detach())",
                )
            if holds_fakes(value) or is_symbolic(value):
                of_numbers = holds_numbers_alone(value)
                where = self.reach.line_of(change.path)
                raise not_repeatable(change.path, where, of_numbers=of_numbers, in_parts=in_parts)


def _write(change: Changed) -> Write:
    return Write(table_of(change.owner), change.name, change.value, change.path)


def _before(reads: Reads, owner: Any, name: str) -> Any:
    known = reads.value_read(owner, name)
    return None if known is MISSING else known


def _is_object(value: Any) -> bool:
    is_tensor = issubclass(type(value), torch.Tensor)
    tensor = is_tensor and (is_fake(value) or not isinstance(value, nn.Parameter))
    return not is_plain(value) and not tensor and not is_moving(value)


def _is_torchs_layer(owner: Any) -> bool:
    """True for layers that keep books of their own, such as the list of weights of an LSTM."""
    layers = [cls for cls in type(owner).__mro__ if cls.__module__.startswith("torch.nn.modules.")]
    return any(cls is not nn.Module for cls in layers)


def _holds_ints(value: Any) -> bool:
    """True for a container that has sizes that vary, or other whole numbers that move."""
    if type(value) in (tuple, list, torch.Size):
        return any((is_moving(item) and kind_of(item) is int) or _holds_ints(item) for item in value)
    return type(value) is dict and _holds_ints(list(value.values()))
