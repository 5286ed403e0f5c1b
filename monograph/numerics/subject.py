"""A call of a graph that is looked at: it has a build, and nothing that happens meanwhile stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from monograph.capture.effects.python_objects.changed_numbers import moved_numbers
from monograph.capture.trace import capture, capture_with_values
from monograph.compiler import Build
from monograph.errors import SignatureError
from monograph.inspect.walk import Walk, own_inputs
from monograph.internals.internals import Arguments, Internals, internals_of
from monograph.ir.call.modes import GRADIENTS_THERE
from monograph.ir.call.signature import Call, Spec
from monograph.ir.call.tree import flatten, unflatten
from monograph.ir.program import Program
from monograph.numerics.padded import read_padded
from monograph.numerics.put_back import Kept
from monograph.state.find import Owned

_ABOUT_GRADIENTS = (
    "gradients are state, and after an update there are none: look at the call of a first batch then, or at another one where "
    "the loop makes it, after the batches before it"
)


@dataclass(frozen=True)
class Subject:
    """A Graph, and a call of it: `given` as the user has given it, `formed` as it is known by."""

    graph: Any
    given: Arguments
    formed: Arguments
    call: Call
    owned: Owned
    what: str  # the method by which it is looked at
    padded: str = ""  # which sizes of the arguments are padded, and to what
    made: str = ""  # which build was made for it, and why, if none of those that there were served it

    @property
    def inside(self) -> Internals:
        """That of the graph."""
        return internals_of(self.graph)

    def run_graph(self) -> Any:
        """The step of the graph."""
        return self._run(self.graph)

    def run_eager(self) -> Any:
        """The step in eager mode."""
        return self._run(self.graph.eager)

    def _run(self, step: Callable[..., Any]) -> Any:
        leaves: list[Any] = []
        form = flatten(self.given, leaves, ())
        args, kwargs = unflatten(form, iter(leaves))  # each step may change its containers
        return step(*args, **kwargs)

    def keep(self) -> Kept:
        """All that a step can change, as it is now."""
        inside = self.inside
        return Kept(inside.request(self.call), inside.store, inside.first_state, inside.builds)

    def prepare(self) -> tuple[Build, list[Any]]:
        """The build for the step that comes next, and what it would be given."""
        if self.inside.first_state.waiting:
            self.inside.first_state.show()
        build = self.inside.build_for(self.call, *self.formed)
        return build, build.executor.bind(self.call.leaves)

    def inputs(self) -> tuple[Build, list[Any]]:
        """The same, as copies."""
        build, bound = self.prepare()
        return build, own_inputs(bound)

    def said(self, word: str) -> dict[int, str]:
        """What each process says here, by number of the process."""
        inside = self.inside
        return inside.together.say(inside.name, inside.builds, word, self.what)

    def is_so_anywhere(self, found: bool) -> bool:
        """True if a process finds so: all have to go the same way, since they send what a step sends."""
        return "yes" in self.said("yes" if found else "no").values()

    def walk(self) -> Walk:
        """The step as captured, to be run op by op."""
        build, inputs = self.inputs()
        return Walk(build.stages[0].program, inputs)

    def recapture(self, build: Build) -> Program:
        """The step, captured once more, with the inputs that its build has."""
        inside = self.inside
        request = inside.request(inside.cache.known_as(self.call, build))
        with inside.in_build():
            again = capture_with_values if build.captured.with_values else capture
            captured = again(replace(request, moved=list(moved_numbers(build.guards.sources))))
        captured.undo()
        return captured.program


def _why_made(build: Build) -> str:
    why = f"build {build.number} was made for it ({build.reason})"
    return f"{why}; {_ABOUT_GRADIENTS}" if build.reason.place == GRADIENTS_THERE else why


@contextmanager
def looking_at(graph: Any, args: tuple[Any, ...], kwargs: dict[str, Any], what: str) -> Iterator[Subject]:
    """Look at a call of a Graph by a method of this name. At the end everything is as it was."""
    inside = internals_of(graph)
    inside.check_usable()
    formed = inside.formed(args, kwargs)
    padded = ""
    if inside.settings.buckets:  # what is looked at is the padded step
        read = read_padded(inside, formed)
        padded = read.text if read.is_padded else ""
        args, kwargs = formed = read.arguments
    call = inside.read(*formed)
    if Spec in map(type, call.leaves):
        raise SignatureError("values are looked at with tensors", hint="mg.spec is for compile()")
    with inside.store.lock, inside.probes.kept(), inside.registry.config.padding.kept():
        before = list(inside.builds)
        inside.cache.check_repeatable(call, f"{what}() runs the step more than once")
        with inside.advised.quietly() if what == "verify" else nullcontext():  # its report has the build
            graph.compile(*formed[0], **formed[1])
        inside.cache.check_repeatable(call, f"{what}() has captured the step")
        new = [build for build in inside.builds if build not in before] if before else []
        inside.together.meet(inside.name, inside.builds, what)
        made = "".join(map(_why_made, new[:1]))
        subject = Subject(graph, (args, kwargs), formed, call, inside.owned(), what, padded, made)
        kept = subject.keep()
        try:
            yield subject
        finally:
            kept.restore()
