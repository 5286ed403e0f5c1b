"""A training step as a graph, in one file: record, make pure, simplify, replay. It needs torch, and nothing else."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


# --- 1. a program ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Name:
    """Stands for a tensor in the arguments of an op."""

    text: str

    def __repr__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Op:
    """One call of torch: `out = target(*args, **kwargs)`."""

    out: Name
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __repr__(self) -> str:
        given = [*map(repr, self.args), *(f"{key}={value!r}" for key, value in self.kwargs.items())]
        return f"{self.out} = {self.target}({', '.join(given)})"


@dataclass(frozen=True)
class Program:
    """A step: what goes in, the ops, what comes out, and the new values of the state."""

    inputs: tuple[Name, ...]
    constants: dict[Name, Tensor]
    ops: tuple[Op, ...]
    result: Any
    updates: dict[Name, Name]  # from an input to its new value

    def __repr__(self) -> str:
        lines = [f"def step({', '.join(map(repr, self.inputs))}):"]
        lines += [f"    {op}" for op in self.ops]
        lines += [f"    {old} <- {new}" for old, new in self.updates.items()]
        return "\n".join([*lines, f"    return {self.result}"])


def replaced(item: Any, change: Callable[[Any], Any], kind: type) -> Any:
    """The same tuples and lists, with each object of a kind changed."""
    if isinstance(item, kind):
        return change(item)
    if isinstance(item, (tuple, list)):
        return type(item)(replaced(one, change, kind) for one in item)
    if isinstance(item, dict):
        return {key: replaced(one, change, kind) for key, one in item.items()}
    return item


# --- 2. replay ------------------------------------------------------------------------------------------------------


def run(program: Program, inputs: dict[Name, Tensor]) -> Any:
    """Run the ops on these inputs, write the new state into them, and give the result."""
    values: dict[Name, Any] = {**program.constants, **inputs}
    with torch.no_grad():  # backward is in the program: autograd has nothing to do
        for op in program.ops:
            args = replaced(op.args, values.__getitem__, Name)
            kwargs = replaced(op.kwargs, values.__getitem__, Name)
            out = op.target(*args, **kwargs)
            if isinstance(out, (tuple, list)):
                values.update({part(op.out, number): one for number, one in enumerate(out)})
            values[op.out] = out
        new = {old: values[value] for old, value in program.updates.items()}
        for old, value in new.items():  # only now: the ops have read the old state
            inputs[old].copy_(value)
    return replaced(program.result, values.__getitem__, Name)


def part(name: Name, number: int) -> Name:
    """The name of one of several results."""
    return Name(f"{name}_{number}")


# --- 3. record ------------------------------------------------------------------------------------------------------

Layout = tuple[tuple[int, ...], tuple[int, ...], int]  # sizes, strides, offset


def layout_of(tensor: Tensor) -> Layout:
    """How a tensor reads its memory."""
    return tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset())


@dataclass
class Memory:
    """A piece of memory while a step is recorded: the values that it has now, by how they are read."""

    whole: Layout
    values: dict[Layout, Name]
    keeps: Tensor = field(repr=False)  # alive, so that no other tensor gets this memory


class Recorder(TorchDispatchMode):
    """Writes down each op that torch runs. A tensor is known by its memory and its layout, not by its object."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.constants: dict[Name, Tensor] = {}
        self.memory: dict[int, Memory] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._local_scalar_dense.default:
            raise RuntimeError("the step asks for the value of a tensor: it would be a constant from now on")
        written = [number for number, one in enumerate(func._schema.arguments) if one.is_write]
        named = replaced(args, self.read, Tensor), replaced(kwargs, self.read, Tensor)
        out = func(*args, **kwargs)
        if not written:
            name = self.add(func, *named)
            results = out if isinstance(out, (tuple, list)) else [out]
            for number, one in enumerate(results):
                if isinstance(one, Tensor):
                    self.know(one, part(name, number) if out is results else name)
        elif written == [0]:
            name = self.add(pure(func), *named)
            if isinstance(args[0], Tensor):
                self.write(args[0], name)
            else:  # ops of many tensors at once, as clipping uses them
                for number, one in enumerate(args[0]):
                    self.write(one, part(name, number))
        else:
            raise RuntimeError(f"{func} writes to several tensors, which this tutorial leaves out")
        return out

    def add(self, target: Any, args: Any, kwargs: Any) -> Name:
        """Append an op."""
        name = Name(f"v{len(self.ops)}")
        self.ops.append(Op(name, target, tuple(args), kwargs))
        return name

    def know(self, tensor: Tensor, name: Name) -> None:
        """Note the name of a tensor that is an input, or that an op has made: in new memory, or as a view of old."""
        layout = layout_of(tensor)
        place = self.memory.setdefault(tensor.untyped_storage().data_ptr(), Memory(layout, {}, tensor))
        place.values.setdefault(layout, name)  # a view of the same layout is the same value

    def read(self, tensor: Tensor) -> Name:
        """The name of what a tensor has now."""
        place = self.memory.get(tensor.untyped_storage().data_ptr())
        if place is None:  # made before the step, and no input
            name = Name(f"c{len(self.constants)}")
            self.constants[name] = tensor.detach().clone()
            self.know(tensor, name)
            return name
        layout = layout_of(tensor)
        if layout not in place.values:  # a view that was made before its memory was written to
            whole = place.values[place.whole]
            place.values[layout] = self.add(aten.as_strided.default, (whole, *layout), {})
        return place.values[layout]

    def write(self, tensor: Tensor, name: Name) -> None:
        """Note that a tensor, and with it all that shares its memory, has a new value."""
        place = self.memory[tensor.untyped_storage().data_ptr()]
        layout, whole = layout_of(tensor), place.values[place.whole]
        place.values = {layout: name}
        if layout != place.whole:
            place.values[place.whole] = self.add(aten.as_strided_scatter.default, (whole, name, *layout), {})


