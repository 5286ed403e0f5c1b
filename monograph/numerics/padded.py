"""A step on padded arguments: compared once for each bucket with the step without padding, and its results cut back.

The step without padding runs in eager mode, and all that it changes is put back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from monograph.compat.modes import FunctionMode
from monograph.internals.eager_call import eager_call
from monograph.internals.internals import Arguments, Internals
from monograph.ir.call.tree import flatten, leaf_paths, unflatten
from monograph.ir.meta import origin, output_nodes
from monograph.numerics.nearness import Apart, apart, comparable, tolerance_of
from monograph.numerics.put_back import Kept
from monograph.padding.arguments import Fit, Padded
from monograph.padding.results import Observation, Rules
from monograph.state.random import RandomState

LOGGER = logging.getLogger("monograph")
_SHOWN = 3  # results that a warning names
_MOST_OTHERS = 2  # other buckets that are tried where the step does not run without padding
_OFF = {"training": False, "train": False, "dropout_p": 0.0}  # keywords of functions that drop
_TRAINING, _DROPOUT_OF_ATTENTION = 2, 4  # the same by position
_WHAT_TO_DO = (
    "Give labels a padding that the loss ignores (pad=-100 for cross_entropy), give the model a mask, "
    "or weight the mean by the mask"
)


def read_padded(inside: Internals, arguments: Arguments) -> Padded:
    """The arguments of a call, padded to the buckets of the configuration."""
    registry = inside.registry
    return registry.config.padding.read(
        inside.settings.buckets, registry.graph.build, arguments, inside.formed
    )


class _Ran(NamedTuple):
    """What a step without effect gave, as copies."""

    result: Any
    drew: bool  # random numbers


@dataclass
class _Beside:
    """What the step gives without padding; and with it, if the step itself draws random numbers."""

    expected: Any = None
    got: Any = None  # None for what the step itself gives
    fault: str = ""  # why there is nothing to compare with
    ran: bool = False


class PaddedStep:
    """One step of a graph whose configuration has buckets: `arguments` are what it is run on."""

    def __init__(self, inside: Internals, arguments: Arguments, *, is_eager: bool = False) -> None:
        self._inside = inside
        self._padding = inside.registry.config.padding
        self._padded = read_padded(inside, arguments)
        self.arguments: Arguments = self._padded.arguments
        self._is_new = self._padded.is_padded and self._padded.key not in self._padding.compared
        self._beside = _Beside()
        for fit in self._padded.fits:
            if fit.is_larger:
                text = f"{fit.group} has the size {fit.present}, and the largest bucket is smaller: such steps run unpadded"
                self._warn_once(fit.group, text)
        if self._is_new and inside.settings.compare_buckets:
            with suppress(Exception) if is_eager else nullcontext():
                self._make_build()  # which knows what is to be put back
            self._beside = self._run_beside()

    def finish(self, result: Any) -> Any:
        """The result of the step, cut back."""
        padded, padding = self._padded, self._padding
        padded.write_back()
        if not padded.is_padded:
            padding.count(padded, None)
            given = padded.given_by_copy
            return _replaced(result, lambda leaf: given.get(id(leaf), leaf)) if given else result
        form = padded.key, flatten(result, [])
        rules = padding.rules.get(form)
        if rules is None:
            rules = padding.rules[form] = self._observed(result)
        padding.compared.add(padded.key)
        found, left = rules.cut(result, padded.fits, padded.given_by_copy)
        for path in left:
            text = f"{path} is not cut back with {padded.text}: how its sizes follow those is not known"
            self._warn_once(path, text)
        padding.count(padded, self._compared(found, rules) if self._is_new else None)
        return found

    # --- the step without padding ------------------------------------------------------------------------------------

    def _make_build(self) -> None:
        inside = self._inside
        inside.check_usable()
        with inside.first_state.hidden(inside.registry.optimizers):
            inside.build_for(inside.read(*self.arguments), *self.arguments)

    def _run_beside(self) -> _Beside:
        try:
            ran = self._run(self._sizes())
            if not ran.drew:
                return _Beside(ran.result, ran=True)
            ran = self._run(self._sizes(), _without_dropout())
            if ran.drew:
                return _Beside(ran.result, fault="the step draws random numbers", ran=True)
            got = self._run([fit.padded for fit in self._padded.fits], _without_dropout()).result
            return _Beside(ran.result, got, ran=True)
        except Exception as error:
            said = f"{type(error).__name__}: {error}".partition("\n")[0]
            return _Beside(fault=f"without padding the step raises {said}")

    def _sizes(self) -> list[int]:
        return [fit.present for fit in self._padded.fits]

    def _run(self, sizes: Sequence[int], around: AbstractContextManager[Any] | None = None) -> _Ran:
        """The step in eager mode with these sizes, by group. Nothing that it does stays."""
        inside, arguments = self._inside, self._padded.with_sizes(sizes)
        with inside.probes.kept():
            call = inside.read(*arguments)
            kept = Kept(inside.request(call), inside.store, inside.first_state, inside.builds)
            try:
                before = RandomState.now()
                with around or nullcontext():
                    result = eager_call(inside, *arguments)
                leaves: list[Any] = []
                flatten(result, leaves)
                copies = {id(leaf): _copied(leaf) for leaf in leaves}
                return _Ran(_replaced(result, lambda leaf: copies[id(leaf)]), _has_moved(before))
            finally:
                kept.restore()

    # --- how results follow sizes ------------------------------------------------------------------------------------

    def _observed(self, result: Any) -> Rules:
        """How the results follow the sizes, by steps of other sizes; none where all results are numbers."""
        padded = self._padded
        seen = [Observation.of([fit.padded for fit in padded.fits], result)]
        if any(seen[0].shapes):
            if self._beside.ran:
                seen.append(Observation.of(self._sizes(), self._beside.expected))
            else:
                seen += self._observations([self._sizes()])
            if len(seen) == 1:
                seen += self._observations(_others(padded))
            elif seen[1].shapes != seen[0].shapes:
                seen += self._observations([_probe(padded.fits)])
        return Rules.seen_in(seen) if len(seen) > 1 else Rules.unknown(seen[0])

    def _observations(self, sizes: Sequence[Sequence[int]]) -> Iterator[Observation]:
        for item in sizes:
            with suppress(Exception):  # a step need not run with each size
                yield Observation.of(item, self._run(item).result)

    # --- what the comparison says ------------------------------------------------------------------------------------

    def _compared(self, result: Any, rules: Rules) -> str:
        """What the step without padding gives, as a sentence; a warning if it is something else."""
        beside = self._beside
        if not beside.ran:
            return f"not compared: {beside.fault}" if beside.fault else ""
        if beside.fault:
            return f"not compared: {beside.fault}"
        got = result
        if beside.got is not None:
            got, _ = rules.cut(beside.got, self._padded.fits, {})
        compared, found = self._differences(beside.expected, got)
        if not compared:
            return "not compared: the step gives no number"
        if not found:
            return "the same results as without padding"
        items = found[:_SHOWN]
        more = f", and {len(found) - len(items)} more" if len(found) > len(items) else ""
        seen = "; ".join(f"{name} is {item}" for name, item in items) + more
        LOGGER.warning(
            "%s: with %s the step sees the padding: %s. %s",
            self._inside.name,
            self._padded.text,
            seen,
            _WHAT_TO_DO,
        )
        return f"the step sees the padding: {seen}"

    def _differences(self, expected: Any, got: Any) -> tuple[int, list[tuple[str, Apart]]]:
        """How many results were compared, and those that differ, numbers first."""
        ours: list[Any] = []
        theirs: list[Any] = []
        tree = flatten(got, ours)
        if flatten(expected, theirs) != tree:
            return 0, []
        tolerance = tolerance_of(self._inside.owned(), self._inside.settings.amp)
        compared = 0
        found: list[tuple[str, Apart]] = []
        for index, (path, one, other) in enumerate(
            zip(leaf_paths(tree, "result"), theirs, ours, strict=True)
        ):
            if comparable(one, other):
                compared += 1
                if (difference := apart(one, other, tolerance)) is not None:
                    found.append((path + self._line(index), difference))
        return compared, sorted(found, key=lambda item: not item[1].is_number)

    def _line(self, index: int) -> str:
        """The user's line that makes a result."""
        program = self._inside.builds[-1].stages[0].program if self._inside.builds else None
        for port, node in zip(program.outputs, output_nodes(program.graph), strict=True) if program else ():
            if (
                port.path == f"result.{index}"
                and isinstance(node, torch.fx.Node)
                and (place := str(origin(node)))
            ):
                return f" ({place})"
        return ""

    def _warn_once(self, about: str, text: str) -> None:
        if about not in self._padding.reported:
            self._padding.reported.add(about)
            LOGGER.warning("%s: %s", self._inside.name, text)


