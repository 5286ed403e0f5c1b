"""Regions of `torch.utils.checkpoint`: does it show that eager mode runs them twice?

Backward computes the values of a region again. Where that gives the same values and changes nothing, a trace records
the region once. It shows where the region changes state, as BatchNorm does, and where it draws other numbers. Then both runs
are recorded; where the second one draws the numbers of the first, it takes copies of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import fx

from monograph.compat.ops import is_random, writes_to_inputs
from monograph.errors import CaptureError
from monograph.ir.memory import changed_by, memory_root
from monograph.ir.meta import come_from, origin, set_origin

RanAgain: TypeAlias = Callable[[Sequence[fx.Node]], None]  # is given the nodes of a second run
_aten = torch.ops.aten
_NUMBERS_ALONE = frozenset(  # what these draw depends on the form of a tensor, and not on what is in it
    {
        *(
            _aten.bernoulli_.float,
            _aten.cauchy_.default,
            _aten.exponential_.default,
            _aten.geometric_.default,
        ),
        *(_aten.log_normal_.default, _aten.normal_.default, _aten.uniform_.default, _aten.bernoulli.p),
        *(_aten.rand.default, _aten.randn.default, _aten.randint.default, _aten.randint.low),
        *(_aten.rand_like.default, _aten.randn_like.default, _aten.randint_like.default),
        *(_aten.randint_like.low_dtype, _aten.randperm.default, _aten.normal.float_float),
        *(_aten.random_.default, _aten.random_.to, _aten.random_.__getattr__("from")),
    }
)
_UNTAGGED = frozenset({_aten.random_})  # torch does not say of them that they draw
_REPEATS = "repeats"  # in the meta of a node: the one whose numbers it draws


def mark_region(nodes: Sequence[fx.Node]) -> None:
    """Let the origins of nodes say that they are in one region. Of regions inside of each other the outermost counts."""
    number = (
        next((index for index, node in enumerate(nodes[0].graph.nodes, 1) if node is nodes[0]), 0)
        if nodes
        else 0
    )
    for node in nodes:
        set_origin(node, replace(origin(node), region=number))


def shows_again(region: Iterable[fx.Node], *, preserves: bool, reentrant: bool) -> RanAgain | None:
    """What is to be given the nodes of the second run of a region, if that has to be recorded, as eager mode runs it; None if not.

    `preserves` says that the second run draws the numbers of the first from the generators of the process. Raises
    CaptureError where a trace cannot do as eager does.
    """
    nodes = list(region)
    mark_region(nodes)
    inside = set(nodes)
    changes = any(memory_root(item) not in inside for node in nodes for item in changed_by(node))
    drawn = list(filter(_draws, nodes))
    own = any(map(_has_generator, drawn))
    again = changes or own or (bool(drawn) and not preserves)
    if not again:
        return None
    what = "changes state (a buffer, such as those of BatchNorm)" if changes else "draws random numbers"
    if reentrant:
        raise CaptureError(
            f"a region of torch.utils.checkpoint {what}, and backward runs it a second time",
            hint="checkpoint it with use_reentrant=False, which is captured as eager mode runs it",
        )
    if not preserves:
        return _nothing
    drawn = [node for node in drawn if not _has_generator(node)]
    for node in drawn:
        if node.target not in _NUMBERS_ALONE:
            raise _not_repeated(what, node)
    return partial(_repeat, what, drawn)


def _nothing(_nodes: Sequence[fx.Node]) -> None:
    pass


def _repeat(what: str, first: Sequence[fx.Node], nodes: Sequence[fx.Node]) -> None:
    """Let a second run, which may end early, draw what the first one has drawn."""
    drawn = [node for node in nodes if _draws(node) and not _has_generator(node)]
    for before, node in zip(first, drawn, strict=False):
        if not _draws_alike(before, node):
            raise _not_repeated(what, node)
        node.meta[_REPEATS] = before
    if len(drawn) > len(first):
        raise _not_repeated(what, drawn[len(first)])


def repeat_draws(graph: fx.Graph) -> None:
    """Let ops that repeat the numbers of other ones take copies of these."""
    copies: dict[fx.Node, fx.Node] = {}
    for node in list(graph.nodes):
        before = node.meta.pop(_REPEATS, None)
        if before is None:
            continue
        if before not in copies:
            with graph.inserting_after(before):
                copies[before] = graph.call_function(_aten.clone.default, (before,))
            copies[before].meta["val"] = before.meta["val"]
            come_from(copies[before], before)
        in_place = writes_to_inputs(node.target)
        node.args = (node.args[0], copies[before]) if in_place else (copies[before],)
        node.kwargs = {}
        node.target = _aten.copy_.default if in_place else _aten.clone.default


def _not_repeated(what: str, node: fx.Node) -> CaptureError:
    return CaptureError(
        f"a region of torch.utils.checkpoint {what}, so that both of its runs count, and the second one is to draw the "
        f"random numbers of the first: a graph cannot repeat those of {node.target}",
        where=origin(node),
        hint="checkpoint what draws apart from what changes state",
    )


def _draws(node: fx.Node) -> bool:
    return is_random(node.target) or getattr(node.target, "overloadpacket", None) in _UNTAGGED


def _has_generator(node: fx.Node) -> bool:
    return node.kwargs.get("generator") is not None


def _draws_alike(before: fx.Node, node: fx.Node) -> bool:
    """True if an op draws for a tensor of the same form, by the same numbers, what another one draws."""
    forms = [_form(item.meta["val"]) for item in (before, node)]
    return before.target is node.target and forms[0] == forms[1] and _numbers(before) == _numbers(node)


def _form(value: Any) -> tuple[Any, ...]:
    return value.dtype, value.device, tuple(map(str, value.shape)), tuple(map(str, value.stride()))


def _numbers(node: fx.Node) -> list[str]:
    given = [*node.args, *node.kwargs.values()]
    return [repr(item) for item in given if not isinstance(item, fx.Node)]
