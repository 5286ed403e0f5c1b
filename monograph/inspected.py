"""The methods of a Graph that look at it and change nothing. What they do is in other files; here they forward to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from monograph.call import build_of_call
from monograph.errors import CaptureError
from monograph.inspect.diff import diff_text
from monograph.inspect.listing import module_text
from monograph.inspect.printed.text import explain_text, stage_program
from monograph.internals.internals import RUNNING, internals_of
from monograph.ir.text import Text
from monograph.user_code.lines import user_place

if TYPE_CHECKING:  # what looks at a graph is imported when it is asked for
    from monograph.distributed.planning.report import RanksPlan
    from monograph.inspect.memory.report import MemoryReport
    from monograph.inspect.nonfinite_report import NonfiniteReport
    from monograph.inspect.pages.modules import StepSummary
    from monograph.inspect.profile import Profile
    from monograph.inspect.replay import Replay
    from monograph.numerics.verify import VerifyReport


def show(self: Any, stage: str = "final", *, module: str | None = None) -> Text:
    """The newest build's program as runnable Python; `stage` is "final", "capture" or a pass.

    With `module`, as "model.blocks.0", it is what belongs to that module and to those inside of it, in all phases, as a function
    of what it reads from outside. Raises DefinitionError for an unknown stage, and for a module that has no ops.

    >>> import monograph as mg
    >>> layer = torch.nn.Linear(8, 4)
    >>> step = mg.train_graph(layer, torch.nn.MSELoss(), torch.optim.SGD(layer.parameters(), lr=0.1))
    >>> step.compile(mg.spec((16, 8)), mg.spec((16, 4)))
    >>> "addmm" in step.show(module="model")
    True
    """
    program = stage_program(internals_of(self).newest(), stage)
    return program.text if module is None else module_text(program, module)


def diff(self: Any, pass_name: str) -> Text:
    """What a pass changed in the newest build's program, as a unified diff; empty if it changed nothing."""
    return Text(diff_text(internals_of(self).newest().stages, pass_name))


def explain(self: Any) -> Text:
    """Why each build exists, its steps, seconds and bytes, what its passes did, and what it depends on."""
    inside = internals_of(self)
    settings = [*inside.upgrades.lines(), *inside.registry.config.lines()]
    return explain_text(inside.name, inside.builds, inside.cache.num_dropped, settings)


def summary(self: Any, *args: Any, depth: int | None = None, **kwargs: Any) -> StepSummary:
    """The modules of this step as a tree: shapes of their outputs, parameters, FLOPs, and bytes at the peak.

    Arguments are tensors or specs, as `compile` takes them; a build is made if there is none for them. Without any it is the
    newest build, and without one the modules and parameters alone. `depth` is how deep the rows of the table go.
    `str()` of the result is that table. Nothing runs, and nothing is changed.

    >>> import monograph as mg
    >>> layer = nn.Linear(8, 4)
    >>> step = mg.train_graph(layer, nn.MSELoss(), torch.optim.SGD(layer.parameters(), lr=0.1))
    >>> found = step.summary(mg.spec((16, 8)), mg.spec((16, 4)))
    >>> found.num_parameters, found.flops["forward"], found.modules[0].output
    (36, 1024, 'f32[16, 4]')
    """
    from monograph.inspect.pages.modules import step_summary

    inside = internals_of(self)
    newest = inside.cache.all[-1] if inside.cache.all else None
    build = build_of_call(self, args, kwargs)[0] if args or kwargs else newest
    return step_summary(inside.name, inside.owned(), build, depth)


def verify(
    self: Any, *args: Any, steps: int = 1, against: Literal["eager", "float64"] = "eager", **kwargs: Any
) -> VerifyReport:
    """Run the step eagerly and as the graph, from the present state and random numbers, and compare all of it.

    On `aten` every result and state tensor has to have eager's bits. A compiled backend, and `against="float64"`,
    are compared by the distance to float64. The report's `ok` says whether the promise holds; if not, `first` is the
    first op that differs, with the user's line and the pass or kernels that made it. A call that no build serves gets
    one, which the report's `made` names. Nothing else is changed. Raises DefinitionError for an unknown comparison.

    >>> import monograph as mg
    >>> mg.trace(lambda x: x * 2).verify(torch.ones(2)).ok
    True
    """
    from monograph.numerics.verify import verify

    return verify(self, args, kwargs, steps=steps, against=against)


def replay(self: Any, *args: Any, **kwargs: Any) -> Replay:
    """The step to walk through, op by op, forwards and back: breakpoints by module or line, values of any node.

    It runs on copies, and nothing changes. Of a compiled build it is the same step before compilation.

    >>> import monograph as mg
    >>> walk = mg.trace(lambda x: x * 2).replay(torch.ones(2))
    >>> walk.run()
    >>> walk.value("mul")
    tensor([2., 2.])
    """
    from monograph.numerics.looks import replay

    return replay(self, args, kwargs)


def find_nonfinite(self: Any, *args: Any, **kwargs: Any) -> NonfiniteReport:
    """The first op of this step that makes a NaN or an infinity which reaches a result or the new state.

    It runs on copies, op by op; nothing changes. If that is finite, the backend's kernels are asked.

    >>> import monograph as mg
    >>> mg.trace(torch.sqrt).find_nonfinite(torch.tensor([-1.0])).found.kind
    'NaN'
    """
    from monograph.numerics.looks import find_nonfinite

    return find_nonfinite(self, args, kwargs)


