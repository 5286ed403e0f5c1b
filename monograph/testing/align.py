"""align: a function or a module gives in every mode what it gives in eager mode, gradients and updates included."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Literal

import numpy as np
import torch

from monograph import MonographError
from monograph.compat.tensors import storage_key
from monograph.numerics.judge import same_bits
from monograph.testing import environment
from monograph.testing.alignment.arguments import Arguments
from monograph.testing.alignment.calls import Calls, plan_calls
from monograph.testing.alignment.case import Case
from monograph.testing.alignment.comparison import Tolerance, compare, same_states
from monograph.testing.alignment.eager_and_graph import Candidate, Reference
from monograph.testing.alignment.record import Record, random_states
from monograph.testing.alignment.refusals import (
    check_more,
    check_options,
    check_target,
    checked_kwargs,
    checked_modes,
    outside_tensors,
)
from monograph.testing.alignment.report import Failure, print_step
from monograph.testing.alignment.step import MakeOptimizer, Target, seed_all
from monograph.testing.modes import Mode

_MANY_FINDINGS = 6


@dataclass(frozen=True)
class Alignment:
    """What was compared, and found equal."""

    name: str
    modes: tuple[str, ...]
    calls: tuple[str, ...]  # where the values of each call came from
    backward: bool  # gradients were compared
    builds: Mapping[str, int]  # of each mode's last graph

    def __str__(self) -> str:
        what = "forward and backward" if self.backward else "forward"
        return f"{self.name}: {what} aligned in {', '.join(self.modes)} ({len(self.calls)} calls each)"


def align(
    fn_or_module: Target,
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    modes: Sequence[str | Mode] = ("aten",),
    grad: bool = True,
    against: Literal["eager", "float64"] | Callable[..., Any] = "eager",
    calls: int = 3,
    more: Sequence[tuple[Any, ...]] = (),
    seed: int | None = None,
    optimizer: MakeOptimizer | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    check_dtype: bool = True,
    verbose: bool = False,
) -> Alignment:
    """Check that a function or a module gives in each mode what it gives in eager mode.

    A graph of the forward, and with `grad` a second one of the whole step (forward, backward from random gradients,
    the update of a module's parameters), are each called `calls` times: with the given arguments, then with fresh
    values of the same signature, and with the argument tuples in `more`. Compared after each call are results, what the
    arguments hold afterwards, gradients of arguments and of parameters, parameters, buffers, optimizer state, random
    state; of every tensor type, dtype, shape, stride, device, `requires_grad` and whose memory it shares; and at the
    end whether earlier results are what they were. Arguments and module are copied; the given ones stay as they are.

    Gradients are taken for the tensors that require them if there is one, else for all floating-point tensors.
    The modes of the table `MODES` promise bits, or a distance to float64 of at most twice eager's; `against="float64"`
    asks for the latter always. `against` may be a function: the reference that `fn_or_module` should agree with, as
    nearly as `torch.testing.assert_close` asks. With `rtol` or `atol` values may differ by as much, and with
    `check_dtype=False` dtypes too.

    Raises AlignmentError, an AssertionError, at the first difference; it names a script that shows it on its own.
    An exception that eager mode raises for the given arguments passes through.

    >>> print(align(torch.nn.functional.softmax, torch.randn(3, 4), kwargs={"dim": 1}))
    softmax: forward and backward aligned in aten (3 calls each)
    """
    __tracebackhide__ = True
    check_target(fn_or_module, args)
    check_options(against, calls, more, seed, optimizer, (rtol, atol))
    close = callable(against) or rtol is not None or atol is not None
    case = Case(
        fn_or_module,
        Arguments(args, checked_kwargs(kwargs)),
        modes=checked_modes(modes),
        grad=grad,
        against=against,
        calls=calls,
        more=tuple(more),
        seed=environment.seed() if seed is None else seed,
        optimizer=optimizer,
        tolerance=Tolerance(rtol, atol, check_dtype, close),
        verbose=verbose or environment.verbose(),
    )
    check_more(case)
    return _aligned(case)


def _aligned(case: Case) -> Alignment:
    """Run the graphs of a case in each of its modes beside eager mode."""
    __tracebackhide__ = True
    with _own_random_state(), outside_tensors(case.target) as check_outside:
        forward = plan_calls(case, differentiate=False)
        backward = plan_calls(case, differentiate=True) if case.grad else None
        check_outside()
        plans = [plan for plan in (forward, backward) if plan is not None]
        builds = {mode.name: [_check(case, mode, plan) for plan in plans][-1] for mode in case.modes}
    origins = tuple(call.origin for call in plans[-1].items)
    return Alignment(case.name, tuple(builds), origins, backward is not None, builds)


def _check(case: Case, mode: Mode, calls: Calls) -> int:
    """Run one graph beside eager mode; gives the number of its builds."""
    __tracebackhide__ = True  # pytest shows the line of the test
    reference = Reference(case, calls.backward)
    exact = (
        None if case.bitwise(mode) or case.tolerance.close else Reference(case, calls.backward, exact=True)
    )
    try:
        candidate = Candidate(case, calls.backward, mode)
    except MonographError as error:  # such as an optimizer that a graph refuses
        raise Failure(case, mode, calls, 0, [_raised(error)], None).error() from error
    earlier: list[tuple[_Results, _Results]] = []
    for number, call in enumerate(calls.items):
        seed_all(call.seed)
        before = random_states()
        expected = reference.run(call)
        truth, tolerance = exact.run(call) if exact is not None else None, case.tolerance
        if truth is not None and not same_states(before, expected.random_states):
            truth, tolerance = None, replace(tolerance, close=True)  # float64 draws other random numbers
        try:
            got = candidate.run(call)
        except Exception as error:
            raise Failure(case, mode, calls, number, [_raised(error)], candidate.graph).error() from error
        seen = got.beside() if callable(case.against) else got
        wanted = expected.beside() if callable(case.against) else expected
        found = list(islice(compare(wanted, seen, tolerance, truth, case.reference_name), _MANY_FINDINGS))
        results = _Results(expected), _Results(got)
        found = found or _lost(earlier) or _used_again(earlier, *results)
        if found:
            found[1:1] = _not_repeatable(case, calls, number, expected)
            raise Failure(case, mode, calls, number, found, candidate.graph).error()
        earlier.append(results)
        if case.verbose:
            print_step(case, mode, calls, candidate.graph, got.results().leaves)
    return len(candidate.graph.builds)


def _not_repeatable(case: Case, calls: Calls, number: int, expected: Record) -> list[str]:
    """How eager mode differs from itself, if it does when it runs the calls up to this one once more."""
    reference = Reference(case, calls.backward)
    try:
        for call in calls.items[: number + 1]:
            seed_all(call.seed)
            again = reference.run(call)
    except Exception as error:  # what was found is reported all the same
        return [f"eager mode is not repeatable: run again {_raised(error)}"]
    differences = compare(expected, again, replace(case.tolerance, close=False), None)
    return [
        f"eager mode is not repeatable: run again from the same seed, {found}"
        for found in islice(differences, 1)
    ]


def _raised(error: Exception) -> str:
    return f"it raised {type(error).__name__}: {error}"


class _Results:
    """Results, arguments and gradients of a call, and their values when it returned."""

    def __init__(self, record: Record) -> None:
        self._tensors = dict(record.of_the_call())
        self._then = {path: tensor.detach().clone() for path, tensor in self._tensors.items()}

    def memory(self) -> dict[int, list[str]]:
        """The paths on each piece of memory."""
        found: dict[int, list[str]] = {}
        for path, tensor in self._tensors.items():
            if tensor.layout is torch.strided and tensor.numel() > 0:
                found.setdefault(storage_key(tensor), []).append(path)
        return found

    def changed(self) -> set[str]:
        """Those that have other values now."""
        return {path for path, tensor in self._tensors.items() if not same_bits(tensor, self._then[path])}


def _lost(earlier: list[tuple[_Results, _Results]]) -> list[str]:
    """Results of earlier calls that a later call changed, where eager mode did not."""
    return [
        f"{path} of call {number + 1} was changed by a later call"
        for number, (expected, got) in enumerate(earlier)
        for path in sorted(got.changed() - expected.changed())
    ]


def _used_again(earlier: list[tuple[_Results, _Results]], expected: _Results, got: _Results) -> list[str]:
    """Results on the memory of an earlier call, where eager mode takes memory of its own."""
    found = []
    for number, (expected_then, got_then) in enumerate(earlier):
        in_eager = expected_then.memory().keys() & expected.memory().keys()
        common = {path for key in in_eager for path in expected.memory()[key]}
        for key in got_then.memory().keys() & got.memory().keys():
            then = got_then.memory()[key][0]
            paths = [path for path in got.memory()[key] if path not in common]
            found += [f"{path} has the memory of {then} of call {number + 1}" for path in paths]
    return found


@contextmanager
def _own_random_state() -> Iterator[None]:
    """Leave the caller's random numbers as they are."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng():
            yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