def _probe(fits: Sequence[Fit]) -> list[int]:
    """Other sizes for those that are padded; no two groups are apart by the same from what they are."""
    found, moves = [], set[int]()
    for fit in fits:
        if fit.present == fit.padded:
            found.append(fit.present)
            continue
        tried = [*range(fit.present // 2, 0, -1), *range(fit.present + 1, 3 * fit.padded)]
        size = next(
            item
            for item in tried
            if item not in (fit.present, fit.padded) and item - fit.present not in moves
        )
        moves.add(size - fit.present)
        found.append(size)
    return found


def _others(padded: Padded) -> list[list[int]]:
    """The sizes of other buckets for what is padded."""
    sizes = {row.group: row.buckets.sizes for row in padded.form.rows}
    found: list[list[int]] = []
    for number in range(_MOST_OTHERS):
        item = []
        for group, fit in enumerate(padded.fits):
            others = [size for size in sizes[group] if size != fit.padded]
            item.append(fit.padded if fit.present == fit.padded or len(others) <= number else others[number])
        if item not in (*found, [fit.padded for fit in padded.fits]):
            found.append(item)
    return found


def _replaced(result: Any, change: Callable[[Any], Any]) -> Any:
    leaves: list[Any] = []
    tree = flatten(result, leaves)
    return unflatten(tree, iter(list(map(change, leaves))))


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _has_moved(before: RandomState) -> bool:
    """True if random numbers were drawn since."""
    now = RandomState.now()
    return bool(before.moved()) or not all(map(torch.equal, before.devices, now.devices))


@contextmanager
def _without_dropout() -> Iterator[None]:
    """Inside, nothing is dropped."""

    def see(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(function, "__name__", "")
        if "dropout" in name and len(args) > _TRAINING:
            args = (*args[:_TRAINING], False, *args[_TRAINING + 1 :])
        elif name == "scaled_dot_product_attention" and len(args) > _DROPOUT_OF_ATTENTION:
            args = (*args[:_DROPOUT_OF_ATTENTION], 0.0, *args[_DROPOUT_OF_ATTENTION + 1 :])
        kwargs |= {key: off for key, off in _OFF.items() if key in kwargs}
        return function(*args, **kwargs)

    with FunctionMode(see):
        yield
