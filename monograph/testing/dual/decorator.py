"""`@autotest`: a test whose calls through the dual torch are run with random data and aligned with graphs."""

from __future__ import annotations

import functools
import inspect
import unittest
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, Literal

import torch
from hypothesis import HealthCheck, Phase, given, reject, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from monograph.testing import environment
from monograph.testing.dual.case import Case, Options, Tally, running
from monograph.testing.dual.objects import DualTensor
from monograph.testing.modes import Mode
from monograph.testing.strategies.tensors import SEEDS

_REFUSALS_FOR_ONE = 20  # so many refused cases for one that passed mean that the test itself is wrong
_PATIENCE = 50  # so many are refused without one that passed before no more are tried
_CASE_NAMES: Final = ("test_case", "self")
_TALLY: Final[ContextVar[Tally | None]] = ContextVar("monograph_autotest_tally", default=None)


def autotest(
    n: int = 20,
    auto_backward: bool | Literal["auto"] = True,
    rtol: float | None = None,
    atol: float | None = None,
    check_graph: bool | Literal["ValidatedFalse"] = True,
    check_dtype: bool = False,
    check_allclose: bool = True,
    check_grad_use_random_data: bool = True,
    include_complex: bool = False,
    *,
    modes: Sequence[str | Mode] = ("aten",),
    calls: int = 3,
) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Run the test with `n` random cases; each call through the dual `torch` must give in a graph what eager gives.

    Without `rtol` and `atol` that means what the mode promises: the same bits in "aten". `auto_backward` says if
    gradients are compared and if backward runs from what the test returns; with "auto" only where there is one.
    `check_graph="ValidatedFalse"` runs in eager mode only, and says that a graph is known not to take the test. Cases
    that PyTorch itself refuses are not counted. Failures shrink, and replay as Hypothesis says.
    """
    options = Options(
        n,
        auto_backward,
        rtol,
        atol,
        check_graph,
        check_dtype,
        check_allclose,
        check_grad_use_random_data,
        include_complex,
        tuple(modes),
        calls,
    )
    return functools.partial(_decorated, options)


def _decorated(options: Options, test: Callable[..., Any]) -> Callable[..., None]:
    supplied = _supplied_name(test)
    checked = _hypothesis_test(options, test)

    @functools.wraps(checked)
    def run(*args: Any, **kwargs: Any) -> None:
        if supplied and not args and supplied not in kwargs:
            args = (unittest.TestCase(),)
        tally = Tally(args, kwargs)
        _take_over_decorators(run, checked)
        token = _TALLY.set(tally)
        try:
            checked()
        except HypothesisException:
            _judge(test, tally)
            raise
        finally:
            _TALLY.reset(token)
        _judge(test, tally)
        if environment.verbose():
            print(f"{test.__qualname__}: {tally.passed} cases passed, PyTorch refused {tally.refused}")

    signature = inspect.signature(test)
    visible = [parameter for parameter in signature.parameters.values() if parameter.name != supplied]
    run.__signature__ = signature.replace(parameters=visible)  # type: ignore[attr-defined]
    return run


def _hypothesis_test(options: Options, test: Callable[..., Any]) -> Callable[..., None]:
    """The test as Hypothesis runs it: one call of the body is one case. It takes its arguments from the tally."""

    @functools.wraps(test)
    def body(_data: st.DataObject) -> None:
        tally = _TALLY.get()
        assert tally is not None
        if tally.refused >= _PATIENCE + _REFUSALS_FOR_ONE * tally.passed:
            reject()
        seed = _data.draw(SEEDS, label="seed")
        complex_numbers = options.include_complex and _data.draw(st.booleans(), label="complex numbers")
        case = Case(_data, options, tally, seed, complex_numbers)
        with torch.random.fork_rng(), running(case):
            torch.manual_seed(case.seed)
            try:
                _backward(case, test(*tally.args, **tally.kwargs))
                for check in case.checks:
                    check.run()
            except (HypothesisException, unittest.SkipTest):
                raise
            except Exception as error:
                error.add_note(case.program.text(case.seed))
                raise
        tally.passed += 1

    own = inspect.Parameter("_data", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    body.__signature__ = inspect.Signature([own])  # type: ignore[attr-defined]
    configured = settings(
        max_examples=options.examples,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        phases=[phase for phase in settings().phases if phase is not Phase.explain],
    )
    decorated: Callable[..., None] = configured(given(_data=st.data())(body))
    return decorated


def _backward(case: Case, result: Any) -> None:
    """Backward from what the test returned, in eager mode: PyTorch must be able to."""
    returned = result if isinstance(result, (tuple, list)) else [result]
    for item in returned:
        tensor = item.pytorch if isinstance(item, DualTensor) else item
        if not isinstance(tensor, torch.Tensor) or case.options.auto_backward is False:
            continue
        if case.options.auto_backward == "auto" and not tensor.requires_grad:
            continue
        random = case.options.random_gradients
        gradient = torch.rand_like(tensor) if random and tensor.requires_grad else torch.ones_like(tensor)
        try:
            tensor.backward(gradient, retain_graph=True)
        except RuntimeError as error:
            case.refuse(error)


def _supplied_name(test: Callable[..., Any]) -> str:
    """The name of the parameter that takes a TestCase where the caller has none; empty for methods."""
    is_method = "." in test.__qualname__ and not test.__qualname__.rpartition(".")[0].endswith("<locals>")
    first = next(iter(inspect.signature(test).parameters), "")
    return first if first in _CASE_NAMES and not is_method else ""


def _take_over_decorators(outer: Callable[..., Any], inner: Callable[..., Any]) -> None:
    """`@seed`, `@reproduce_failure` and `@settings` above `@autotest` leave their marks on what it gave."""
    marks = {name: mark for name, mark in vars(outer).items() if name.startswith("_hypothesis_internal_use")}
    vars(inner).update(marks)


def _judge(test: Callable[..., Any], tally: Tally) -> None:
    """Raise ValueError if hardly a case was one that PyTorch takes."""
    if tally.refused and tally.refused >= _REFUSALS_FOR_ONE * tally.passed:
        total = tally.refused + tally.passed
        raise ValueError(
            f"{test.__qualname__} is stuck: PyTorch itself refused {tally.refused} of {total} cases, "
            f"the last with {tally.last_refusal!r}. Give the generators narrower ranges, or types."
        ) from None
