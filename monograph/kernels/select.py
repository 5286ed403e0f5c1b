"""Kernel selection: matrix products, convolutions and attention get the kernel that is fastest here, as ordinary ops."""

from __future__ import annotations

import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from monograph.ir.call.nested import leaves_in
from monograph.ir.meta import TensorMeta, compute_nodes, form, metas, origin, set_origin, value
from monograph.ir.printer import spell_target
from monograph.ir.program import Program
from monograph.ir.verify import verify
from monograph.kernels.attention import ATTENTION
from monograph.kernels.candidates import (
    DEFAULT,
    PRODUCTS,
    Candidate,
    Form,
    Table,
    arguments_of,
    fitting,
    form_of,
    forms_of,
    operands_of,
    options_of,
)
from monograph.kernels.channels_last import CONVOLVED, channels_last
from monograph.kernels.compile import KernelCompiler, kernels_in
from monograph.kernels.convolutions import CONVOLUTIONS
from monograph.kernels.cross_entropy import with_cross_entropy
from monograph.kernels.own import OWN
from monograph.kernels.trials import seconds_of, tensors_of
from monograph.kernels.tuned import TunedKernel, Verdict, is_known, remembered, verdict_on
from monograph.passes.dce import dce
from monograph.passes.run import Stage
from monograph.settings import Settings
from monograph.sizes.size import Undecided

CANDIDATES: Table = {**PRODUCTS, **CONVOLUTIONS, **ATTENTION}
COMPILED: Table = {**CANDIDATES, **{op: (*CANDIDATES[op], *own) for op, own in OWN.items()}}

aten = torch.ops.aten


def select_kernels(before: Stage, settings: Settings) -> tuple[Stage, tuple[TunedKernel, ...]]:
    """The next stage of a program: with the kernels that are fastest here, or as it is where a choice depends on its sizes."""
    start = time.perf_counter()
    try:
        program, choices = select(before.program, settings)
    except Undecided:
        program, choices = before.program, ()
    verify(program, after="kernels")
    return Stage("kernels", program, time.perf_counter() - start), choices


def select(
    program: Program, settings: Settings, candidates: Table | None = None
) -> tuple[Program, tuple[TunedKernel, ...]]:
    """Time the candidates of each op on its real shapes, strides and threads, and write the winners into the program.

    The second result lists what was chosen, one entry for all nodes that do the same.
    """
    if not settings.is_on(settings.kernel_selection):
        return program, ()
    losses: tuple[TunedKernel, ...] = ()
    if candidates is None:
        candidates = COMPILED if settings.is_compiled else CANDIDATES
        if settings.is_compiled:
            program, losses = with_cross_entropy(program)
    products = {op: candidates[op] for op in candidates if op in PRODUCTS}
    others = {op: candidates[op] for op in candidates if op not in PRODUCTS}
    program, choices = _with_other_kernels(program, others)
    trials = _Tuning(program, products)  # also of those that convolutions were written as
    return trials.written(), (*losses, *choices, *trials.choices())


def _with_other_kernels(program: Program, candidates: Table) -> tuple[Program, tuple[TunedKernel, ...]]:
    """A program with the fastest kernels and layout for all but matrix products."""
    images = [node for node in compute_nodes(program.graph) if node.target in CONVOLVED]
    as_is = _Tuning(program, candidates)
    other = program if any(map(_varies, images)) else channels_last(program)
    if other is program:
        return as_is.written(), as_is.choices()
    last = _Tuning(other, candidates)
    seconds = {"as_is": as_is.seconds_of_images(), "channels_last": last.seconds_of_images()}
    verdict = verdict_on(seconds, "as_is")
    nodes = tuple(node.name for node in images)
    layout = TunedKernel("layout of images", (), "as_is", verdict.winner, seconds, nodes)
    best = last if verdict.winner == "channels_last" else as_is
    return best.written(), (layout, *best.choices())


@dataclass(frozen=True)
class _Group:
    """Nodes that do the same, what may be tried for them, and what won."""

    nodes: list[fx.Node]
    tried: tuple[Candidate, ...]
    verdict: Verdict

    @property
    def winner(self) -> Candidate | None:
        """What they are to be written with; None for what they are."""
        return next((item for item in self.tried if item.name == self.verdict.winner), None)


