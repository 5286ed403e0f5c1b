"""The objects whose attributes a step may change, and what their attributes were before it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from monograph.capture.guards.sources.overlay import Overlay, real_attributes_of
from monograph.capture.guards.sources.reads import Reads

NOTHING = object()  # in the place of an attribute that is not there
OF_MODULES = frozenset(nn.Module().__dict__)  # the attributes that each module has


@dataclass(frozen=True)
class Changed:
    """An attribute that holds something else than before the step."""

    path: str
    owner: Any
    name: str
    old: Any  # NOTHING if there was none
    value: Any

    @property
    def is_new(self) -> bool:
        """True if there was none."""
        return self.old is NOTHING


class Attributes:
    """Attributes as the trace sees them. To be made before the step runs.

    `private` are the graph, and its attributes that are no step's business.
    """

    def __init__(
        self, overlay: Overlay, modules: Mapping[str, nn.Module], private: tuple[Any, Collection[str]]
    ) -> None:
        self.overlay, self.modules, self.private = overlay, modules, private
        self._before = {path: dict(self.seen(module)) for path, module in modules.items()}

    def seen(self, owner: Any) -> dict[str, Any]:
        """The attributes of an object."""
        return self.overlay.attributes(owner)

    def public(self, owner: Any) -> dict[str, Any]:
        """Those that are a step's business."""
        graph, hidden = self.private
        return {k: v for k, v in self.seen(owner).items() if owner is not graph or k not in hidden}

    def objects(self, reads: Reads) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """The path of each object, itself, and its attributes before the step."""
        for path, module in self.modules.items():
            yield path, module, self._before[path]
        for entered in list(reads.entered.values()):  # looking at one may enter others
            yield entered.label, entered.owner, entered.before

    def changed(self, reads: Reads) -> Iterator[Changed]:
        """The attributes that hold something else now."""
        for path, owner, before in self.objects(reads):
            for name, value in self.seen(owner).items():
                old = before.get(name, NOTHING)
                if value is not old:
                    yield Changed(f"{path}.{name}", owner, name, old, value)


def table_of(owner: Any) -> dict[str, Any]:
    """The dict of an object's attributes, which may be empty; another one for an object that keeps none."""
    found = real_attributes_of(owner)
    return {} if found is None else found
