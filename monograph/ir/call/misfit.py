"""Why a call fits no build, as a sentence that names the argument."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from numbers import Number

from monograph.ir.call.differences import misfit_text
from monograph.ir.call.parameters import argument_name
from monograph.ir.call.signature import Call, Signature, TensorKey, constant_of
from monograph.ir.call.tree import Tree, form_difference


def misfit(call: Call, known: Sequence[Signature], *, numbers: bool = True) -> str | None:
    """The first difference between a call and the nearest signature that has a build, as a sentence.

    Without `numbers`, one number in the place of another is no difference.
    """
    fitting = [keys for tree, keys, _, _ in known if tree == call.tree]
    if not fitting:
        return _other_form(known[-1][0], call) if known else None
    nearest = min(fitting, key=lambda keys: sum(map(_differ, keys, call.keys)))
    for path, expected, got in zip(call.paths(), nearest, call.keys, strict=True):
        if expected != got and (numbers or not (_is_number(expected) and _is_number(got))):
            return _key_misfit(path, got, expected)
    fitting_same = [same for tree, keys, same, _ in known if (tree, keys) == (call.tree, nearest)]
    return _same_misfit(call, fitting_same[0]) if call.same not in fitting_same else None


def _key_misfit(path: str, got: Hashable, expected: Hashable) -> str:
    """How the description of one leaf differs."""
    if isinstance(got, TensorKey) and isinstance(expected, TensorKey) and str(got) == str(expected):
        strides = misfit_text(f"argument {path} has the strides", str(got.stride), str(expected.stride))
        return strides or f"argument {path} has other hooks than the tensor that the graph was built for"
    return misfit_text(f"argument {path} is", _show(got), _show(expected)) or (
        f"argument {path} is another {_show(got)} than the one that the graph was built for"
    )


def _same_misfit(call: Call, known: tuple[int, ...]) -> str:
    """Which arguments are one tensor now, or were."""
    paths = call.paths()
    alone = tuple(range(len(paths)))
    before, now = known or alone, call.same or alone
    index = next(index for index in alone if before[index] != now[index])
    if now[index] != index:
        return f"arguments {paths[now[index]]} and {paths[index]} are one tensor, unlike when the graph was built"
    return f"arguments {paths[before[index]]} and {paths[index]} are two tensors; the graph was built for one"


def _other_form(known: Tree, call: Call) -> str | None:
    """The first place where the form of the arguments differs from a known one."""
    (expected, expected_named), (got, got_named) = known.children, call.tree.children
    for index, pair in enumerate(zip(expected.children, got.children, strict=False)):
        if (difference := form_difference(*pair, argument_name(call.names, index))) is not None:
            return difference
    before = dict(zip(expected_named.keys, expected_named.children, strict=True))
    after = dict(zip(got_named.keys, got_named.children, strict=True))
    for name in [*before, *after]:
        if name not in before or name not in after:
            return f"argument {name} is {'left out' if name in before else 'given'}, unlike when the graph was built"
        if (difference := form_difference(before[name], after[name], name)) is not None:
            return difference
    counts = f"{len(got.children)} positional arguments", str(len(expected.children))
    return misfit_text("the call has", *counts) if len(got.children) != len(expected.children) else None


def _differ(expected: object, got: object) -> bool:
    return expected != got


def _is_number(key: Hashable) -> bool:
    kind = key[0] if isinstance(key, tuple) else key
    return isinstance(kind, type) and issubclass(kind, Number)


def _show(key: Hashable) -> str:
    match key:
        case TensorKey():
            return f"a tensor {key}"
        case type():
            return f"a {key.__name__}"
        case tuple():
            return f"{constant_of(key)!r} ({key[0].__name__})"
    return str(key)
