"""The way back from an artifact's JSON to programs that are bound to its state. Makes values only; runs nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import fx

from monograph.artifact.bounds.describe import check_bytes, check_values
from monograph.artifact.programs.conditions import Branches, branches_from_json
from monograph.artifact.programs.serialize import PROGRAM_KEYS, program_from_json
from monograph.artifact.programs.shapes import check_shapes
from monograph.artifact.schema.signatures import Signature
from monograph.artifact.schema.tree import ValueForm
from monograph.artifact.state.averages import StoredAverage
from monograph.checkpoint.bytes import MAX_DIMS
from monograph.checkpoint.errors import Damaged
from monograph.checkpoint.leaves import LEAVES_FROM_JSON, Json, check, list_of, typed
from monograph.errors import PassError
from monograph.ir.graph_signature import (
    Argument,
    Assign,
    BoundProgram,
    Copy,
    CopyToArgument,
    Fixed,
    Gradient,
    LiveView,
    Number,
    Result,
    Source,
    Target,
)
from monograph.ir.meta import ScalarMeta, TensorMeta, form, output_nodes, plain, tensor_meta, value
from monograph.ir.port import Role
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.layout import MAX_NUMBER
from monograph.state.random import restore_generators

_BESIDES: Final = ("sources", "targets", "returns", "conditions", "steps")


@dataclass(frozen=True)
class Unpacked:
    """A program that can be made runnable."""

    signature: Signature
    bound: BoundProgram
    branches: Branches
    steps: Mapping[str, int]


@dataclass(frozen=True)
class Environment:
    """What the programs of one signature find outside: its state, and what Python moves."""

    state: Mapping[str, Any]
    averages: Mapping[str, StoredAverage]
    # on devices, by the address of the one on the host
    storages: dict[Any, torch.UntypedStorage] = field(default_factory=dict)


def unpack(
    stored: Json, signature: Signature, tensors: Mapping[str, Any], environment: Environment, *, trust: bool
) -> Unpacked:
    """A stored program bound to its state. `Damaged` for whatever does not fit together."""
    check(
        type(stored) is dict and tuple(stored) == PROGRAM_KEYS + _BESIDES,
        "a program has unknown or missing keys",
    )
    program = program_from_json({key: stored[key] for key in PROGRAM_KEYS}, trust=trust)
    reader = _Reader(program, signature, tensors, environment)
    sources = tuple(map(reader.source, list_of(stored["sources"], len(program.inputs))))
    sources = reader.checked(sources)
    _check_rules(program)
    places = list_of(stored["targets"], len(program.outputs) - reader.num_results)
    targets = tuple(reader.target(position, item) for position, item in enumerate(places) if item is not None)
    check(None not in places[: len(targets)], "an output after the results goes nowhere")
    returns = list_of(stored["returns"], len(signature.returned.leaves))
    results = tuple(map(reader.result, returns))
    bound = BoundProgram(program, sources, targets, (), results, signature.returned.tree)
    branches = branches_from_json(stored["conditions"], len(sources), trust=trust)
    return Unpacked(signature, bound, branches, _steps(stored["steps"], environment.state))


def check_readable(stored: Json) -> None:
    """`Damaged` for a program that could not be read again, even by who trusts it."""
    _check_rules(program_from_json({key: stored[key] for key in PROGRAM_KEYS}, trust=True))


def _check_rules(program: Program) -> None:
    check(len(output_nodes(program.graph)) == len(program.outputs), "a program has a wrong number of outputs")
    try:
        verify(program, after="it was loaded")
    except PassError as error:
        raise Damaged(error.message) from None
    if not check_shapes(program):
        check_values(program)
        return
    for node in program.ops():
        check_bytes(node)


def _steps(value: Json, state: Mapping[str, Any]) -> Mapping[str, int]:
    steps: dict[str, int] = typed(value, dict)
    fits = all(
        type(times) is int and 0 <= times < MAX_NUMBER and name in state for name, times in steps.items()
    )
    check(fits, "a program has a wrong number of steps")
    return steps


@dataclass(frozen=True)
class _Float(Number):
    """An integer that a program takes as a float: powers of integers might never end."""

    def read(self) -> float:
        """The present value."""
        return float(super().read())


@dataclass
class _Reader:
    """Reads the graph signature of one program."""

    program: Program
    signature: Signature
    tensors: Mapping[str, Any]
    environment: Environment

    def __post_init__(self) -> None:
        self.leaves = [leaf for item in self.signature.parameters for leaf in item.form.leaves]
        roles = [port.role for port in self.program.outputs]
        self.num_results = sum(role is Role.USER for role in roles)
        check(Role.USER not in roles[self.num_results :], "the results of a program do not come first")

    def source(self, value: Json) -> Source:
        """Where an input comes from."""
        tag, payload = _tagged(value)
        if tag == "state":
            return Fixed(self._tensor(payload))
        if tag == "generator":
            path, device = list_of(payload, 2)
            return Fixed(_generator(self._tensor(path), device))
        if tag == "argument":
            index = self._index(payload)
            check(not isinstance(self.leaves[index], ValueForm), "a program takes a constant argument")
            return Argument(index)
        check(tag == "number", f"an input comes from the unknown {tag!r}")
        place, key, index = list_of(payload, 3)
        number = Number(self._container(place), key, index)
        try:
            held = number.read()
        except (LookupError, TypeError, AssertionError):
            raise Damaged("a program reads a number that is not in the state") from None
        check(type(held) in (int, float), "a program reads a number that is none")
        return number

    def target(self, position: int, value: Json) -> Target:
        """Where an output after the results goes."""
        tag, payload = _tagged(value)
        node = output_nodes(self.program.graph)[self.num_results + position]
        made = form(node) if isinstance(node, fx.Node) else None
        if tag == "state":
            tensor = self._tensor(payload)
            fits = made is not None and (made.shape, made.dtype) == (tuple(tensor.shape), tensor.dtype)
            check(fits, f"a program would put {made} into {payload!r}")
            return Copy(tensor)
        if tag in ("argument", "gradient"):
            index = self._index(payload)
            leaf = self.leaves[index]
            fits = isinstance(leaf, TensorMeta) and made is not None and made.shape == leaf.shape
            check(fits, "a program would change an argument into another form")
            return CopyToArgument(index) if tag == "argument" else Gradient(None, index)
        check(tag == "place", f"an output goes to the unknown {tag!r}")
        place, key = list_of(payload, 2)
        container = self._container(place)
        check(
            isinstance(container, (dict, list)) and _has(container, key),
            "a program sets what is not in the state",
        )
        return Assign(container, key)

    def result(self, value: Json) -> Result:
        """A leaf of what a call returns."""
        tag, payload = _tagged(value)
        if tag == "output":
            check(
                type(payload) is int and 0 <= payload < self.num_results,
                "a program returns what it does not make",
            )
            return Result("output", payload)
        if tag == "argument":
            return Result("argument", self._index(payload))
        if tag == "state":
            return Result("fixed", value=self._tensor(payload))
        if tag == "view":
            return Result("output", live=self._view(payload))
        check(tag == "value", f"a program returns the unknown {tag!r}")
        if type(payload) is not dict:
            return Result("fixed", value=payload)
        leaf_tag, leaf = _tagged(payload)
        check(leaf_tag in LEAVES_FROM_JSON, "a program returns an unknown value")
        return Result("fixed", value=LEAVES_FROM_JSON[leaf_tag](leaf))

    def checked(self, sources: Sequence[Source]) -> tuple[Source, ...]:
        """The sources, which give what the program says of its inputs."""
        nodes = self.program.graph.find_nodes(op="placeholder")
        found: list[Source] = []
        for node, source, port in zip(nodes, sources, self.program.inputs, strict=True):
            if isinstance(source, Fixed) and isinstance(source.value, torch.Tensor):
                _place(source.value, value(node), self.environment.storages)
            given = self._described(source)
            if given == ScalarMeta("int") and value(node) == ScalarMeta("float"):
                assert isinstance(source, Number)
                found.append(_Float(source.container, source.key, source.index))  # a learning rate of 1
                continue
            shown = str if str(given) != str(value(node)) else repr
            check(
                given == value(node),
                f"{port.path} is {shown(given)}, and a program takes {shown(value(node))}",
            )
            found.append(source)
        return tuple(found)

    def _described(self, source: Source) -> Any:
        """What is known of an input without a call."""
        match source:
            case Fixed(torch.Tensor() as tensor):
                return tensor_meta(tensor.detach())
            case Fixed():
                return None
            case Argument(index):
                return plain(self.leaves[index])
        assert isinstance(source, Number)
        return ScalarMeta(type(source.read()).__name__)

    def _view(self, payload: Json) -> LiveView:
        whole, size, stride, distance = list_of(payload, 4)
        tag, which = _tagged(whole)
        check(tag in ("state", "argument"), "a result is a view of the unknown")
        target = Copy(self._tensor(which)) if tag == "state" else CopyToArgument(self._index(which))
        numbers = [*list_of(size), *list_of(stride, len(size)), distance]
        fits = len(size) <= MAX_DIMS and all(type(n) is int and 0 <= n < MAX_NUMBER for n in numbers)
        check(fits, "a result is a view of a wrong form")
        return LiveView(target, tuple(size), tuple(stride), distance)

    def _tensor(self, path: Json) -> torch.Tensor:
        tensor = self.tensors.get(path) if type(path) is str else None
        if not isinstance(tensor, torch.Tensor):
            raise Damaged(f"a program takes {str(path)[:100]!r}, which is not stored")
        return tensor

    def _index(self, payload: Json) -> int:
        check(type(payload) is int and 0 <= payload < len(self.leaves), "a program takes an unknown argument")
        index: int = payload
        return index

    def _container(self, place: Json) -> Any:
        if type(place) is dict:
            tag, path = _tagged(place)
            check(
                tag == "average" and path in self.environment.averages, "a program reads an unknown average"
            )
            return self.environment.averages[path]
        container: Any = self.environment.state
        for key in list_of(place):
            check(_has(container, key), "a program reads what is not in the state")
            container = container[key]
        return container


def _place(tensor: torch.Tensor, wanted: Any, storages: dict[Any, torch.UntypedStorage]) -> None:
    """Move a tensor of the state, which was read to the host, to the device of the programs; so that memory stays shared."""
    if (
        not isinstance(wanted, TensorMeta)
        or wanted.device.type in ("cpu", "meta")
        or tensor.layout != torch.strided
    ):
        return
    if tensor.device == wanted.device:
        return
    storage = tensor.untyped_storage()
    key = storage.data_ptr(), wanted.device
    try:
        with torch.no_grad():
            if key not in storages:
                storages[key] = storage.to(device=wanted.device)
            moved = torch.empty(0, dtype=tensor.dtype, device=wanted.device)
            tensor.data = moved.set_(storages[key], tensor.storage_offset(), tensor.shape, tensor.stride())
    except (RuntimeError, AssertionError) as error:
        raise Damaged(f"a program runs on {wanted.device}, which is not here: {error}") from None


def _has(container: Any, key: Any) -> bool:
    if isinstance(container, dict):
        return type(key) in (str, int) and key in container
    return isinstance(container, list) and type(key) is int and 0 <= key < len(container)


def _tagged(value: Json) -> tuple[str, Json]:
    check(type(value) is dict and len(value) == 1, "the graph signature of a program is not described")
    ((tag, payload),) = value.items()
    return tag, payload


def _generator(state: torch.Tensor, device: Json) -> torch.Generator:
    decode: Callable[[Json], torch.device] = LEAVES_FROM_JSON["device"]
    try:
        generator = torch.Generator(decode(device))
        restore_generators([generator], [state])
    except (RuntimeError, TypeError) as error:
        raise Damaged(f"the state of a generator is wrong: {error}") from None
    return generator
