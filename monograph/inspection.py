"""What a user looks at in a Graph: its programs, and its step beside the eager one, value by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from monograph.capture.trace import capture
from monograph.compiler import Build
from monograph.errors import DefinitionError, SignatureError
from monograph.inspect.debug import debug_options
from monograph.inspect.diff import diff_text
from monograph.inspect.draw import draw
from monograph.inspect.html import tree_html, write_html
from monograph.inspect.nonfinite import (
    Nonfinite,
    NonfiniteReport,
    find_nonfinite,
    nan_in_backward,
    only_in_kernels,
)
from monograph.inspect.profile import Profile, profile
from monograph.inspect.replay import Replay
from monograph.inspect.text import explain_text, graph_text
from monograph.inspect.walk import Walk, own_inputs
from monograph.ir.call.signature import Call, Spec
from monograph.ir.call.tree import flatten, unflatten
from monograph.ir.probes import Probes
from monograph.ir.program import Program
from monograph.ir.text import Text
from monograph.numerics.put_back import Kept
from monograph.numerics.state import tied_paths
from monograph.numerics.verify import Subject, VerifyReport, verify
from monograph.passes.inline_parts import inline_parts
from monograph.saving import Saving


class Inspected(Saving):
    """The part of a Graph that shows what it does."""

    def show(self, stage: str = "final") -> Text:
        """The newest build's program as runnable Python; `stage` is "final", "capture" or a pass."""
        build = self._newest()
        stages = {item.name: item for item in build.stages}
        if stage != "final" and stage not in stages:
            raise DefinitionError(
                f"there is no stage {stage!r}", hint=f"stages: {', '.join([*stages, 'final'])}"
            )
        return build.program.text if stage == "final" else stages[stage].text

    def diff(self, pass_name: str) -> Text:
        """What a pass changed in the newest build's program, as a unified diff; empty if it changed nothing."""
        return Text(diff_text(self._newest().stages, pass_name))

    def explain(self) -> Text:
        """Why each build exists, what its passes did, and what it depends on: guards, constants, parameters without gradient."""
        return Text(explain_text(self.name, self.builds))

    def __repr__(self) -> str:
        owned, kind = self._owned(), type(self).__name__
        lines = self._debug.op_repr_with_py_stack
        return graph_text(self.name, kind, self._config, owned, self.builds, lines_of_ops=lines)

    def debug(
        self,
        v_level: int = 0,
        *,
        ranks: int | Sequence[int] | None = None,
        max_py_stack_depth: int = 2,
        only_user_py_stack: bool = True,
        op_repr_with_py_stack: bool = False,
    ) -> None:
        """Report on the terminal, and in the log `monograph.debug`, what the next compilations do while they do it.

        Level 0 reports the stages with their seconds, 1 also each module with its tensors, 2 each op as it is recorded,
        3 each op with the user's lines, at most `max_py_stack_depth`; -1 reports nothing. `ranks` says which processes
        report: one, a list, -1 for all; the first by default. `only_user_py_stack=False` shows torch's lines too, and
        `op_repr_with_py_stack` puts the lines into `print(graph)`. Raises DefinitionError.
        """
        self.__dict__["_debug"] = debug_options(
            v_level, ranks, max_py_stack_depth, only_user_py_stack, op_repr_with_py_stack
        )

    def verify(
        self, *args: Any, steps: int = 1, against: Literal["eager", "float64"] = "eager", **kwargs: Any
    ) -> VerifyReport:
        """Run the step eagerly and as the graph, from the present state and random numbers, and compare all of it.

        On `aten` every result and state tensor has to have eager's bits. A compiled backend, and `against="float64"`,
        are compared by the distance to float64. The report's `ok` says whether the promise holds; if not, `first` is the
        first op that differs, with the user's line, and the pass or the kernels that made it. Afterwards state, random
        numbers, gradients and counters are what they were. Raises DefinitionError for an unknown comparison.

        >>> import monograph as mg
        >>> mg.trace(lambda x: x * 2).verify(torch.ones(2)).ok
        True
        """
        if against not in ("eager", "float64") or steps < 1:
            raise DefinitionError(
                f"verify(steps={steps}, against={against!r})",
                hint='one step or more, against "eager" or "float64"',
            )
        leaves: list[Any] = []
        form = flatten((args, kwargs), leaves, ())

        def run(step: Callable[..., Any]) -> Any:
            args, kwargs = unflatten(form, iter(leaves))  # each step may change its containers
            return step(*args, **kwargs)

        with self._looking(args, kwargs) as call:
            subject = Subject(
                self.name,
                self._owned(),
                call,
                keep=lambda: Kept(self._request(call), self._store, self._first_state, self.builds),
                run_graph=lambda: run(self.__call__),
                run_eager=lambda: run(self.eager),
                prepare=lambda: self._prepared(call, args, kwargs),
                recapture=lambda: self._captured_again(call),
            )
            return verify(subject, steps=steps, against=against)

    def replay(self, *args: Any, **kwargs: Any) -> Replay:
        """The step to walk through, op by op, forwards and back: breakpoints by module or line, values of any node.

        It runs on copies: state, random numbers and gradients stay as they are. Of a compiled build it is the same
        step before compilation.

        >>> import monograph as mg
        >>> walk = mg.trace(lambda x: x * 2).replay(torch.ones(2))
        >>> walk.run()
        >>> walk.value("mul")
        tensor([2., 2.])
        """
        with self._looking(args, kwargs) as call:
            build, inputs = self._inputs(call, args, kwargs)
            tied = tied_paths(self._owned().named_modules())
            return Replay(self.name, Walk(build.stages[0].program, inputs), tied)

    def find_nonfinite(self, *args: Any, **kwargs: Any) -> NonfiniteReport:
        """The first op of this step that makes a NaN or an infinity which reaches a result or the new state.

        The step runs on copies, op by op; nothing changes. If that is finite, the backend's kernels are asked.

        >>> import monograph as mg
        >>> mg.trace(torch.sqrt).find_nonfinite(torch.tensor([-1.0])).found.kind
        'NaN'
        """
        with self._looking(args, kwargs) as call:
            build, inputs = self._inputs(call, args, kwargs)
            return self._nonfinite(build, inputs)

    def profile(self, *args: Any, **kwargs: Any) -> Profile:
        """How long each op of this step takes, summed by op, module and phase, and how near that is to the roofline.

        Ops are timed one by one on copies, as captured; the step as it is built is timed as a whole. Nothing changes.
        `str()` of the result is a table; its `trace(path)` is for chrome://tracing and Perfetto.

        >>> import monograph as mg
        >>> mg.trace(lambda x: x * 2).profile(torch.ones(2)).ops[0].op
        'mul.Tensor'
        """
        with self._looking(args, kwargs) as call:
            build, inputs = self._inputs(call, args, kwargs)
            return profile(self.name, build, inputs)

    def to_html(self, path: str | Path, *, profile: Profile | None = None) -> None:
        """Write one page that shows the newest build: modules, program, source, memory, passes. It needs no network.

        `profile` is what `graph.profile(*inputs)` gave; its times and a flame graph are on the page then. Raises
        DefinitionError without a build, or if `path` does not end in .html.
        """
        write_html(path, self.name, self._newest(), self.explain(), profile)

    def draw(self, path: str | Path, *, module: str | None = None) -> None:
        """Draw the newest build as captured: a .dot file for Graphviz, or an .svg file.

        With `module` only the ops of that module and of those inside it. Raises DefinitionError if there are none.
        """
        draw(path, inline_parts(self._newest().stages[0].program), module)

    def _repr_html_(self) -> str:
        """For notebooks: the tree of `print(graph)`, to be unfolded."""
        return tree_html(repr(self))

    def probes(self) -> Probes:
        """What `mg.probe` recorded in the steps so far, by the name of the probe."""
        return Probes(self._probes.read())

    # --- inside ------------------------------------------------------------------------------------------------------

    def _nonfinite(self, build: Build, inputs: Sequence[Any]) -> NonfiniteReport:
        report = find_nonfinite(self.name, Walk(build.stages[0].program, inputs, keep=False))
        return only_in_kernels(self.name, build, inputs) if report.ok else report

    def _nan_in_backward(self, build: Build, inputs: Sequence[Any]) -> Nonfinite | None:
        return nan_in_backward(Walk(build.stages[0].program, inputs, keep=False))

    def _newest(self) -> Build:
        builds: Sequence[Build] = self.builds
        if not builds:
            raise DefinitionError(f"{self.name} has no build yet", hint="call it, or compile(), first")
        return builds[-1]

    @contextmanager
    def _looking(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Call]:
        """There is a build for the call, and what happens inside leaves no trace in the graph's state."""
        self._check_usable()
        args, kwargs = self._formed(args, kwargs)
        call: Call = self._read(args, kwargs)
        if Spec in map(type, call.leaves):
            raise SignatureError("values are looked at with tensors", hint="mg.spec is for compile()")
        with self._store.lock, self._probes.kept():
            self.compile(*args, **kwargs)
            kept = Kept(self._request(call), self._store, self._first_state, self.builds)
            try:
                yield call
            finally:
                kept.restore()

    def _prepared(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Build, list[Any]]:
        """The build for the step that comes next, and what it would be given."""
        if self._first_state.waiting:
            self._first_state.show()
        build: Build = self._build_for(call, args, kwargs)
        return build, build.executor.bind(call.leaves)

    def _inputs(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Build, list[Any]]:
        build, bound = self._prepared(call, args, kwargs)
        return build, own_inputs(bound)

    def _captured_again(self, call: Call) -> Program:
        with self._in_build():
            captured = capture(self._request(call))
        captured.undo()
        return captured.program
