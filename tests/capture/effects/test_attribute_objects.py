"""The objects whose attributes a step may change: what is asked of them before the step, and after it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import nn

from monograph.capture.effects.attributes import NOTHING, Attributes, table_of


def attributes(module: nn.Module, **private: Any) -> Attributes:
    """Those of one module, seen as they are."""
    overlay: Any = SimpleNamespace(attributes=vars)
    return Attributes(overlay, {"model": module}, (module if private else None, private))


def entered(label: str, owner: Any) -> Any:
    """What a trace has come across besides: one object, with its attributes at that time."""
    found = SimpleNamespace(label=label, owner=owner, before=dict(vars(owner)))
    return SimpleNamespace(entered={id(owner): found})


def test_changed_attributes_have_what_was_there() -> None:
    module, book = nn.Linear(1, 1), SimpleNamespace(page=1, title="a")
    found, reads = attributes(module), entered("book", book)
    module.epoch, module.training, book.page = 3, False, 2
    changes = {item.path: (item.old, item.value, item.is_new) for item in found.changed(reads)}
    assert changes == {
        "model.training": (True, False, False),
        "model.epoch": (NOTHING, 3, True),
        "book.page": (1, 2, False),
    }


def test_an_attribute_that_gets_the_same_object_has_not_changed() -> None:
    module = nn.Linear(1, 1)
    found = attributes(module)
    module.in_features = module.in_features
    assert list(found.changed(SimpleNamespace(entered={}))) == []  # type: ignore[arg-type]


def test_what_is_no_steps_business_is_not_public() -> None:
    module = nn.Linear(1, 1)
    assert "bias" not in attributes(module).public(module)  # it is in a table of the module
    assert "in_features" in attributes(module).public(module)
    assert "in_features" not in attributes(module, in_features=None).public(module)


def test_an_object_without_attributes_has_an_empty_table() -> None:
    assert table_of(3) == {}
    book = SimpleNamespace(page=1)
    assert table_of(book) is vars(book)