def pure(func: Any) -> Any:
    """The op that returns what an op in place writes: `add` for `add_`, of the same arguments."""
    packet = getattr(aten, func._schema.name.removeprefix("aten::").removesuffix("_"))
    kinds = [str(one.type) for one in func._schema.arguments]
    for name in packet.overloads():
        schema = getattr(packet, name)._schema
        if [str(one.type) for one in schema.arguments] == kinds and not schema.is_mutable:
            return getattr(packet, name)
    raise RuntimeError(f"{func} has no form that writes nothing")


# --- 4. what a step reads and writes --------------------------------------------------------------------------------

Build = Callable[..., Any]


def state_of(model: nn.Module, optimizer: Optimizer) -> dict[Name, Tensor]:
    """Parameters, buffers and optimizer state, each with a name."""
    found = {f"model.{key}": one for key, one in [*model.named_parameters(), *model.named_buffers()]}
    for number, entries in enumerate(optimizer.state.values()):
        found |= {f"optimizer.{number}.{key}": one for key, one in entries.items() if isinstance(one, Tensor)}
    return {Name(key.replace(".", "_")): tensor for key, tensor in found.items()}


def capture(build: Build, model: nn.Module, optimizer: Optimizer, args: tuple[Tensor, ...]) -> Program:
    """Run a step once on copies, and give what it did as a program."""
    random = torch.get_rng_state()
    model, optimizer, args = copy.deepcopy((model, optimizer, args))
    inputs = state_of(model, optimizer) | {Name(f"arg{number}"): one for number, one in enumerate(args)}
    recorder = Recorder()
    for name, tensor in inputs.items():
        recorder.know(tensor, name)
    with recorder:
        result = build(model, optimizer, *args)
    torch.set_rng_state(random)
    ends = {name: recorder.read(tensor) for name, tensor in inputs.items()}
    return Program(
        inputs=tuple(inputs),
        constants=recorder.constants,
        result=replaced(result, recorder.read, Tensor),
        ops=tuple(recorder.ops),
        updates={name: new for name, new in ends.items() if new != name},
    )


# --- 5. a pass ------------------------------------------------------------------------------------------------------


def names_in(item: Any) -> Iterator[Name]:
    """Each name in nested tuples, lists and dicts."""
    if isinstance(item, Name):
        yield item
    elif isinstance(item, (tuple, list, dict)):
        for one in item.values() if isinstance(item, dict) else item:
            yield from names_in(one)


def drop_unread(program: Program) -> Program:
    """Leave out the ops whose results nothing reads. One that draws random numbers stays: the next draw depends on it."""
    read = {*names_in(program.result), *program.updates.values()}
    kept: list[Op] = []
    for op in reversed(program.ops):
        is_read = op.out in read or any(name.text.startswith(f"{op.out}_") for name in read)
        if is_read or torch.Tag.nondeterministic_seeded in op.target.tags:
            kept.append(op)
            read.update(names_in((op.args, op.kwargs)))
    return Program(program.inputs, program.constants, tuple(reversed(kept)), program.result, program.updates)


# --- 6. a step ------------------------------------------------------------------------------------------------------


class Step:
    """A training step that runs eagerly once, is captured once for each key, and is replayed from then on."""

    def __init__(self, build: Build, model: nn.Module, optimizer: Optimizer) -> None:
        self.build, self.model, self.optimizer = build, model, optimizer
        self.programs: dict[Any, Program] = {}
        self.started = False

    def key(self, args: tuple[Tensor, ...]) -> Any:
        """What a program is right for: all that is no tensor and could have decided which ops run."""
        groups = [{**group, "params": len(group["params"])} for group in self.optimizer.param_groups]
        forms = [(one.shape, one.stride(), one.dtype) for one in args]
        modes = [module.training for module in self.model.modules()]
        trained = [parameter.requires_grad for parameter in self.model.parameters()]
        return repr((forms, groups, modes, trained))

    def __call__(self, *args: Tensor) -> Any:
        if not self.started:  # the optimizer makes its state in its first step
            self.started = True
            return self.build(self.model, self.optimizer, *args)
        key = self.key(args)
        if key not in self.programs:
            self.programs[key] = drop_unread(capture(self.build, self.model, self.optimizer, args))
        program = self.programs[key]
        inputs = dict(
            zip(program.inputs, [*state_of(self.model, self.optimizer).values(), *args], strict=True)
        )
        return run(program, inputs)


# --- 7. try it ------------------------------------------------------------------------------------------------------


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """A step as one writes it, with a write in place and random numbers."""
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def make() -> tuple[nn.Module, Optimizer]:
    """A model and its optimizer, the same each time."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Linear(32, 3))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def main() -> None:
    """Train twice, eagerly and by replay, and compare."""
    batches = [(torch.randn(16, 8), torch.randint(3, (16,))) for _ in range(10)]
    model, optimizer = make()
    expected = [train_step(model, optimizer, x, y) for x, y in batches]
    captured, optimizer = make()
    step = Step(train_step, captured, optimizer)
    losses = [step(x, y) for x, y in batches]
    for program in step.programs.values():
        print(program)
    same = all(map(torch.equal, model.parameters(), captured.parameters()))
    print("the same losses:", torch.equal(torch.stack(losses), torch.stack(expected)))
    print("the same parameters:", same)


if __name__ == "__main__":
    main()
