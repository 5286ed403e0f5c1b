"""Fakes: the fake tensors and symbolic numbers that take the place of state and arguments during a trace."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from monograph.capture.numbers.layouts import ArgumentForm, argument_form
from monograph.capture.numbers.moving import Moving, is_moving, plain
from monograph.capture.numbers.sizes import size_number
from monograph.capture.tensors.sparse_parts import fake_of, known_parts
from monograph.compat.distributed.tensors import awaited_part, is_sharded, local_of, with_local
from monograph.compat.fakes import bind_fake, is_fake, make_fake
from monograph.compat.modules import hand_attributes_on, mark_parameter
from monograph.compat.tensors import is_transformed, planned_device, planned_form
from monograph.errors import CaptureError
from monograph.ir.call.refusals import without_history
from monograph.ir.call.signature import Call, Spec, TensorKey
from monograph.ir.call.sparse import PARTS, form_of, is_sparse
from monograph.ir.graph_signature import Argument, ArgumentChanges, Fixed, Number, Source
from monograph.ir.meta import size_in
from monograph.ir.port import Role
from monograph.sizes.place import SizePlace
from monograph.sizes.size import Size, varies
from monograph.state.find import Slot, check_tensor


@dataclass
class Input:
    """One input of the program in the making: its fake, role, path, and where the real value is."""

    fake: Any
    role: Role
    path: str
    source: Source
    whole: tuple[Any, Any] | None = None  # of a part of a DTensor that, and what stands for it
    part: Any = None  # the DTensor of what this process updates of a parameter that is whole
    sums_whole: bool = False  # gradients of micro-batches, before each process gets its part: ZeRO 1

    @property
    def real(self) -> Any:
        """The object that a fixed input is, None for arguments and numbers."""
        return self.source.value if isinstance(self.source, Fixed) else None

    @property
    def owner(self) -> Any:
        """The tensor that the user has: the DTensor of a part, or what the input is."""
        return self.real if self.whole is None else self.whole[0]

    @property
    def shown(self) -> Any:
        """What build() finds in the place of that."""
        return self.fake if self.whole is None else self.whole[1]


@dataclass
class Inputs:
    """The inputs of the program in the making, in order."""

    mode: Any
    with_values: bool = False  # fakes carry data, for ops without fake kernels
    still: Collection[str] = ()  # the paths of numbers that build() gets as they are: each value has a build
    items: list[Input] = field(default_factory=list)
    symbols: dict[str, int] = field(default_factory=dict)  # name of a number → its position
    by_real: dict[int, torch.Tensor] = field(default_factory=dict)  # id of a real tensor → its fake
    by_fake: dict[int, Input] = field(default_factory=dict)
    forms: dict[int, ArgumentForm] = field(default_factory=dict)  # of arguments, by id of the fake
    asked_for_gradient: set[int] = field(default_factory=set)  # arguments whose gradient build() reads
    without_gradient: set[int] = field(default_factory=set)  # parameters that have none, by id of the fake
    asked_for_gradient_of_free: set[int] = field(default_factory=set)  # by id of the fake
    met: dict[int, torch.Tensor] = field(default_factory=dict)  # arguments that build() found elsewhere too
    compared: dict[int, torch.Tensor] = field(default_factory=dict)  # what arguments were compared with
    read_out: dict[str, torch.Tensor] = field(default_factory=dict)  # by the name of the number
    sparse: dict[str, torch.Tensor] = field(default_factory=dict)  # by path those whose parts are inputs
    without_data: bool = False  # state is on the device meta, or the arguments where there is no state
    free: dict[int, torch.Tensor] = field(default_factory=dict)  # free tensors, by id of the fake
    mended: dict[Any, str] = field(
        default_factory=dict
    )  # ops whose fake kernel reported a wrong shape, and which

    def __post_init__(self) -> None:
        self.moving = Moving(self.mode)

    @property
    def fakes(self) -> list[Any]:
        """The fakes in order, as the trace takes them."""
        return [item.fake for item in self.items]

    @property
    def roles(self) -> list[Role]:
        """The roles in order."""
        return [item.role for item in self.items]

    def changes(self) -> ArgumentChanges:
        """What build() has changed in the tensors among its arguments besides their values.

        Raises CaptureError for a form that the caller's tensor cannot be given.
        """
        resized, requires_grad = [], []
        for item in self.items:
            if (before := self.forms.get(id(item.fake))) is None:
                continue
            assert isinstance(item.source, Argument)
            self.check_form(item.fake, "")
            if (now := argument_form(item.fake)).shape != before.shape:
                if varies(now.shape):
                    raise CaptureError(f"build() gives argument {item.path} a size that varies")
                resized.append((item.source.index, now.shape))
            if item.fake.is_leaf and now.requires_grad != before.requires_grad:
                requires_grad.append((item.source.index, now.requires_grad))
        return ArgumentChanges(requires_grad=tuple(requires_grad), resized=tuple(resized))

    def check_form(self, fake: Any, by: str) -> None:
        """Raise CaptureError if an argument has got another form, but for an empty one that was given a size."""
        before = self.forms.get(id(fake))
        if before is None or (now := argument_form(fake)).lies_as(before):
            return
        empty = 0 in before.shape and before.dtype is now.dtype and fake.is_contiguous() and not now.offset
        if not empty or before.requires_grad:
            form = f"{before.shape} {before.dtype}".replace("torch.", "")
            raise CaptureError(
                f"build() changes what argument {self.by_fake[id(fake)].path} is{by}: it is a tensor {form}",
                hint="give it the right form before the call, or return a new tensor; copy_() changes what it holds",
            )

    def numbers(self) -> list[frozenset[str]]:
        """The paths of the numbers that move: those of arguments, and all, if there are others."""
        moving = {item.path: item.role for item in self.items if is_moving(item.fake)}
        ours = frozenset(path for path, role in moving.items() if role is Role.USER)
        return [paths for paths in dict.fromkeys([ours, frozenset(moving)]) if paths]

    def add(self, fake: Any, role: Role, path: str, source: Source) -> None:
        """Append an input."""
        item = Input(fake, role, path, source)
        self.by_fake[id(fake)] = item
        self.items.append(item)

    def add_state(self, slot: Slot) -> None:
        """A state tensor; one that is tied to an earlier slot has its fake already."""
        real = slot.tensor
        self.without_data |= real.is_meta
        if is_sharded(real):
            self._add_shard(slot.role, slot.path, real)
        elif is_sparse(real):
            self._add_parts(slot.role, slot.path, real)
        elif id(real) not in self.by_real:
            counter = slot.role is Role.OPTIM and real.numel() == 1 and real.is_floating_point()
            self.add(self._fake(real, with_value=counter), slot.role, slot.path, Fixed(real))

    def _fake(self, real: torch.Tensor, *, with_value: bool = False) -> torch.Tensor:
        with_value |= self.with_values
        make = partial(make_fake, self.mode, with_value=with_value, planned=self.without_data)
        fake = make(real) if real.is_leaf else without_history(real, make)
        if isinstance(real, nn.Parameter):
            mark_parameter(fake)
        hand_attributes_on(real, fake)
        bind_fake(fake, real)
        self.by_real[id(real)] = fake
        return fake

    def _add_shard(self, role: Role, path: str, real: Any) -> None:
        """The part of a DTensor that this process has is an input; a DTensor around its fake is what the step sees."""
        if id(real) in self.by_real:
            return
        self.add(self._fake(local := awaited_part(real)), role, path, Fixed(local))
        self.by_real[id(real)] = shown = self.show_around(real)
        if isinstance(real, nn.Parameter):
            mark_parameter(shown)
        hand_attributes_on(real, shown)

    def show_part(self, item: Input, part: Any, *, sums_whole: bool) -> None:
        """Let the step see a DTensor of what this process updates in the place of a parameter that is an input."""
        item.part, item.sums_whole, real = part, sums_whole, item.real
        fake = planned_form(self.mode, local_of(part))
        shown = with_local(part, fake, requires_grad=real.requires_grad)
        item.whole = (real, shown)
        mark_parameter(shown)
        hand_attributes_on(real, shown)
        self.by_real[id(real)], self.by_fake[id(shown)] = shown, item

    def port(self, real: torch.Tensor) -> Any:
        """The input that a tensor of state is: its own, or that of its part."""
        return self.by_fake[id(self.fake(real))].fake

    def parts(self) -> list[Input]:
        """The parameters that are whole, and of which this process updates a part."""
        return [item for item in self.items if item.part is not None]

    def show_around(self, real: Any) -> Any:
        """What the step sees in place of a DTensor: one around the fake of the last input."""
        item = self.items[-1]
        shown = with_local(real, item.fake)
        item.whole = (real, shown)
        self.by_fake[id(shown)] = item
        return shown

    def _add_parts(self, role: Role, path: str, real: torch.Tensor) -> None:
        """The parts of a sparse tensor of state are inputs; its fake is made of theirs."""
        if id(real) in self.by_real:
            return
        parts = known_parts(real)
        new = [
            item for item in zip(PARTS[real.layout], parts, strict=True) if id(item[1]) not in self.by_real
        ]
        for name, part in new:
            self.add(self._fake(part), role, f"{path}.{name}()", Fixed(part))
        self._join(path, real, parts)

    def _join(self, path: str, real: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
        fakes = [self.by_real[id(part)] for part in parts]
        self.by_real[id(real)] = fake = fake_of(self.mode, form_of(real), fakes)
        bind_fake(fake, real)
        self.sparse[path] = real

    def add_number(self, number: Number, role: Role, path: str) -> Any:
        """A number that Python reads before each step; gives its symbol."""
        value = number.read()
        return self._add_symbol(value if role is Role.OPTIM else float(value), role, path, number)

    def _add_symbol(self, value: float, role: Role, path: str, source: Source) -> Any:
        number = self.moving.leaf(f"number_{len(self.items)}", value, finite=role is not Role.OPTIM)
        self.symbols[number.node.name] = len(self.items)
        self.add(number, role, path, source)
        return plain(number) if path in self.still else number

    def add_arguments(self, call: Call) -> list[Any]:
        """The arguments of a call; gives the leaves that build() sees."""
        leaves: list[Any] = []
        if not self.by_real:
            self.without_data = any(
                isinstance(key, TensorKey) and key.device.type == "meta" for key in call.keys
            )
        for index, (leaf, path) in enumerate(zip(call.leaves, call.paths(), strict=True)):
            if call.keys[index] is int or (type(leaf) is float and math.isfinite(leaf)):
                leaves.append(self._add_symbol(leaf, Role.USER, path, Argument(index)))
            elif isinstance(leaf, torch.Tensor):
                if id(leaf) not in self.by_real:
                    form = _form(call, index)
                    fake = self._varying_fake(leaf, form) if varies(form.shape) else self._fake(leaf)
                    self._add_argument(fake, path, index)
                leaves.append(self.by_real[id(leaf)])
            elif isinstance(leaf, Spec):
                fake = self._fake_of_key(_form(call, index))
                self._add_argument(fake, path, index)
                leaves.append(fake)
            else:
                leaves.append(leaf)
        return leaves

    def _fake_of_key(self, key: TensorKey) -> torch.Tensor:
        """A fake of this form; sizes with names vary."""
        shape, stride = (
            [size_number(self.moving, size) for size in sizes] for sizes in (key.shape, key.stride)
        )
        device = planned_device(key.device) if self.without_data else key.device
        with self.mode:
            return torch.empty_strided(shape, stride, dtype=key.dtype, device=device)

    def _varying_fake(self, real: torch.Tensor, key: TensorKey) -> torch.Tensor:
        """The fake of an argument with sizes that vary."""
        fake = self._fake_of_key(key)
        bind_fake(fake, real)
        self.by_real[id(real)] = fake
        return fake

    def sizes(self, call: Call | None = None) -> dict[str, SizePlace]:
        """Where the sizes that vary are in the arguments of the whole call, of which build() sees a part if it is given."""
        found: dict[str, SizePlace] = {}
        for position, item in enumerate(self.items):
            if isinstance(item.fake, torch.Tensor) and isinstance(item.source, Argument):
                for dim, size in enumerate(map(size_in, item.fake.shape)):
                    if isinstance(size, Size):
                        parts = 1 if call is None else call.num_parts(item.source.index, dim)
                        found.setdefault(str(size), SizePlace(position, dim, parts))
        return found

    def _add_argument(self, fake: torch.Tensor, path: str, index: int) -> None:
        self.add(fake, Role.USER, path, Argument(index))
        self.forms[id(fake)] = argument_form(fake)

    def fake(self, item: Any) -> Any:
        """What stands for a real tensor; a tensor seen for the first time is a free one and is lifted."""
        if not isinstance(item, torch.Tensor) or is_fake(item) or is_transformed(item):
            return item
        if id(item) not in self.by_real:
            check_tensor(item, "a tensor used in build()")
            if is_sharded(item):
                part = self.fake(awaited_part(item))
                return self.by_real.setdefault(id(item), with_local(item, part))
            if is_sparse(item):
                parts = known_parts(item)
                for part in parts:
                    self.fake(part)
                self._join(f"a sparse tensor that build() uses, {len(self.sparse)}", item, parts)
                return self.by_real[id(item)]
            self.free[id(self._fake(item))] = item
        found = self.by_real[id(item)]
        source = self.by_fake[id(found)].source if id(found) in self.by_fake else None
        if isinstance(source, Argument):
            self.met[source.index] = item
        return found

    def swap_in(self, item: Any) -> Any:
        """`item` with every real tensor in nested lists, tuples and dicts replaced by its fake."""
        if isinstance(item, torch.Tensor):
            return self.fake(item)
        kind = type(item)
        if kind is list or kind is tuple:
            return kind([self.swap_in(entry) for entry in item])
        if kind is dict:
            return {key: self.swap_in(entry) for key, entry in item.items()}
        return item

    def gradient_of_free(self, fake: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient that code reads: of a free tensor at first the one that it had before the step."""
        real = self.free.get(id(fake))
        if real is None or id(fake) in self.asked_for_gradient_of_free:
            return gradient
        self.asked_for_gradient_of_free.add(id(fake))
        if gradient is None and real.is_leaf and real.grad is not None:
            fake.grad = gradient = self.fake(real.grad)
        return gradient

    def note_comparison(self, fake: torch.Tensor, real: torch.Tensor) -> None:
        """Code of the step compares a fake with a real tensor by `is`: which argument this one is counts."""
        item = self.by_fake.get(id(fake))
        if item is not None and isinstance(item.source, Argument):
            self.compared[id(real)] = real

    def real_of(self, fake: object) -> torch.Tensor | None:
        """The state or free tensor of a fake; None for arguments and for values of the trace."""
        item = self.by_fake.get(id(fake))
        return item.owner if item is not None else self.free.get(id(fake))

    def tensors(self) -> dict[str, torch.Tensor]:
        """The state tensors by path."""
        return {item.path: item.real for item in self.items if isinstance(item.real, torch.Tensor)}


def _form(call: Call, index: int) -> TensorKey:
    key = call.keys[index]
    assert isinstance(key, TensorKey)
    return key
