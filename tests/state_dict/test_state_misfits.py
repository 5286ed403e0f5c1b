"""All or nothing: a state that does not fit is named in full, and leaves everything as it was."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.internals.internals import internals_of
from tests.checkpoint.continuation import whole
from tests.checkpoint.everything import Everything, inputs, make, picture
from tests.support import assert_same
from tests.support.small import one_thread  # noqa: F401
from tests.support.steps import sgd

Path = tuple[Any, ...]


def trained() -> tuple[Everything, dict[str, Any]]:
    """A graph some steps behind the state that comes with it."""
    graph = make()
    for x in inputs(3):
        graph(x)
    state = copy.deepcopy(graph.state_dict(python_random=True))
    graph(inputs(4)[3])
    return graph, state


def paths(item: Any, path: Path = ()) -> Iterator[Path]:
    entries = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
    for key, value in entries:
        yield (*path, key)
        yield from paths(value, (*path, key))


def edited(state: dict[str, Any], path: Path, edit: Callable[[Any, Any], None]) -> dict[str, Any]:
    made = copy.deepcopy(state)
    place = made
    for key in path[:-1]:
        place = place[key]
    edit(place, path[-1])
    return made


def delete(place: Any, key: Any) -> None:
    del place[key]


def put(value: Any, place: Any, key: Any) -> None:
    place[key] = value


class Odd:
    """What is nothing that a state could hold."""


def may_be_deleted(path: Path) -> bool:
    """Of an optimizer torch does without the state of a parameter, and without what it has got since."""
    head, *rest = path
    if head == "graph.gradients" or "lr_lambdas" in rest or path[1:] in (("python",), ("numpy",)):
        return True
    return (
        bool(rest)
        and head.startswith("optimizer")
        and ((rest[0] == "state" and len(rest) == 2) or (rest[0] == "param_groups" and len(rest) == 3))
    )


def may_be_anything(path: Path) -> bool:
    """torch sets these itself, and None is the absence of a gradient."""
    return path[0] == "graph.gradients" or path[-1] == "decoupled_weight_decay"


def error_of(graph: Everything, state: dict[str, Any]) -> str:
    try:
        graph.load_state_dict(state)
    except mg.CheckpointError as error:
        return str(error)
    return "it was loaded"


@pytest.mark.long
def test_every_entry_that_is_missing_unexpected_or_garbage() -> None:
    graph, state = trained()
    before = picture(graph)
    of_the_user = ("state.counter", "graph.about")
    everywhere = [path for path in paths(state) if path[0] not in of_the_user and "seen" not in path]
    edits: list[tuple[Path, Any, bool]] = []
    for path in everywhere:
        edits += [] if may_be_deleted(path) else [(path, delete, False)]
        values = [] if may_be_anything(path) else ["garbage", torch.zeros(7), Odd()]
        edits += [(path, partial(put, value), False) for value in values]
        value = state
        for key in path:
            value = value[key]
        if isinstance(value, dict) and path[-1] != "_extra_state" and "lr_lambdas" not in path:
            edits.append(((*path, "surprise"), partial(put, torch.zeros(2)), True))
    assert len(edits) > 600
    for path, edit, unexpected in edits:
        text = error_of(graph, edited(state, path, edit))
        named = (
            [path[0]]
            + ["unexpected: "] * (unexpected and path[1] != "state")
            + [str(path[-1])] * (unexpected or (edit is delete and isinstance(path[-1], str)))
        )
        assert all(name in text for name in named), (path, edit, text)
    assert_same(before, picture(graph))
    counterpart, _ = trained()
    assert_same(counterpart(inputs(5)[4]), graph(inputs(5)[4]))
    assert_same({**counterpart.state_dict(), "graph.about": 0}, {**graph.state_dict(), "graph.about": 0})
    assert len(graph.builds) == 1


def test_one_error_names_everything() -> None:
    graph, state = trained()
    del state["model"]["layers.0.weight"], state["optimizer.0"]["state"][1]["exp_avg"]
    del state["scheduler.0"]["last_epoch"], state["graph.rng"]["generators"]["noise"], state["graph.steps"]
    state["model"]["other"] = state["state.new"] = torch.ones(1)
    state["critic"] = {"weight": torch.ones(3, 3)}
    state["optimizer.1"]["param_groups"][0]["momentum"] = "much"
    state["state.counter"] = {}
    with pytest.raises(mg.CheckpointError) as caught:
        graph.load_state_dict(state)
    text = str(caught.value)
    for named in (
        "the state does not fit this graph, and nothing was loaded",
        "size mismatch for weight",
        "optimizer.1/param_groups/0/momentum is a str; here it is a float",
        "state.counter: 'counts'",
        "missing: graph.steps, model.layers.0.weight, critic.bias, optimizer.0/state/1/exp_avg, ",
        "scheduler.0/last_epoch, graph.rng/generators/noise",
        "unexpected: state.new, model.other",
        "hint: make the graph as it was when the state was saved",
    ):
        assert named in text, text


def test_the_state_of_a_module_is_told_where_it_belongs() -> None:
    model = nn.Linear(4, 3)
    step = mg.train_graph(model, nn.MSELoss(), sgd(model))
    with pytest.raises(mg.CheckpointError) as caught:
        step.load_state_dict(model.state_dict())
    assert "graph.model.load_state_dict(state)" in caught.value.hint


@pytest.mark.one_case
@pytest.mark.parametrize("error", [RuntimeError("it is broken"), KeyboardInterrupt()], ids=repr)
def test_an_object_that_cannot_be_loaded_undoes_all(error: BaseException) -> None:
    graph, state = trained()
    before = picture(graph)
    graph.counter.error = error
    kind: Any = mg.CheckpointError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(kind) as caught:
        graph.load_state_dict(state)
    assert kind is KeyboardInterrupt or "state.counter: it is broken" in str(caught.value)
    assert "while the state before was put back" in "".join(
        caught.value.__notes__
    )  # it fails at that as well
    graph.counter.error = None
    assert_same(before, picture(graph))


def test_an_interrupt_at_the_end_lets_loading_be_completed(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, state = trained()
    set_state, calls = torch.set_rng_state, []

    def interrupted(new: torch.Tensor) -> None:
        calls.append(new)
        if len(calls) == 1:
            raise KeyboardInterrupt
        set_state(new)

    monkeypatch.setattr(torch, "set_rng_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        graph.load_state_dict(state)
    monkeypatch.undo()
    loaded = graph.state_dict(python_random=True)
    del state["state.counter"]  # it adds to what it has
    for key in state.keys() - {"graph.about", "graph.rng"}:
        assert_same(state[key], loaded[key], key)
    assert_same(state["graph.rng"]["cpu"], loaded["graph.rng"]["cpu"])


@contextmanager
def interrupt_at(line: int) -> Iterator[list[int]]:
    """Raise KeyboardInterrupt at a line, counted from now, of what loads a state; gives the count."""
    count = [0]

    def trace(frame: FrameType, event: str, _argument: Any) -> Any:
        if not re.search(
            r"/monograph/(state_dict|checkpoint)/|/torch/nn/modules/module|/torch/optim/",
            frame.f_code.co_filename,
        ):
            return None
        count[0] += event == "line"
        if event == "line" and count[0] == line:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(None)


def test_an_interrupt_anywhere_leaves_the_old_state_or_the_new_one() -> None:
    graph, state = trained()
    with interrupt_at(-1) as count:
        graph.load_state_dict(state)
    new = whole(graph, python_random=True)
    assert count[0] > 5000
    outcomes = set()
    for line in [*range(1, count[0], 797), *range(count[0] - 60, count[0], 9)]:
        graph(inputs(4)[3])
        old = picture(graph)
        with suppress(KeyboardInterrupt), interrupt_at(line):
            graph.load_state_dict(state)
        outcomes.add(internals_of(graph).store.steps)
        if internals_of(graph).store.steps == 4:
            assert_same(old, picture(graph), f"line {line}")
            graph.load_state_dict(state)
        assert_same(new, whole(graph, python_random=True), f"line {line}")
    assert outcomes == {3, 4}
    assert len(graph.builds) == 1


def test_without_strict_what_is_there_is_loaded_by_its_name() -> None:
    graph, state = trained()
    kept = copy.deepcopy(graph.state_dict())
    del state["model"]["layers.0.weight"], state["optimizer.0"]["state"][1]["exp_avg"]
    del state["scheduler.0"]["last_epoch"], state["graph.rng"], state["optimizer.1"]["state"]
    state["model"]["other"] = state["state.new"] = state["scheduler.0"]["other"] = torch.ones(1)
    state["optimizer.0"]["state"][99] = state["optimizer.0"]["state"][0]["other"] = {"exp_avg": 1}
    state["optimizer.0"]["param_groups"][0]["other"] = 1
    graph.load_state_dict(state, strict=False)
    now = graph.state_dict()
    for path in [
        ("model", "layers.0.weight"),
        ("scheduler.0", "last_epoch"),
        ("optimizer.1", "state"),
    ]:
        expected, got = kept, now
        for key in path:
            expected, got = expected[key], got[key]
        assert_same(expected, got, "/".join(path))
    assert_same(kept["optimizer.0"]["state"][1]["exp_avg"], now["optimizer.0"]["state"][1]["exp_avg"])
    assert_same(state["optimizer.0"]["state"][1]["exp_avg_sq"], now["optimizer.0"]["state"][1]["exp_avg_sq"])
    assert_same(state["model"]["layers.2.weight"], now["model"]["layers.2.weight"])
    assert_same(state["graph.steps"], now["graph.steps"])
    assert_same(now.keys() - {"graph.about"}, kept.keys() - {"graph.about"})
    assert set(now["optimizer.0"]["state"]) == set(kept["optimizer.0"]["state"])
    assert "other" not in str({key: now[key] for key in ("model", "optimizer.0", "scheduler.0")})


# --- states of other graphs ------------------------------------------------------------------------------------------


class Plain(mg.Graph):
    def __init__(self, optimizer: Any, scheduler: Any = None, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = nn.Linear(4, 3) if model is None else model
        made = optimizer(self.model)
        self.add_optimizer(made, lr_sch=None if scheduler is None else scheduler(made))

    def build(self, x):
        loss = self.model(x).square().mean()
        loss.backward()
        return loss


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([{"params": [parameter]} for parameter in model.parameters()])


def first_only(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam([model.weight])


def exponential(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def step(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 2)


def by_lambda(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)


def multiplicative(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda _: 1.0)


def chain(*schedulers: Any) -> Any:
    return lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [make(o) for make in schedulers], milestones=[1] * (len(schedulers) - 1)
    )


OTHERS = [
    ((adam,), (sgd,), "optimizer.0/param_groups|param group 0 has no amsgrad, .*|is the state of"),
    ((sgd,), (adam,), "param group 0 has no dampening"),
    ((adam,), (adamw,), "optimizer.0 is the state of torch.optim.adamw.AdamW; here it is torch.optim.adam.Adam"),
    ((adam,), (groups,), "different number of parameter groups"),
    ((adam,), (first_only,), "doesn't match the size"),
    ((adam, exponential), (adam, step), "scheduler.0/step_size|scheduler.0 is the state of"),
    ((adam, by_lambda), (adam, multiplicative), "scheduler.0 is the state of torch.optim.lr_scheduler.MultiplicativeLR"),
    ((adam, chain(step, step)), (adam, chain(step, step, step)), "expected the states of 2 schedulers inside"),
    ((adam, chain(step, exponential)), (adam, chain(step, step)), "unexpected: scheduler.0/_schedulers/1/step_size"),
    ((adam, exponential), (adam,), "missing: scheduler.0"),
    ((adam,), (adam, exponential), "unexpected: scheduler.0"),
    ((adam,), (adam, None, nn.Linear(4, 5)), r"size mismatch for weight"),
    ((adam, None, nn.Linear(4, 3, bias=False)), (adam,), "unexpected: model.bias"),
    ((adam,), (adam, None, nn.Sequential(nn.Linear(4, 3))), "missing: model.weight, model.bias"),
]  # fmt: skip


@pytest.mark.parametrize(("here", "there", "named"), OTHERS, ids=range(len(OTHERS)))
def test_a_state_of_another_graph_is_refused(here: Any, there: Any, named: str) -> None:
    graph, other = Plain(*here), Plain(*there)
    for x in inputs(2):
        graph(x), other(x)
    before = copy.deepcopy(graph.state_dict())
    with pytest.raises(mg.CheckpointError, match=named):
        graph.load_state_dict(other.state_dict())
    assert_same(before, graph.state_dict())


def test_optimizer_state_of_another_shape_is_refused() -> None:
    graph, other = Plain(adam), Plain(adam, None, nn.Linear(4, 5))
    for x in inputs(2):
        other(x)
    with pytest.raises(
        mg.CheckpointError, match=r"optimizer.0/state/0/exp_avg is of shape \(5, 4\); here it is \(3, 4\)"
    ):
        graph.load_state_dict({"optimizer.0": other.state_dict()["optimizer.0"]}, strict=False)


def test_a_lazy_module_is_lazy_again_after_a_load_that_failed() -> None:
    graph = Plain(adam, None, nn.LazyLinear(3))
    other = Plain(adam)
    state = copy.deepcopy(other.state_dict())
    del state["graph.steps"]
    with pytest.raises(mg.CheckpointError, match=r"missing: graph\.steps"):
        graph.load_state_dict(state)
    module = graph.model.to(nn.Module)
    assert isinstance(module.weight, nn.UninitializedParameter)
    graph.load_state_dict(other.state_dict())
    assert_same(other(inputs(1)[0]), graph(inputs(1)[0]))


@pytest.mark.every_case
@pytest.mark.parametrize("value", [None, 3, [], "path"])
def test_what_is_no_state_at_all(value: Any) -> None:
    with pytest.raises(mg.CheckpointError, match="takes the dict of state_dict"):
        make().load_state_dict(value)


def test_a_load_without_strict_tells_what_it_leaves_out() -> None:
    graph = make()
    state = whole(graph)
    lost = state.pop("graph.steps")
    left_out = graph.load_state_dict({**state, "more": lost}, strict=False)
    assert left_out.missing_keys == ["graph.steps"]
    assert left_out.unexpected_keys == ["more"]
    assert graph.load_state_dict({**state, "graph.steps": lost}) == ([], [])


def test_a_load_that_fits_nowhere_is_an_error() -> None:
    graph = make()
    with pytest.raises(mg.CheckpointError, match="none of its entries"):
        graph.load_state_dict({"modell": {}}, strict=False)


def test_keys_of_the_users_stay_in_param_groups() -> None:
    """A plain optimizer's state knows nothing of the keys that a graph follows."""
    plain = nn.Linear(2, 2)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=0.5)
    model = nn.Linear(2, 2)
    group = {"params": model.parameters(), "lr_scale": 0.5, "clip_grad_max_norm": 1.0}
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW([group]))
    x = torch.randn(3, 2)
    step(x, x)
    state = {"optimizer.0": plain_optimizer.state_dict()}
    left_out = step.load_state_dict(state, strict=False)
    assert "optimizer.0/param_groups/0/lr_scale" in left_out.missing_keys
    step(x, x)
    assert step.state_dict()["optimizer.0"]["param_groups"][0]["lr_scale"] == 0.5
    assert step.state_dict()["optimizer.0"]["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize("strict", [True, False])
def test_the_state_of_another_optimizer_is_told_how_to_load_the_model(strict):
    def made(kind):
        model = nn.Linear(3, 2)
        return mg.train_graph(model, nn.MSELoss(), kind(model.parameters(), lr=0.1))

    source, other = made(torch.optim.AdamW), made(torch.optim.SGD)
    source(torch.ones(2, 3), torch.ones(2, 2))
    found = source.state_dict()
    with pytest.raises(mg.CheckpointError) as caught:
        other.load_state_dict(found, strict=strict)
    assert "graph.model.load_state_dict(state['model'])" in caught.value.hint
    assert "strict=False" not in caught.value.hint
    other.model.load_state_dict(found["model"])
