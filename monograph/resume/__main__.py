"""One of the two processes of the proof: `python -m monograph.resume`, with its job as JSON at the standard input."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, Final

import torch

from monograph.checkpoint.load import load_checkpoint
from monograph.checkpoint.save import save
from monograph.errors import CheckpointError, DefinitionError
from monograph.graph import Graph
from monograph.internals.internals import internals_of
from monograph.numerics.judge import digests
from monograph.resume.factory import made_by
from monograph.resume.proof import MISFIT, USAGE, Job
from monograph.state.random import RandomState
from monograph.state_dict.parts import ABOUT

_DRAWN: Final = (
    "numbers of {} are drawn between the steps, and the checkpoint does not hold their state: "
    "state_dict(python_random=True), and prove_resume(..., python_random=True), save it"
)


def main() -> None:
    """Do the job and write the digests to its report."""
    job = Job(**json.load(sys.stdin))
    sys.path[:] = job.path
    torch.set_num_threads(job.threads[0])
    torch.set_num_interop_threads(job.threads[1])
    try:
        with redirect_stdout(sys.stderr):
            report = run(job)
    except (CheckpointError, DefinitionError) as error:
        print(error.message, file=sys.stderr)
        sys.exit(USAGE if isinstance(error, DefinitionError) else MISFIT)
    Path(job.report).write_text(json.dumps(report))


def run(job: Job) -> dict[str, Any]:
    """Make, load, train, save and train on."""
    graph, batches = made_by(job.factory, Graph)
    python_random = job.python_random
    if job.load is not None:
        start = load_checkpoint(job.load)
        python_random |= "python" in start.get("graph.rng", {})
        graph.load_state_dict(start)
    registered = any(item is batches for item in internals_of(graph).registry.registered.values())
    stream, notes = endless(batches, job.factory), list[str]()
    for _ in range(0 if registered else job.skip):
        next(stream)
    for _ in range(job.steps):
        call(graph, next(stream))
    if job.save is not None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state_dict = graph.state_dict(python_random=python_random)
        notes = [str(item.message) for item in caught]
        save(state_dict, job.save)
    saved = RandomState.now()
    results = [compared_step(graph, next(stream)) for _ in range(job.more)]
    end = graph.state_dict(python_random=python_random)
    state = digests({key: end[key] for key in end if key != ABOUT})
    drawn = [name for name in saved.moved() if name != "torch"]
    if drawn and not python_random:
        notes.append(_DRAWN.format(" and ".join(drawn)))
    return {"results": results, "state": state, "registered": registered, "notes": notes}


def call(graph: Graph, batch: Any) -> Any:
    """One step: a tuple or list holds positional arguments, a dict keyword arguments, anything else is the argument."""
    if isinstance(batch, (tuple, list)):
        return graph(*batch)
    return graph(**batch) if isinstance(batch, Mapping) else graph(batch)


def compared_step(graph: Graph, batch: Any) -> dict[str, str]:
    """The digests of a batch and of the results of its step: what differs first says whether data or training do."""
    given = digests(batch, "batch")
    return given | digests(call(graph, batch), "result")


def endless(batches: Any, factory: str) -> Iterator[Any]:
    """Epoch after epoch."""

    num_empty = 0
    while num_empty < 2:  # one that was at the end of an epoch may have none left
        num_empty += 1
        for batch in batches:
            num_empty = 0
            yield batch
    raise DefinitionError(
        f"the batches of {factory} are at their end", hint="give more, or an iterable that starts again"
    )


if __name__ == "__main__":
    main()
