"""Why a call fits no build, as a sentence that names the argument."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from numbers import Number
from operator import eq
from typing import Final

from monograph.ir.call.differences import misfit_text
from monograph.ir.call.parameters import argument_name
from monograph.ir.call.reason import Cause, Reason, caused, kind_of_change
from monograph.ir.call.signature import Call, Signature, TensorKey, constant_of
from monograph.ir.call.tree import Tree, form_difference
from monograph.ir.call.varying import Varying

_NAMED: Final = 2  # arguments besides the first


def misfit(call: Call, known: Sequence[Signature], *, numbers: bool = True) -> Reason | None:
    """The first difference between a call and the nearest signature that has a build, as a sentence.

    Without `numbers`, one number in the place of another is no difference.
    """
    fitting = [(_differences(call, keys), same) for tree, keys, same, _ in known if tree == call.tree]
    if not fitting:
        return caused(_other_form(known[-1][0], call), Cause.STRUCTURE) if known else None
    nearest, _ = min(fitting, key=lambda item: len(item[0]))
    found = [
        (path, expected, got)
        for path, expected, got in nearest
        if numbers or not (_is_number(expected) and _is_number(got))
    ]
    if found:
        found.sort(key=lambda item: _can_vary(item[2], item[1]))  # what cannot is at fault
        path, expected, got = found[0]
        text, cause = _key_misfit(path, got, expected), _cause(got, expected)
        others = _swapped(found) or _differing([other for other, *_ in found[1:]])
        sizes = tuple([(other, dims) for other, old, new in found if (dims := _dims(new, old))])
        return Reason(f"{text}{others}", cause, path, what=_what(got, expected), sizes=sizes)
    fitting_same = [same for differences, same in fitting if differences == nearest]
    same = _same_misfit(call, fitting_same[0]) if call.same not in fitting_same else None
    return caused(same, Cause.IDENTITY)


def _differences(call: Call, known: Sequence[Hashable]) -> list[tuple[str, Hashable, Hashable]]:
    """The arguments that are not as in a known call, each with what was expected and what it is.

    Those that differ in nothing but what varies are named only if there is nothing else.
    """
    varying = Varying.in_keys(known)
    by_names = None if varying is None else varying.of(call)
    served = [False] * len(known) if by_names is None else map(eq, by_names.keys, known)
    differing = [
        ((path, expected, got), is_served)
        for path, expected, got, is_served in zip(
            call.paths(), map(_plain, known), call.keys, served, strict=True
        )
        if expected != got
    ]
    return [item for item, is_served in differing if not is_served] or [item for item, _ in differing]


def _differing(paths: Sequence[str]) -> str:
    """Further arguments that differ, in short."""
    if not paths:
        return ""
    named = [*paths[:_NAMED], *([f"{len(paths) - _NAMED} more"] if len(paths) > _NAMED else [])]
    several = f"arguments {', '.join(named[:-1])} and {named[-1]} differ too"
    return f"; {several if len(named) > 1 else f'argument {named[0]} differs too'}"


def _swapped(found: Sequence[tuple[str, Hashable, Hashable]]) -> str:
    """Two arguments of which each is as the other one was, as a question."""
    if len(found) != 2:
        return ""
    (first, *one), (second, *other) = found
    before, now = map(_kind_of, one)
    is_so = before != now and [before, now] == list(map(_kind_of, reversed(other)))
    return f"; are {first} and {second} swapped?" if is_so else ""


def _kind_of(key: Hashable) -> Hashable:
    """What a key says besides sizes."""
    return (len(key.shape), key.dtype) if isinstance(key, TensorKey) else key


def _plain(key: Hashable) -> Hashable:
    """A key with numbers in the place of sizes that vary: those that it was made for."""
    return key.in_numbers if isinstance(key, TensorKey) else key


def _can_vary(got: Hashable, expected: Hashable) -> bool:
    """True for what one build can serve: sizes, and ints, some of which move already."""
    moves = expected is int and isinstance(got, tuple) and got[0] is int
    return moves or _cause(got, expected) in (Cause.SIZE, Cause.NUMBER_GIVEN)


def _cause(got: Hashable, expected: Hashable) -> Cause:
    if _dims(got, expected):
        return Cause.SIZE
    if isinstance(got, TensorKey) and isinstance(expected, TensorKey):
        return Cause.FORM
    is_whole = [isinstance(key, tuple) and key[0] is int for key in (got, expected)]
    return Cause.NUMBER_GIVEN if all(is_whole) else Cause.CONSTANT_GIVEN


def _what(got: Hashable, expected: Hashable) -> str:
    """What of two tensors differs, but for their sizes; of others the kind of values that they are."""
    if not (isinstance(got, TensorKey) and isinstance(expected, TensorKey)):
        return kind_of_change(_example(expected), _example(got))
    if len(got.shape) != len(expected.shape):
        return "shape"
    fields = zip(TensorKey._fields, got, expected, strict=True)
    differing = [name for name, now, before in fields if now != before]
    return next((name for name in reversed(differing) if name != "shape"), "shape")


def _example(key: Hashable) -> object:
    """A value that has this key, or one of its kind."""
    if isinstance(key, type):
        return key() if key in (int, float) else object()
    return constant_of(key) if isinstance(key, tuple) and not isinstance(key, TensorKey) else key


def _dims(got: Hashable, expected: Hashable) -> tuple[int, ...]:
    """The dimensions of other sizes, if tensors differ in nothing else but strides."""
    if not (isinstance(got, TensorKey) and isinstance(expected, TensorKey)):
        return ()
    if got[2:] != expected[2:] or len(got.shape) != len(expected.shape):
        return ()
    sizes = enumerate(zip(expected.shape, got.shape, strict=True))
    return tuple(dim for dim, (before, now) in sizes if before != now)


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
