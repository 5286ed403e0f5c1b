"""The collectives of a step in their order: what all ranks of a group must have in common, whatever else they compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from torch import fx

from monograph.compat.distributed.ops import communicates, transfers, waits
from monograph.compat.ops import named_arguments, packet_name
from monograph.distributed.agreement.ranks import first_difference

_OF_OWN_SIZE: Final = ("all_to_all_single",)  # each rank gives as many rows as it likes


@dataclass(frozen=True)
class Collective:
    """One collective: the op, the group that it runs in, and what it is given."""

    op: str
    group: str
    given: tuple[str, ...]  # each tensor, as float32[4, 3]
    options: tuple[str, ...] = ()  # such as the kind of a reduction

    def __str__(self) -> str:
        options = f"({', '.join(self.options)})" if self.options else ""
        tensors = " and ".join(self.given) or "nothing"
        return f"{self.op}{options} of {tensors} in group {self.group!r}"


@dataclass(frozen=True)
class Signature:
    """All collectives of a step. Batches of other sizes have the same one, unless what is sent depends on them."""

    collectives: tuple[Collective, ...] = ()
    agreed: str = ""
    digest: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:16]
        object.__setattr__(self, "digest", digest)

    @property
    def text(self) -> str:
        """A line for each, as others are shown it."""
        return "\n".join([*map(str, self.collectives), *([self.agreed] if self.agreed else [])])


def signature_of(
    nodes: Iterable[fx.Node],
    groups: Mapping[str, str] | None = None,
    *,
    tensor_of: Callable[[fx.Node], Any] = lambda node: node.meta["val"],
    agreed: str = "",
) -> Signature:
    """The collectives among the nodes of a graph of `_c10d_functional` ops.

    `groups` renames groups: torch numbers them, and may do so differently on each rank. `tensor_of` gives the dtype and
    the shape of what a node makes. What one rank sends and another receives is left out: `agreed` says what ranks that do so have
    in common.
    """
    found = [_collective(node, groups or {}, tensor_of) for node in nodes if _is_collective(node)]
    return Signature(tuple(found), agreed)


def difference(texts: Sequence[str]) -> tuple[list[int], str]:
    """Who has other collectives than most, and the first that differs, in words. The texts are those of the ranks."""
    deviating, line, here, there = first_difference(texts)
    return deviating, f"collective {line} of the step is {here}, and elsewhere {there}"


def _is_collective(node: fx.Node) -> bool:
    return communicates(node.target) and not (waits(node.target) or transfers(node.target))


def _name(op: Any) -> str:
    return packet_name(op).partition("::")[2]


def _collective(node: fx.Node, groups: Mapping[str, str], tensor_of: Callable[[fx.Node], Any]) -> Collective:
    name = _name(node.target)
    arguments = named_arguments(node.target, node.args, node.kwargs)
    group = str(arguments.pop("group_name", ""))
    has_own_size = name in _OF_OWN_SIZE
    given: list[str] = []
    options: list[str] = []
    for value in arguments.values():
        nodes = value if isinstance(value, (list, tuple)) else [value]
        if nodes and all(isinstance(item, fx.Node) for item in nodes):
            given += (_text(tensor_of(item), has_own_size=has_own_size) for item in nodes)
        else:
            options.append(str(value))
    return Collective(name, groups.get(group, group), tuple(given), () if has_own_size else tuple(options))


def _text(tensor: Any, *, has_own_size: bool) -> str:
    sizes = ["?", *tensor.shape[1:]] if has_own_size else tensor.shape
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, sizes))}]"
