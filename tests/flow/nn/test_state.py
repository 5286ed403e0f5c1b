"""The state in OneFlow's layout, what is taken from OneFlow's own files, and graphs that are saved for deployment."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import monograph as mg
import monograph.flow as flow
import monograph.flow.nn as nn
from monograph.errors import ArtifactError, CheckpointError, DistributedError
from tests.flow.steps import TrainStep, batches, check_told, graph, loss_of, net, plain, sgd, trained, weights
from tests.support import ROOT, assert_same

TRAIN_STEP = "System-Train-TrainStep"
Make = Callable[[Any], torch.optim.Optimizer]
SLOTS: dict[str, tuple[Make, set[str]]] = {
    "SGD": (lambda p: flow.optim.SGD(p, lr=0.1), set()),
    "SGD momentum": (lambda p: flow.optim.SGD(p, lr=0.1, momentum=0.9), {"momentum"}),
    "Adam": (lambda p: flow.optim.Adam(p), {"m", "v"}),
    "Adam amsgrad": (lambda p: flow.optim.Adam(p, amsgrad=True), {"m", "v", "max_v"}),
    "Adam uncorrected": (lambda p: flow.optim.Adam(p, do_bias_correction=False), {"m", "v"}),
    "AdamW": (lambda p: flow.optim.AdamW(p, weight_decay=0.1), {"m", "v"}),
    "LAMB": (lambda p: flow.optim.LAMB(p), {"m", "v"}),
    "RMSprop": (lambda p: flow.optim.RMSprop(p), {"mean_square"}),
    "RMSprop centered": (lambda p: flow.optim.RMSprop(p, centered=True), {"mean_square", "mean_gradient"}),
    "Adagrad": (lambda p: flow.optim.Adagrad(p), {"sum"}),
    "Adadelta": (lambda p: flow.optim.Adadelta(p), {"square_avgs", "acc_deltas"}),
}


def step_of(make: Make = SLOTS["SGD momentum"][0], lr_sch: Any = None, seed: int = 0) -> TrainStep:
    model = net(seed)
    optimizer = make(model.parameters())
    return TrainStep(model, optimizer, lr_sch(optimizer) if lr_sch is not None else None)


def as_oneflow_writes(state: dict[str, Any], slots: set[str]) -> OrderedDict[str, Any]:
    """The state without what only Monograph writes: modules, entries of optimizers, the number of steps."""
    kept = {key: value for key, value in state.items() if key.rpartition("-")[2] in slots}
    return OrderedDict(model=state["model"], loss=OrderedDict(), **kept, **{TRAIN_STEP: state[TRAIN_STEP]})


class WithLoss(TrainStep):
    """Holds a module without state, which OneFlow writes as an empty dict."""

    def __init__(self, make: Make, lr_sch: Any = None, seed: int = 5) -> None:
        model = net(seed)
        optimizer = make(model.parameters())
        super().__init__(model, optimizer, lr_sch(optimizer) if lr_sch is not None else None)
        self.loss = torch.nn.SmoothL1Loss()


# --- the layout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SLOTS)
def test_each_optimizer_has_oneflows_entries(name: str) -> None:
    make, slots = SLOTS[name]
    step = step_of(make)
    trained(step, batches(2))
    state = step.state_dict()
    assert next(iter(state)) == "model"
    assert list(state["model"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    entries = {key for key in state if key.startswith("model.")} - {f"model.{n}-step" for n in state["model"]}
    assert entries == {f"model.{path}-{slot}" for path in state["model"] for slot in slots}
    assert_same(torch.tensor([2]), state[TRAIN_STEP])


def test_the_entries_are_those_of_pytorch() -> None:
    """SGD and Adam have PyTorch's formulas, so their state has PyTorch's bits."""
    for make, reference_kind, names in (
        (
            SLOTS["SGD momentum"][0],
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            {"momentum": "momentum_buffer"},
        ),
        (SLOTS["Adam"][0], lambda p: torch.optim.Adam(p), {"m": "exp_avg", "v": "exp_avg_sq"}),
    ):
        model, step = net(), step_of(make)
        optimizer = reference_kind(model.parameters())
        plain(model, optimizer, batches(3))
        trained(step, batches(3))
        state = step.state_dict()
        assert_same(weights(model), dict(state["model"]))
        for path, parameter in model.named_parameters():
            for theirs, ours in names.items():
                assert_same(optimizer.state[parameter][ours], state[f"model.{path}-{theirs}"])


def test_a_state_before_the_first_call_has_no_entries() -> None:
    state = step_of().state_dict()
    assert not [key for key in state if "-" in key and key != TRAIN_STEP]
    assert_same(torch.tensor([0]), state[TRAIN_STEP])


def test_a_destination_is_filled_and_returned() -> None:
    destination: dict[str, Any] = {"mine": 1}
    step = step_of()
    assert step.state_dict(destination) is destination
    assert {"mine", "model", TRAIN_STEP} <= set(destination)


def test_the_state_of_an_inference_graph() -> None:
    step = graph(lambda self, x: self.model(x), model=net())
    step(batches(1)[0])
    assert_same(weights(step.model), dict(step.state_dict()["model"]))


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.one_case
@pytest.mark.parametrize("name", SLOTS)
def test_training_goes_on_from_a_state(name: str, tmp_path: Path) -> None:
    """A state is taken before the first call, and after it: every second optimizer is tried each way."""
    make, data, called = SLOTS[name][0], batches(5), list(SLOTS).index(name) % 2 == 1
    first = step_of(make)
    trained(first, data[:2])
    flow.save(first.state_dict(), tmp_path / "state")
    expected = trained(first, data[2:])
    again = step_of(make, seed=5)
    if called:
        again(data[4])
    again.load_state_dict(flow.load(tmp_path / "state"))
    assert_same(expected, trained(again, data[2:]))
    assert_same(weights(first.model), weights(again.model))


@pytest.mark.one_case
@pytest.mark.parametrize("name", SLOTS)
def test_training_goes_on_from_what_oneflow_writes(name: str, tmp_path: Path) -> None:
    """Of counters that PyTorch's optimizers keep, and of rates, OneFlow writes the number of steps alone."""
    make, slots = SLOTS[name]
    schedule = lambda optimizer: flow.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)  # noqa: E731
    first = WithLoss(make, schedule, seed=0)
    trained(first, batches(5)[:3])
    written = as_oneflow_writes(first.state_dict(), slots)
    torch.save(written, tmp_path / "state.pt")
    expected = trained(first, batches(5)[3:])
    again = WithLoss(make, schedule)
    again.load_state_dict(flow.load(tmp_path / "state.pt"))
    assert_same(expected, trained(again, batches(5)[3:]))
    assert_same(weights(first.model), weights(again.model))