def profile(self: Any, *args: Any, **kwargs: Any) -> Profile:
    """How long each op of this step takes, summed by op, module and phase, and how near that is to the roofline.

    Ops are timed one by one on copies, as captured, and the step as built as a whole; nothing changes. `str()` of
    the result is a table; its `trace(path)` is for chrome://tracing and Perfetto.

    >>> import monograph as mg
    >>> mg.trace(lambda x: x * 2).profile(torch.ones(2)).ops[0].op
    'mul.Tensor'
    """
    from monograph.numerics.looks import profile

    return profile(self, args, kwargs)


def memory(self: Any, *args: Any, **kwargs: Any) -> MemoryReport:
    """The bytes that this step will hold, and who holds them where they are most. Nothing runs, and nothing is changed.

    Arguments are tensors or specs, as `compile` takes them; a build is made if there is none for them. On the device
    `meta` a model needs no memory to be planned. `str()` of the result is a table, `plot(path)` draws the curve over
    the step.

    >>> import monograph as mg
    >>> mg.trace(lambda x: (x * 2).sum()).memory(mg.spec((1024,))).peak_bytes
    4100
    """
    from monograph.inspect.memory.reading import memory_report

    build, call = build_of_call(self, args, kwargs)
    return memory_report(internals_of(self).name, build, build.executor.bind(call.leaves))


def max_batch(self: Any, *args: Any, memory: float | str, **kwargs: Any) -> int:
    """The largest batch whose step holds no more than `memory` bytes: state, arguments, and what the step makes.

    `memory` is a number, or a text with a unit, such as "16 GiB" or "500 MB".
    The batch is the first dimension of the arguments, of all in which it is as long as in the first of them; or the one
    size that is an `mg.Dim`, within its range. Nothing runs, and no build is made: the step is planned, at the answer and at
    one more for certain. Raises PlanError if not even the smallest batch fits, and says what that holds.

    >>> import monograph as mg
    >>> mg.trace(lambda x: (x * 2).sum()).max_batch(mg.spec((1, 256)), memory=2**20)
    511
    """
    from monograph.internals.largest_batch import largest_batch

    return largest_batch(internals_of(self), args, kwargs, memory)


def plan(
    self: Any,
    *args: Any,
    world_size: int,
    mesh: Any = None,
    zero: int | None = None,
    pipeline: str | None = None,
    **kwargs: Any,
) -> RanksPlan:
    """What ranks would hold and send in this step, if `world_size` processes took it together, each with such arguments.

    `mesh` has the sizes of a grid of ranks, as (128, 8), or its names and sizes: copies along the first dimension, parts along the
    last. `zero` is a stage of `config.enable_zero()`, by default what the configuration says; else each rank has all, as
    with `config.enable_data_parallel()`. A graph whose modules have stages is planned as a pipeline, by the schedule `pipeline` or that
    of the configuration; its stages are along the last dimension. It is planned in child processes, without a process group; nothing runs, and nothing is
    changed. The result has the bytes of each kind of rank, and `predict()` for the time; `str()` of it is a table. Raises
    DistributedError inside of a process group, and for steps that would hang or compute something else.

    >>> import monograph as mg
    >>> layer = torch.nn.Linear(64, 64)
    >>> step = mg.train_graph(layer, torch.nn.MSELoss(), torch.optim.SGD(layer.parameters(), lr=0.1))
    >>> step.plan(mg.spec((8, 64)), mg.spec((8, 64)), world_size=4, zero=3).ranks[0].payload_bytes
    24960
    """
    from monograph.distributed.planning.plan import plan_ranks

    return plan_ranks(
        internals_of(self), args, kwargs, world_size=world_size, mesh=mesh, zero=zero, pipeline=pipeline
    )


def to_html(self: Any, path: str | Path, *, profile: Profile | None = None) -> None:
    """Write one page that shows the newest build: a summary, then modules, program, source, memory, passes. It needs no network.

    `profile` is what `graph.profile(*inputs)` gave, for times and a flame graph; the page shows the build that it is of. Raises
    DefinitionError without a build, or if `path` does not end in .html.
    """
    from monograph.inspect.pages.html import shown_build, write_html
    from monograph.inspect.pages.modules import step_summary

    inside = internals_of(self)
    inside.newest()  # there has to be one
    build = shown_build(inside.builds, profile)
    write_html(path, step_summary(inside.name, inside.owned(), build), build, explain(self), profile)


def draw(self: Any, path: str | Path, *, module: str | None = None, depth: int | None = None) -> None:
    """Draw the newest build as captured, or a module of it, as .dot or .svg: each phase on its own, modules as boxes.

    Views are left out. `depth` is how many levels of modules are opened; by default as many as leave a drawing that can
    be read, and the others are boxes. Raises DefinitionError if the module has no ops.
    """
    from monograph.inspect.pages.draw import draw

    inside = internals_of(self)
    kinds = {path: type(item).__name__ for path, item in inside.owned().named_modules().items()}
    draw(path, inside.newest().stages[0].program, module, depth, kinds)


class StepCount:
    """The number of steps that are done: calls, eager ones too, and each of `many()`.

    A step of several micro-batches is one, and so is a step whose update a gradient scaler has skipped; a step that failed is
    none. It is part of the state of a graph, as `graph.steps`, so that it goes on after a resume. A graph whose user has set an
    attribute of this name has that instead. Raises CaptureError in build(), where the number of its capture would stay.
    """

    @overload
    def __get__(self, graph: None, kind: type) -> StepCount: ...

    @overload
    def __get__(self, graph: object, kind: type) -> int: ...

    def __get__(self, graph: Any, kind: type) -> StepCount | int:
        if graph is None:
            return self
        if getattr(RUNNING, "graph", None) is not None:
            raise CaptureError(
                "build() reads steps, which counts on from call to call: its capture would keep the present number",
                where=user_place(),
                hint="count in an attribute of your own: self.count += 1",
            )
        return internals_of(graph).store.steps
