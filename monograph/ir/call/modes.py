"""The modes of torch around a call, and the key of the builds that may serve it."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

import torch

from monograph.compat.global_state import MODES
from monograph.compat.modes import foreign_function_mode
from monograph.errors import GraphBoundaryError
from monograph.ir.call.differences import change_text
from monograph.ir.call.reason import Cause, Reason
from monograph.ir.call.signature import Call, Key, Version, first_equal, read_call
from monograph.settings import Settings, shown_setting

GRADIENTS_THERE: Final = "the set of gradients that are there"
_WITHOUT_VALUES = ("the choice of replicated arguments", GRADIENTS_THERE)
MODE_NAMES = (*_WITHOUT_VALUES, *(row.name for row in MODES))


def read_with_key(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    names: tuple[str, ...],
    settings: Settings,
    version: Version,
    gradients: Hashable = None,
) -> Call:
    """A call with the key of the builds that may serve it. `names` are those of the positional parameters of build().

    `version` is that of what the graph holds, and `gradients` the forms of those that are there, where they count.
    """
    _check_modes()
    call = read_call(args, kwargs, names)
    replicated = call.replicated if settings.accumulation_steps > 1 else None
    signature = (call.tree, call.keys, call.same, modes(replicated, gradients))
    return call._replace(key=Key(signature, settings, version))


def modes(replicated: Hashable = None, gradients: Hashable = None) -> tuple[Hashable, ...]:
    """The modes of torch that change what build() would do, after two values of the call."""
    return (replicated, gradients, *[row.read() for row in MODES])


def _check_modes() -> None:
    """Raise GraphBoundaryError for a mode around the call that only eager mode would ask."""
    if (name := foreign_function_mode()) is not None:
        raise GraphBoundaryError(
            f"the graph is called under {name}, a TorchFunctionMode: a replayed step calls no torch function, "
            "so that it would see nothing",
            hint="enter it in build(), where it is captured, or call graph.eager()",
        )


def gradient_forms(parameters: Sequence[torch.Tensor]) -> tuple[Hashable, ...]:
    """What a build knows of the gradients that are there when a step begins."""
    gradients = [p.grad for p in parameters]
    forms = tuple(None if g is None else (g.shape, g.stride(), g.dtype, g.device) for g in gradients)
    return (*forms, first_equal([0 if g is None else id(g) for g in gradients]))


def key_reasons(known: Key, now: Key) -> Iterator[Reason]:
    """What besides the arguments is other in a key."""
    if known.version != now.version:
        changed = ", ".join(dict.fromkeys(now.version.changed[known.version :]))
        yield Reason(f"a module or optimizer of the graph was added or replaced: {changed}", Cause.MEMBER)
    if known.settings != now.settings:
        yield from _settings_changed(known.settings, now.settings)
    for what, old, new in zip(MODE_NAMES, known.signature[3], now.signature[3], strict=False):
        if old != new:
            values = what not in _WITHOUT_VALUES
            text = (change_text(what, str(old), str(new)) if values else None) or f"{what} changed"
            cause = Cause.TORCH_MODE if values else Cause.STRUCTURE
            yield Reason(text, cause, what)


def _settings_changed(before: Settings, now: Settings) -> Iterator[Reason]:
    for name in [item.name for item in fields(Settings) if item.compare]:
        old, new = getattr(before, name), getattr(now, name)
        if old != new:
            values = f"{name}={shown_setting(old)}", f"{name}={shown_setting(new)}"
            text = change_text("the configuration", *values) or f"{name} of the configuration changed"
            yield Reason(text, Cause.SETTING, name)