def test_a_state_without_the_modules_that_have_none_is_taken() -> None:
    """Files of arrays hold no empty dicts; a loss has one in what OneFlow writes."""
    make, slots = SLOTS["Adam"]
    first, again = WithLoss(make, seed=0), WithLoss(make)
    trained(first, batches(5)[:3])
    written = as_oneflow_writes(first.state_dict(), slots)
    again.load_state_dict(
        {key: value for key, value in written.items() if not isinstance(value, dict) or value}
    )
    assert_same(trained(first, batches(5)[3:]), trained(again, batches(5)[3:]))


RESUMED = """
import sys
import torch
import monograph.flow as flow
from tests.flow.steps import batches, weights
from tests.flow.nn.test_state import dropping

step = dropping(seed=3)
step.load_state_dict(flow.load(sys.argv[1]))
losses = [step(x).detach() for x in batches(6)[3:]]
flow.save({"losses": losses, "weights": weights(step.model)}, sys.argv[2])
"""


def dropping(seed: int = 0) -> TrainStep:
    """A step that draws random numbers, with a schedule, buffers and two kinds of entries."""
    model = torch.nn.Sequential(net(seed), torch.nn.Dropout(0.5), torch.nn.BatchNorm1d(2))
    optimizer = flow.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    return TrainStep(model, optimizer, flow.optim.lr_scheduler.CosineDecayLR(optimizer, decay_steps=10))


@pytest.mark.long
def test_a_resumed_run_has_the_bits_of_the_one_without_a_break(tmp_path: Path) -> None:
    step = dropping()
    trained(step, batches(6)[:3])
    flow.save(step.state_dict(), tmp_path / "state")
    losses = trained(step, batches(6)[3:])
    command = [sys.executable, "-c", RESUMED, str(tmp_path / "state"), str(tmp_path / "resumed")]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"})
    resumed = flow.load(tmp_path / "resumed")
    assert_same({"losses": losses, "weights": weights(step.model)}, dict(resumed))


