"""Captures that are not for a new form of calls: once more after a first run has failed, and for a size that comes often."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from monograph.capture.trace import LOGGER, MEND_KERNEL, WITH_VALUES, capture_with_values
from monograph.compat.modes import outside_of_modes
from monograph.compiler import Build, compile_step
from monograph.errors import CaptureError, MonographError, first_line
from monograph.internals.internals import Internals
from monograph.internals.misfit import misfit_behind, of_arguments
from monograph.ir.call.reason import Reason
from monograph.ir.call.signature import Call
from monograph.runtime.custom_ops import WrongDescription
from monograph.state.signals import interruptible

APART: Final = -1  # the number of a build that is none of the graph's yet


def made_again(graph: Internals, build: Build, call: Call, error: RuntimeError) -> Build:
    """A first run failed: a fake kernel may have reported a wrong layout. Trace again on real tensors."""
    if isinstance(error, WrongDescription):
        LOGGER.warning(
            "%s: %s; captured once more, on copies of the real tensors; %s", graph.name, error, MEND_KERNEL
        )
    else:
        LOGGER.info("%s: captured once more, %s (%s)", graph.name, WITH_VALUES, first_line(error))
    cache = graph.cache
    try:
        with interruptible() as hold:
            with graph.in_build(), outside_of_modes():
                again = compile_step(
                    graph.request(call),
                    reason=build.reason,
                    number=build.number,
                    hold=hold,
                    capture_by=capture_with_values,
                )
            if cache.is_by_names(build):  # fakes of real tensors have their sizes
                cache.forms.is_static(cache.drop(build))
                cache.keep(call.key, again)
            else:
                cache.replace(build, again)
    except MonographError:
        cache.drop(build)
        if isinstance(error, WrongDescription):
            raise CaptureError(str(error), where=error.where, hint=MEND_KERNEL) from None
        if (fault := misfit_behind(error, call, cache.signatures())) is not None:
            raise of_arguments(error, fault) from error
        raise error from None
    return again


def build_apart(graph: Internals, call: Call, reason: Reason) -> Build:
    """A build for a call, op by op, that is not kept: for code that is compiled while others run."""
    request = graph.request_of_build(call, is_rare=True)
    with interruptible() as hold, graph.in_build(), outside_of_modes():
        build = compile_step(request, reason=reason, number=APART, hold=hold)
    return replace(build, settings=graph.settings)
