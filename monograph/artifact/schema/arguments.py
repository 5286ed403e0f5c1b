"""The arguments of a call of an artifact: matched to what was stored, since no other program can be made."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeGuard

import numpy as np
import torch

from monograph.artifact.schema.signatures import Signature
from monograph.artifact.schema.tree import Entries, Leaf, ValueForm
from monograph.compat.tensors import storage_key
from monograph.errors import SignatureError
from monograph.ir.call.numbers import exactly
from monograph.ir.call.tree import Tree, leaf_paths
from monograph.ir.graph_signature import Argument, CopyToArgument, Fixed, Source, Target
from monograph.ir.meta import ScalarMeta, TensorMeta, tensor_meta
from monograph.state.spans import Regions, span

_DECLARE = (
    'a size that may vary is an mg.Dim when the graph is compiled, as in graph.compile(mg.spec((mg.Dim("batch", max=64), 8))), '
    "before it is saved"
)


class Arguments:
    """Takes the arguments of calls apart for one program."""

    def __init__(
        self,
        signature: Signature,
        sources: Iterable[Source],
        targets: Iterable[Target],
        *,
        other_sizes: str = _DECLARE,
    ) -> None:
        """`other_sizes` says what to do where a tensor has others than it should have."""
        self._signature, self._other_sizes = signature, other_sizes
        self._parameters = signature.parameters
        self._forms = [leaf for item in self._parameters for leaf in item.form.leaves]
        self._sizes = signature.sizes or ((),) * len(self._forms)
        self.paths = [path for item in self._parameters for path in leaf_paths(item.form.tree, item.name)]
        sources = list(sources)
        held = [source.value for source in sources if isinstance(source, Fixed)]
        self._storages = {storage_key(item) for item in held if isinstance(item, torch.Tensor)}
        self._taken = {source.index for source in sources if isinstance(source, Argument)}
        self._changed = {target.index for target in targets if isinstance(target, CopyToArgument)}

    def flat(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """The leaves of a call as they were given. Raises SignatureError for other names or containers."""
        given = self._by_name(args, kwargs)
        leaves: list[Any] = []
        for item in self._parameters:
            if item.name in given:
                _take_leaves(item.form.tree, given[item.name], item.name, leaves)
            else:
                leaves += [leaf.value for leaf in item.form.leaves if isinstance(leaf, ValueForm)]
        return leaves

    def rank(self, index: int) -> int:
        """How many dimensions the tensor has that is this leaf; 0 for other leaves."""
        form = self._forms[index]
        return len(form.shape) if isinstance(form, TensorMeta) else 0

    def leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """The leaves of a call. Raises SignatureError, which names the argument that does not fit."""
        leaves = self.flat(args, kwargs)
        self._check_repeated(leaves)
        return tuple(self._apart(list(map(self._fitting, leaves, self._forms, self.paths, self._sizes))))

    def _check_repeated(self, leaves: Sequence[Any]) -> None:
        """Raise SignatureError for an argument that was another one too at capture, and is not now."""
        taken = {id(leaves[index]) for index in self._taken}
        for index, form in enumerate(self._forms):
            if isinstance(form, TensorMeta) and index not in self._taken and id(leaves[index]) not in taken:
                raise SignatureError(
                    f"argument {self.paths[index]} was one tensor with another argument when the graph was captured",
                    hint="pass one tensor as both, or save a graph that was called with two",
                )

    def _by_name(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        names = [item.name for item in self._parameters]
        if len(args) > len(names):
            raise self._misfit(f"it got {len(args)} positional arguments, and takes {len(names)}")
        given = dict(zip(names, args, strict=False))
        for name, value in kwargs.items():
            if name not in names or name in given:
                raise self._misfit(f"argument {name} is {'given twice' if name in given else 'unknown'}")
            given[name] = value
        missing = [
            item.name for item in self._parameters if item.name not in given and not item.form.is_plain
        ]
        if missing:
            raise self._misfit(f"argument {missing[0]} is missing")
        return given

    def _misfit(self, what: str) -> SignatureError:
        return SignatureError(what, hint=f"the artifact takes {self._signature}")

    def _apart(self, leaves: list[Any]) -> list[Any]:
        """Give arguments that share the memory of the state, or of each other, memory of their own.

        What the step changes may be seen through no other argument.
        """
        seen = set(self._storages)
        changed = Regions(span(leaves[index]) for index in self._changed)
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, torch.Tensor):
                continue
            if (key := storage_key(leaf)) in seen:
                if index in self._changed or changed.meet(*span(leaf)):
                    raise SignatureError(
                        f"argument {self.paths[index]} shares memory, and the step changes it",
                        hint="pass a clone of it",
                    )
                leaves[index] = leaf.detach().clone()
            seen.add(key)
        return leaves

    def _fitting(self, leaf: Any, expected: Leaf, path: str, sizes: Sequence[str]) -> Any:
        match expected:
            case TensorMeta():
                return self._fitting_tensor(leaf, expected, path, sizes)
            case ScalarMeta(kind):
                wanted = int if kind == "int" else (int, float)
                if isinstance(leaf, bool) or not isinstance(leaf, wanted):
                    what = "an int" if kind == "int" else "a number"
                    raise SignatureError(f"argument {path} is {_kind(leaf)}; the artifact takes {what}")
                return int(leaf) if kind == "int" else float(leaf)
            case ValueForm(value):
                if exactly(leaf) != exactly(value):
                    raise SignatureError(f"argument {path} is {leaf!r}; the artifact was made for {value!r}")
                return leaf

    def _fitting_tensor(
        self, leaf: Any, expected: TensorMeta, path: str, sizes: Sequence[str]
    ) -> torch.Tensor:
        if not is_plain_tensor(leaf):
            raise SignatureError(
                f"argument {path} is {_kind(leaf)}; the artifact takes a tensor: {_text(expected, sizes)}",
                hint=_as_tensor(leaf, expected, path),
            )
        form = (tuple(leaf.shape), leaf.dtype, leaf.device)
        if form != (expected.shape, expected.dtype, expected.device):
            got = tensor_meta(leaf)
            raise SignatureError(
                f"argument {path} is {_text(got)}; the artifact takes {_text(expected, sizes, beside=got.shape)}",
                hint=self._advice(got, expected, path),
            )
        return _with_strides(leaf, expected, path)

    def _advice(self, got: TensorMeta, expected: TensorMeta, path: str) -> str:
        """What to do about a tensor of another form."""
        if got.device.type == "meta":
            return "a meta tensor has no values: pass one that has some"
        if got.shape == expected.shape:
            return f"convert it: {path}.to({str(expected.device)!r}, {expected.dtype})"
        missing = len(expected.shape) - len(got.shape)
        if missing == 0:
            sizes = enumerate(zip(got.shape, expected.shape, strict=True))
            dim, size, wanted = next((dim, size, wanted) for dim, (size, wanted) in sizes if size != wanted)
            return f"its size in dimension {dim} is {size}, and has to be {wanted}; {self._other_sizes}"
        one = f"; a single example is a batch of one: {path}.unsqueeze(0)" if missing == 1 else ""
        return f"it has {len(got.shape)} dimensions where the artifact takes {len(expected.shape)}{one}"


def is_plain_tensor(leaf: object) -> TypeGuard[torch.Tensor]:
    """True for tensors that an artifact takes; others have no sizes, or no memory of their own."""
    if not isinstance(leaf, torch.Tensor) or type(leaf) not in (torch.Tensor, torch.nn.Parameter):
        return False
    return leaf.layout is torch.strided and not (leaf.is_nested or leaf.is_quantized)


def _with_strides(tensor: torch.Tensor, expected: TensorMeta, path: str) -> torch.Tensor:
    if expected.requires_grad and not tensor.requires_grad:
        raise SignatureError(f"argument {path} has to require grad", hint=f"call {path}.requires_grad_()")
    if tensor.stride() == expected.stride and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    if expected.requires_grad:
        raise SignatureError(f"argument {path} has other strides than the artifact takes: {expected.stride}")
    with torch.no_grad():
        return expected.empty().copy_(tensor)


def _as_tensor(item: Any, expected: TensorMeta, path: str) -> str:
    """How to make a tensor of an argument; empty for what is none for other reasons."""
    if item is None:
        return "pass a tensor of that form"
    if isinstance(item, np.ndarray):
        is_like = str(item.dtype) == str(expected.dtype).removeprefix("torch.")
        return f"convert it: torch.from_numpy({path})" + ("" if is_like else f".to({expected.dtype})")
    first = item[0] if isinstance(item, list) and item else item
    is_numbers = isinstance(first, (int, float, list)) and not isinstance(item, bool)
    return f"convert it: torch.tensor({path})" if is_numbers else ""


def _text(form: TensorMeta, names: Sequence[str] = (), *, beside: Sequence[int] = ()) -> str:
    """A form for people: sizes by their names, and by numbers where those of a tensor of as many dimensions are others."""
    shown = names or [str(size) for size in form.shape]
    if len(beside) == len(form.shape):
        sizes = zip(shown, form.shape, beside, strict=True)
        shown = [name if size == other else str(size) for name, size, other in sizes]
    return f"{str(form.dtype).removeprefix('torch.')}[{', '.join(shown)}] on {form.device}"


def _take_leaves(tree: Tree, item: Any, path: str, leaves: list[Any]) -> None:
    """Append the leaves of an argument; SignatureError if it is not of this form."""
    kind = tree.kind
    if kind is None:
        leaves.append(item)
        return
    for child, (part, below) in zip(tree.children, _parts(tree, kind, item, path), strict=True):
        _take_leaves(child, part, below, leaves)


def _parts(tree: Tree, kind: type, item: Any, path: str) -> list[tuple[Any, str]]:
    if kind in (tuple, list) or (issubclass(kind, tuple) and isinstance(item, (tuple, list))):
        if not isinstance(item, (tuple, list)) or len(item) != len(tree.children):
            raise _misfit(path, f"a {kind.__name__} of {len(tree.children)}", item)
        return [(part, f"{path}[{index}]") for index, part in enumerate(item)]
    names: Sequence[Any] = tree.keys or getattr(kind, "_fields", ())
    if isinstance(item, Mapping):
        if set(item) != set(names):
            raise _misfit(path, f"a dict with the keys {', '.join(map(repr, names))}", item)
        return [(item[name], f"{path}[{name!r}]") for name in names]
    if issubclass(kind, dict) and not (kind is Entries and dataclasses.is_dataclass(item)):
        raise _misfit(path, "a dict", item)
    if any(not hasattr(item, str(name)) for name in names):
        raise _misfit(path, f"an object with the attributes {', '.join(map(str, names))}", item)
    return [(getattr(item, str(name)), f"{path}.{name}") for name in names]


def _misfit(path: str, expected: str, item: Any) -> SignatureError:
    return SignatureError(
        f"argument {path} is {_kind(item)}; the artifact takes {expected}",
        hint="an artifact takes containers as its graph was called with: call the graph with these before it is saved",
    )


def _kind(item: Any) -> str:
    """What somebody has given, in a few words."""
    if isinstance(item, torch.Tensor):
        if is_plain_tensor(item):
            return f"a tensor: {_text(tensor_meta(item))}"
        kind = "nested" if item.is_nested else "quantised" if item.is_quantized else str(item.layout)
        return f"a {kind} tensor" if type(item) is torch.Tensor else f"a {type(item).__name__}"
    if item is None:
        return "None"
    kind = "numpy.ndarray" if isinstance(item, np.ndarray) else type(item).__name__
    named = f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
    if isinstance(item, Mapping):
        return f"{named} with the keys {', '.join(map(repr, item))}" if item else f"an empty {kind}"
    return f"{named} of {len(item)}" if isinstance(item, (list, tuple)) else named