def test_the_state_of_the_optimizer_is_taken_and_given_back() -> None:
    """Eager steps before, between and after those of a graph have one momentum."""
    reference, model = net(), net()
    optimizer = flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain(reference, sgd(reference, momentum=0.9), batches(6))
    plain(model, optimizer, batches(6)[:2])
    trained(TrainStep(model, optimizer), batches(6)[2:4])
    plain(model, optimizer, batches(6)[4:])
    assert_same(weights(reference), weights(model))


def test_a_state_of_another_graph_of_the_library_is_taken() -> None:
    model = net()
    own = mg.train_graph(model, torch.nn.SmoothL1Loss(), sgd(model, momentum=0.9))
    target = torch.ones(4, 2)
    for x in batches(4)[:2]:
        own(x, target)

    class Same(nn.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.loss_fn = net(5), torch.nn.SmoothL1Loss()
            self.add_optimizer(sgd(self.model, momentum=0.9))

        def build(self, x, y):
            loss = self.loss_fn(self.model(x), y)
            loss.backward()
            return loss

    again = Same()
    again.load_state_dict(own.state_dict())
    for x in batches(4)[2:]:
        assert_same(own(x, target).detach(), again(x, target).detach())


# --- the scaler ------------------------------------------------------------------------------------------------------


def scaled(make_scaler: Any, seed: int = 0) -> TrainStep:
    step = step_of(seed=seed)
    step.set_grad_scaler(make_scaler())
    return step


def moving() -> Any:
    return flow.amp.GradScaler(init_scale=32.0, growth_interval=2)


def test_the_scale_is_found_whatever_the_graph_is_called() -> None:
    first = scaled(moving)
    trained(first, batches(3))
    state, again = first.state_dict(), scaled(moving, seed=5)
    assert again.name != first.name
    again.load_state_dict(state)
    scaler = again.state_dict()["graph.scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"]) == (64.0, 1)
    assert_same(trained(first, batches(3)), trained(again, batches(3)))


def test_the_scale_that_oneflow_writes_is_taken() -> None:
    first = scaled(moving)
    trained(first, batches(3))
    written: dict[str, Any] = as_oneflow_writes(first.state_dict(), {"momentum"})
    del written["loss"]
    written["System-Train-DynamicLossScale-TrainStep_17-LossScale"] = torch.tensor([64.0])
    written["System-Train-DynamicLossScale-TrainStep_17-GoodStepCounter"] = torch.tensor([1])
    again = scaled(moving, seed=5)
    again.load_state_dict(written)
    scaler = again.state_dict()["graph.scaler"]
    assert (scaler["scale"], scaler["_growth_tracker"], scaler["growth_interval"]) == (64.0, 1, 2)
    assert_same(trained(first, batches(3)), trained(again, batches(3)))


def test_a_scale_that_has_no_place_is_told() -> None:
    first = step_of()
    first(batches(1)[0])
    written = first.state_dict() | {
        "System-Train-DynamicLossScale-TrainStep_0-LossScale": torch.tensor([64.0])
    }
    with pytest.raises(CheckpointError) as caught:
        step_of().load_state_dict(written)
    check_told(
        caught.value, "unexpected: System-Train-DynamicLossScale-TrainStep_0-LossScale", hint="strict=False"
    )


# --- states that do not fit --------------------------------------------------------------------------------------------


def broken(change: Callable[[dict[str, Any]], Any], own: bool) -> tuple[dict[str, Any], TrainStep]:
    """A state with a fault in it, as written here or by OneFlow, and the graph that is to load it."""
    first = step_of()
    trained(first, batches(2))
    state = first.state_dict()
    if not own:
        state = as_oneflow_writes(state, {"momentum"})
        del state["loss"]
    change(state)
    again = step_of(seed=5)
    again(batches(1)[0])
    return state, again


