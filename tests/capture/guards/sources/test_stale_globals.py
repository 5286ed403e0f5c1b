"""Whatever build() reads of globals, closures and modules of Python is changed after the first call; eager mode is the judge."""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.capture.guards.sources.stale import CONFIG, Case, Cases, check_change

CASES = Cases()
case = CASES.add


class Method:
    @staticmethod
    def of_static() -> float:
        return SCALE


SCALE = 2.0


TABLE = {"k": 2.0}
ITEMS = [2.0]


def helper(x: torch.Tensor, gain: list[float] = [2.0]) -> torch.Tensor:  # noqa: B006
    return x * gain[0]


def set_global(name: str, value: Any) -> Callable[[], None]:
    return lambda: globals().update({name: value})


@case
def a_global() -> Case:
    globals()["SCALE"] = 2.0
    return {}, lambda self, x: x * SCALE, set_global("SCALE", 5.0)


@case
def an_entry_of_a_global() -> Case:
    TABLE["k"] = 2.0
    return {}, lambda self, x: x * TABLE["k"], lambda: TABLE.update(k=5.0)


@case
def an_item_of_a_global() -> Case:
    ITEMS[:] = [2.0]
    return {}, lambda self, x: x * sum(ITEMS), lambda: ITEMS.append(4.0)


@case
def an_attribute_of_a_global() -> Case:
    CONFIG.k = 2.0
    return {}, lambda self, x: x * CONFIG.k, lambda: setattr(CONFIG, "k", 5.0)


@case
def a_global_by_globals() -> Case:
    globals()["SCALE"] = 2.0
    return {}, lambda self, x: x * globals()["SCA" + "LE"], set_global("SCALE", 5.0)


@case
def a_global_of_a_helper() -> Case:
    globals()["SCALE"] = 2.0
    return {"f": Method().of_static}, lambda self, x: x * self.f(), set_global("SCALE", 5.0)


@case
def a_default_of_a_helper() -> Case:
    helper.__defaults__[0][:] = [2.0]  # type: ignore[index]
    return (
        {},
        lambda self, x: helper(x),
        lambda: helper.__defaults__[0].append(1.0) or operator.setitem(helper.__defaults__[0], 0, 5.0),
    )  # type: ignore[index]


@case
def a_helper_replaced() -> Case:
    globals()["replaced"] = lambda x: x * 2
    return {}, lambda self, x: replaced(x), set_global("replaced", lambda x: x * 5)  # type: ignore[name-defined]  # noqa: F821


@case
def a_closure_variable() -> Case:
    scale = 2.0

    def change() -> None:
        nonlocal scale
        scale = 5.0

    return {}, lambda self, x: x * scale, change


@case
def a_builtin_shadowed() -> Case:
    globals().pop("abs", None)
    return {}, lambda self, x: x * abs(-2.0), lambda: globals().update(abs=lambda v: 7.0)


@case
def a_function_of_torch_replaced() -> Case:
    original = functional.relu

    def change() -> None:
        functional.relu = lambda x: x * 3 if functional.relu is not original else original(x)

    def build(self: Any, x: torch.Tensor) -> Any:
        return functional.relu(x)

    return {"restore": lambda: setattr(functional, "relu", original)}, build, change


@case
def a_module_of_ones_own() -> Case:
    settings = types.ModuleType("settings")
    settings.k = 2.0  # type: ignore[attr-defined]
    globals()["settings"] = settings
    return {}, lambda self, x: x * settings.k, lambda: setattr(settings, "k", 5.0)  # type: ignore[attr-defined]


handed_on: Any = None  # modules that a case makes
handed_over: Any = None


def gain_of(settings: Any) -> Any:
    return getattr(settings, "gain", 1.0)


class Matched:
    __match_args__ = ("gauge",)

    def __init__(self) -> None:
        self.gauge = 2.0


@case
def a_class_pattern_by_position() -> Case:
    matched = Matched()

    def build(self: Any, x: torch.Tensor) -> Any:
        match self.matched:
            case Matched(found):
                return x * found
        return x

    return {"matched": matched}, build, lambda: setattr(matched, "gauge", 5.0)


@case
def an_absent_name_in_a_module_that_is_handed_on() -> Case:
    settings = types.ModuleType("settings")
    globals()["handed_on"] = settings
    return {}, lambda self, x: x * gain_of(handed_on), lambda: setattr(settings, "gain", 5.0)


def share_of(settings: Any) -> Any:
    return settings.share


@case
def a_module_that_is_handed_on() -> Case:
    settings = types.ModuleType("settings")
    settings.share = 2.0  # type: ignore[attr-defined]
    globals()["handed_over"] = settings
    return {}, lambda self, x: x * share_of(handed_over), lambda: setattr(settings, "share", 5.0)


@case
def whether_an_object_has_a_dict() -> Case:
    class Kept:
        __slots__ = ("value",)

    kept = Kept()
    kept.value = 2.0

    def build(self: Any, x: torch.Tensor) -> Any:
        return x * (self.kept.value if not hasattr(self.kept, "__dict__") else 0.0)

    return {"kept": kept}, build, lambda: setattr(kept, "value", 5.0)


@case
def an_import_in_build() -> Case:
    import sys

    settings = sys.modules["settings_of_a_test"] = types.ModuleType("settings_of_a_test")
    settings.k = 2.0  # type: ignore[attr-defined]

    def build(self: Any, x: torch.Tensor) -> Any:
        import settings_of_a_test  # type: ignore[import-not-found]

        return x * settings_of_a_test.k

    return {}, build, lambda: setattr(settings, "k", 5.0)


@pytest.mark.every_case
@pytest.mark.parametrize("name", CASES)
def test_a_change_is_seen(name: str) -> None:
    check_change(CASES[name]())