class _Tuning:
    """The kernels of one program, those of nodes that do the same tried once."""

    def __init__(self, program: Program, candidates: Table) -> None:
        self.program = program
        alike: dict[tuple[str, ...], list[fx.Node]] = {}
        for node in compute_nodes(program.graph):
            if node.target in candidates and _takes_tensors(node) and not _varies(node):
                alike.setdefault(_features(node), []).append(node)
        tried = {
            features: fitting(nodes[0], candidates[nodes[0].target]) for features, nodes in alike.items()
        }
        unknown = [features for features in alike if not is_known(features, _names(tried[features]))]
        self.compiler = KernelCompiler(
            kernel
            for features in unknown
            for item in tried[features]
            for kernel in kernels_in(form_of(alike[features][0], item).graph)
        )
        self.groups = [
            _Group(nodes, tried[features], self._verdict(nodes[0], features, tried[features]))
            for features, nodes in alike.items()
            if tried[features] or nodes[0].target in CONVOLVED
        ]

    def _verdict(self, node: fx.Node, features: tuple[str, ...], tried: tuple[Candidate, ...]) -> Verdict:
        def measure() -> Mapping[str, float]:
            forms = forms_of(node, tried)
            return seconds_of(forms, tensors_of(forms[0]), self.compiler)

        return remembered(features, _names(tried), measure)

    def choices(self) -> tuple[TunedKernel, ...]:
        """What was chosen where there was a choice."""
        return tuple(_choice(group) for group in self.groups if group.tried)

    def written(self) -> Program:
        """The program with the winners."""
        chosen: dict[str, Form] = {}
        for group in self.groups:
            if group.winner is not None:
                form = form_of(group.nodes[0], group.winner)
                chosen |= {node.name: form for node in group.nodes}
        return written(self.program, chosen) if chosen else self.program

    def seconds_of_images(self) -> float:
        """What convolutions take by their best kernels, with the copies into other layouts."""
        total = 0.0
        for group in self.groups:
            if group.nodes[0].target in CONVOLVED:
                total += group.verdict.seconds.get(group.verdict.winner, 0.0) * len(group.nodes)
        for node in compute_nodes(self.program.graph):
            if node.target is aten.clone.default and _takes_tensors(node):
                total += self._verdict(node, _features(node), ()).seconds.get(DEFAULT, 0.0)
        return total


def _takes_tensors(node: fx.Node) -> bool:
    return all(form(item) is not None for item in node.all_input_nodes)


def _varies(node: fx.Node) -> bool:
    """True if its kernel is one for many sizes: no measurement at one of them is one at the others."""
    return any(meta.varies for item in (node, *node.all_input_nodes) for meta in metas(value(item)))


def _names(tried: Sequence[Candidate]) -> tuple[str, ...]:
    return DEFAULT, *(item.name for item in tried)


def _choice(group: _Group) -> TunedKernel:
    first, verdict = group.nodes[0], group.verdict
    operands = tuple(_shown(item) for item in arguments_of(first) if isinstance(item, TensorMeta))
    nodes = tuple(node.name for node in group.nodes)
    return TunedKernel(spell_target(first.target), operands, DEFAULT, verdict.winner, verdict.seconds, nodes)


def _shown(item: TensorMeta) -> str:
    """`f32[4, 8]`, or `f32[4, 8] transposed`: a matrix that is stored the other way round is another case."""
    return f"{item} transposed" if len(item.shape) > 1 and item.stride[-1] > item.stride[-2] else str(item)


def _features(node: fx.Node) -> tuple[str, ...]:
    """All that the time of a node depends on besides the machine."""
    options = [f"{name}={_fact(item)}" for name, item in options_of(node).items()]
    results = [*map(_fact, leaves_in(value(node)))]
    return spell_target(node.target), *map(_fact, arguments_of(node)), *options, repr(results)


def _fact(item: Any) -> str:
    if isinstance(item, TensorMeta):
        return f"{item.dtype} {item.shape} {item.stride} {item.device}"
    return repr(item)


def written(program: Program, forms: Mapping[str, Form]) -> Program:
    """The program with some nodes in other forms."""
    changed = program.rebuilt()
    for node in list(compute_nodes(changed.graph)):
        if node.name in forms:
            _write(node, forms[node.name])
    return dce(changed)


def _write(node: fx.Node, chosen: Form) -> None:
    given = iter(operands_of(node))
    new: dict[fx.Node, Any] = {}
    with node.graph.inserting_before(node):
        for item in chosen.graph.nodes:
            if item.op == "placeholder":
                new[item] = next(given)
            elif item.op == "call_function":
                new[item] = _copied(item, node, new)
    results = [new[item] if isinstance(item, fx.Node) else item for item in chosen.results]
    for user in list(node.users):
        if user.target is operator.getitem:
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            node.graph.erase_node(user)
    if node.users:
        node.replace_all_uses_with(results[0])
    node.graph.erase_node(node)


def _copied(item: fx.Node, node: fx.Node, new: Mapping[Any, Any]) -> Any:
    """An op of a form where `node` stands, for whom it works; a transposed transposed matrix is the matrix."""
    if item.target is aten.t.default and (source := new[item.args[0]]).target is aten.t.default:
        return source.args[0]
    copy = node.graph.node_copy(item, new.__getitem__)
    set_origin(copy, origin(node))
    return copy