@pytest.mark.one_case
@pytest.mark.parametrize("own", [True, False], ids=["ours", "OneFlow's"])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda s: s.update(extra=torch.ones(1)), "unexpected: extra"),
        (lambda s: s.update({"model.0.weight-nothing": torch.ones(4, 3)}), "model.0.weight-nothing"),
        (lambda s: s.pop("model"), "missing: model"),
        (lambda s: s["model"].pop("0.weight"), "missing: model.0.weight"),
        (lambda s: s["model"].update({"0.weight": torch.ones(4, 4)}), "torch.Size([4, 4])"),
        (lambda s: s.update({TRAIN_STEP: "two"}), f"{TRAIN_STEP} is 'two'"),
    ],
    ids=["unknown key", "unknown entry", "no module", "no weight", "another shape", "no number of steps"],
)
def test_a_state_that_does_not_fit_changes_nothing(change: Any, told: str, own: bool) -> None:
    state, step = broken(change, own)
    before = step.state_dict()
    kept = {key: value.clone() for key, value in before.items() if isinstance(value, torch.Tensor)}
    kept_weights = weights(step.model)
    with pytest.raises(CheckpointError) as caught:
        step.load_state_dict(state)
    assert told in str(caught.value)
    assert caught.value.hint
    after = step.state_dict()
    assert_same(kept, {key: after[key] for key in kept})
    assert_same(kept_weights, weights(step.model))


@pytest.mark.one_case
@pytest.mark.parametrize("own", [True, False], ids=["ours", "OneFlow's"])
def test_entries_of_the_optimizer_that_are_missing_are_named(own: bool) -> None:
    keys = [f"model.{path}-momentum" for path in ("0.weight", "0.bias", "2.weight", "2.bias")]
    state, step = broken(lambda s: [s.pop(key) for key in keys], own)
    with pytest.raises(CheckpointError) as caught:
        step.load_state_dict(state)
    check_told(caught.value, *keys, "missing: ", hint="strict=False lets the optimizer begin anew")
    left = step.load_state_dict(state, strict=False)
    assert set(keys) <= set(left.missing_keys)
    assert_same(state["model"], step.state_dict()["model"])


def test_one_entry_of_two_that_is_missing_is_named() -> None:
    first = step_of(SLOTS["Adam"][0])
    trained(first, batches(2))
    written = as_oneflow_writes(first.state_dict(), {"m", "v"})
    del written["loss"], written["model.2.bias-v"]
    with pytest.raises(CheckpointError) as caught:
        step_of(SLOTS["Adam"][0]).load_state_dict(written)
    assert caught.value.message.endswith("missing: model.2.bias-v")


def test_parameters_that_were_never_updated_have_no_entries() -> None:
    """Neither here nor in OneFlow, so that they are not missed."""

    class Frozen(TrainStep):
        def __init__(self, seed: int) -> None:
            model = net(seed)
            model[0].requires_grad_(False)
            super().__init__(model, flow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    first, again = Frozen(0), Frozen(5)
    trained(first, batches(2))
    written = as_oneflow_writes(first.state_dict(), {"momentum"})
    del written["loss"]
    assert [key for key in written if "-momentum" in key] == [
        "model.2.weight-momentum",
        "model.2.bias-momentum",
    ]
    again.load_state_dict(written)
    assert_same(trained(first, batches(2)), trained(again, batches(2)))


def test_a_state_of_another_kind_of_optimizer_is_told() -> None:
    first = step_of(SLOTS["Adam"][0])
    trained(first, batches(1))
    with pytest.raises(CheckpointError, match=r"optimizer\.0 is the state of .*Adam; here it is .*SGD"):
        step_of().load_state_dict(first.state_dict())


# --- files -----------------------------------------------------------------------------------------------------------


@pytest.mark.every_case
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(3),
        [torch.ones(2), {"a": 1, "b": None}],
        {"model": {"w": torch.ones(2, 2)}, "epoch": 3},
        (1, 2.5, "text"),
        OrderedDict(z=torch.zeros(1)),
    ],
    ids=["tensor", "list", "dict", "tuple", "ordered"],
)
def test_values_are_saved_and_loaded(value: Any, tmp_path: Path) -> None:
    flow.save(value, tmp_path / "value")
    flow.save(value, str(tmp_path / "value"))  # what was there is replaced
    loaded = flow.load(tmp_path / "value")
    assert_same(value, dict(loaded) if isinstance(value, dict) else loaded)
    assert_same(value, flow.load(tmp_path / "value", map_location="cpu"))


