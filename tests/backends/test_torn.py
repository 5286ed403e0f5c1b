"""Steps that are cut short: a compiled step changes the state while it runs, and never leaves a silent mix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.numerics.judge import differences
from monograph.settings import Settings


def make(backend: str = "inductor") -> tuple[nn.Module, torch.optim.Optimizer, mg.Graph]:
    """A small step with random numbers, and its parts."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    graph = mg.train_graph(model, nn.MSELoss(), optimizer)
    graph.config.backend(backend)
    return model, optimizer, graph


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Data."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)


def wrap(graph: mg.Graph, around: Callable[[Callable[[list[Any]], Any]], Callable[[list[Any]], Any]]) -> None:
    """Put something around the compiled call of a graph's build."""
    executor = graph.builds[0].executor
    executor._runner = replace(executor._runner, run=around(executor._runner.run))


def failing_behind(run: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """A call that fails when it has changed everything."""

    def fail(inputs: list[Any]) -> Any:
        run(inputs)
        raise RuntimeError("out of luck")

    return fail


def test_a_failure_inside_the_step_is_a_named_error_until_state_is_loaded():
    _model, _optimizer, graph = make()
    graph(*batch(0))
    saved = copy.deepcopy(graph.state_dict())
    generator = torch.get_rng_state()
    expected = graph(*batch(1)).detach()
    after = copy.deepcopy(graph.state_dict())

    graph.load_state_dict(saved)
    torch.set_rng_state(generator)
    runner = graph.builds[0].executor._runner
    wrap(graph, failing_behind)
    with pytest.raises(mg.TornStateError, match="out of luck") as raised:
        graph(*batch(1))
    assert raised.value.hint
    for use in (
        lambda: graph(*batch(1)),
        graph.state_dict,
        lambda: graph.eager(*batch(1)),
        lambda: graph.compile(*batch(1)),
    ):
        with pytest.raises(mg.TornStateError, match="cannot go on"):
            use()

    graph.builds[0].executor._runner = runner
    graph.load_state_dict(saved)
    torch.set_rng_state(generator)
    assert torch.equal(graph(*batch(1)).detach(), expected)
    assert not list(differences(after, graph.state_dict()))
    assert len(graph.builds) == 1


def test_part_of_a_state_does_not_mend_it():
    _model, _optimizer, graph = make()
    graph(*batch(0))
    saved = copy.deepcopy(graph.state_dict())
    wrap(graph, failing_behind)
    with pytest.raises(mg.TornStateError):
        graph(*batch(1))
    graph.load_state_dict({"model": saved["model"]}, strict=False)
    with pytest.raises(mg.TornStateError, match="cannot go on"):
        graph(*batch(1))


def test_a_copy_of_a_torn_graph_is_torn():
    _model, _optimizer, graph = make()
    graph(*batch(0))
    wrap(graph, failing_behind)
    with pytest.raises(mg.TornStateError):
        graph(*batch(1))
    with pytest.raises(mg.TornStateError):
        copy.deepcopy(graph)(*batch(1))


def test_an_artifact_that_is_torn_is_loaded_again(tmp_path):
    """Here it is the plain backend that fails while it writes state: nothing is compiled."""
    _model, _optimizer, graph = make("aten")
    graph(*batch(0))
    path = mg.save(graph, tmp_path / "artifact")
    expected = graph(*batch(1)).detach()
    artifact = mg.load(path)
    artifact.train(*batch(2))
    (programs,) = artifact.train.programs
    executor, _ = programs.latest.bind(batch(1), Settings())
    plain = executor._runner
    assert plain.update is not None
    executor._runner = replace(plain, update=failing_behind(plain.update), has_begun=lambda: True)
    with pytest.raises(mg.TornStateError, match="out of luck"):
        artifact.train(*batch(1))
    executor._runner = plain
    for _ in range(2):
        with pytest.raises(mg.TornStateError, match="out of luck") as raised:
            artifact.train(*batch(1))
        assert raised.value.hint == "load the artifact again"
    assert torch.equal(mg.load(path).train(*batch(1)), expected)


def test_a_call_that_does_not_fit_changes_nothing():
    model, _optimizer, graph = make()
    graph(*batch(0))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(mg.SignatureError):
        graph(torch.randn(6, 5), batch(0)[1])
    assert not list(differences(before, dict(model.state_dict())))
    graph(*batch(1))


@pytest.mark.parametrize("moment", ["before", "behind"])
def test_an_interrupt_finds_the_step_done_or_not_begun(moment):
    """Ctrl-C while compiled code runs is seen when it has ended: the step counts, as if it had come a moment later."""
    _model, _optimizer, graph = make()
    graph(*batch(0))
    saved = copy.deepcopy(graph.state_dict())
    graph(*batch(1))
    after = copy.deepcopy(graph.state_dict())

    graph.load_state_dict(saved)
    executor = graph.builds[0].executor
    runner = executor._runner

    def interrupt(*given: Any) -> Any:
        raise KeyboardInterrupt

    executor._runner = replace(
        runner, **{"prepare" if moment == "before" else "finish": once(interrupt, runner.finish)}
    )
    with pytest.raises(KeyboardInterrupt):
        graph(*batch(1))
    executor._runner = runner
    found = graph.state_dict()
    assert not list(differences(saved if moment == "before" else after, found))


def once(first: Callable[..., Any], then: Callable[..., Any]) -> Callable[..., Any]:
    """What is called the first time, and what from then on."""
    calls: list[Callable[..., Any]] = [first]

    def call(*given: Any) -> Any:
        return (calls.pop() if calls else then)(*given)

    return call