def test_files_of_torch_are_read_and_code_in_them_is_not_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "plain.pt")
    assert_same({"w": torch.ones(2)}, flow.load(tmp_path / "plain.pt", map_location="cpu"))
    torch.save({"w": subprocess.Popen}, tmp_path / "code.pt")
    with pytest.raises(CheckpointError) as caught:
        flow.load(tmp_path / "code.pt")
    check_told(caught.value, "code.pt", hint="only tensors and plain values")


@pytest.mark.every_case
@pytest.mark.parametrize(
    ("act", "told", "hint"),
    [
        (lambda: flow.save({}, io.BytesIO()), "flow.save() got a BytesIO", "pass a path"),
        (lambda: flow.load(io.BytesIO()), "flow.load() got a BytesIO", "pass a path"),
        (
            lambda: flow.save(net(), "somewhere"),
            "flow.save() got a Sequential: code is not saved",
            "state_dict",
        ),
        (lambda: flow.load("/nowhere/at all"), "/nowhere/at all", "look at the path"),
    ],
)
def test_what_cannot_be_saved_or_loaded_is_told(act: Any, told: str, hint: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        act()
    check_told(caught.value, told, hint=hint)


def test_ranks_other_than_the_first_are_refused(tmp_path: Path) -> None:
    for act in (
        lambda: flow.save({}, tmp_path / "x", global_dst_rank=1),
        lambda: flow.load(tmp_path / "x", global_src_rank=3),
    ):
        with pytest.raises(DistributedError) as caught:
            act()
        check_told(caught.value, "there is one process, of rank 0", hint="leave the rank out")
    flow.save({"a": torch.ones(1)}, tmp_path / "x", global_dst_rank=0)
    assert_same(torch.ones(1), flow.load(tmp_path / "x", global_src_rank=0)["a"])


# --- deployment ------------------------------------------------------------------------------------------------------

DEPLOYED = """
import sys
import torch
import monograph.flow as flow

artifact = flow.load(sys.argv[1])
assert "tests" not in sys.modules
flow.save({"y": artifact(torch.load(sys.argv[2]))}, sys.argv[3])
"""


def test_a_saved_graph_runs_without_the_model(tmp_path: Path) -> None:
    model, x = net(), batches(1)[0]
    step = graph(lambda self, x: self.model(x), model=model)
    expected = step(x).detach()
    flow.save(step, tmp_path / "deployed")
    flow.save(step, tmp_path / "deployed")  # replaced
    torch.save(x, tmp_path / "x.pt")
    command = [sys.executable, "-c", DEPLOYED, *(str(tmp_path / name) for name in ("deployed", "x.pt", "y"))]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert_same(expected, flow.load(tmp_path / "y")["y"].detach())


def test_a_saved_graph_takes_batches_of_a_declared_range(tmp_path: Path) -> None:
    model = net()
    step = graph(lambda self, x: self.model(x), model=model)
    step.compile(mg.spec((mg.Dim("rows", 2, 16), 3)))
    flow.save(step, tmp_path / "deployed")
    artifact = flow.load(tmp_path / "deployed")
    for rows in (2, 5, 16):
        x = torch.randn(rows, 3)
        torch.testing.assert_close(artifact(x), model(x))


def test_a_graph_without_a_program_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError) as caught:
        flow.save(graph(lambda self, x: x), tmp_path / "deployed")
    check_told(caught.value, "has no program yet", hint="graph.compile(mg.spec(...))")


@pytest.mark.parametrize("name", ["model.mlir", "pickled_data", "snapshot_done"])
def test_what_oneflow_wrote_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(CheckpointError) as caught:
        flow.load(tmp_path)
    check_told(caught.value, str(tmp_path), "was written by OneFlow", hint="numpy.savez")


def test_a_training_graph_is_saved_too(tmp_path: Path) -> None:
    step = step_of()
    data = batches(3)
    step(data[0])
    flow.save(step, tmp_path / "deployed")
    artifact = flow.load(tmp_path / "deployed")
    expected = trained(step, data[1:])
    assert_same(expected, [artifact.train(x).detach() for x in data[1:]])
    assert_same(loss_of(step.model, data[0]).shape, torch.Size([]))
