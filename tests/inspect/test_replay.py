"""replay(): to go through a step and back, and to look at its values."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import monograph as mg
from monograph.inspect.replay_prompt import Session
from tests.inspect.faults import Step, Through, batch, line_of


def eager_values(step: Step, x: Tensor, y: Tensor) -> tuple[dict[str, Tensor], nn.Module]:
    """What each module returns in a plain eager step, and the model behind it."""
    model = copy.deepcopy(step.model.to(nn.Module))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    found: dict[str, Tensor] = {}
    for path, module in model.named_modules():
        name = f"model.{path}" if path else "model"

        def keep(_module: nn.Module, _inputs: object, output: Tensor, name: str = name) -> None:
            found[name] = output.detach().clone()
            output.register_hook(lambda grad, name=name: found.__setitem__(f"grad/{name}", grad.clone()))

        module.register_forward_hook(keep)
    nn.functional.cross_entropy(model(x), y).backward()
    for path, parameter in model.named_parameters():
        found[f"grad/model.{path}"] = parameter.grad.clone()
    optimizer.step()
    return found, model


def test_values_are_those_of_eager_mode() -> None:
    step, (x, y) = Step(), batch()
    torch.manual_seed(11)
    walk = step.replay(x, y)
    torch.manual_seed(11)
    expected, model = eager_values(step, x, y)
    walk.run()
    assert len(expected) == 8 + 8 + 4  # what each module returns, its gradient, and gradients of parameters
    for name, value in expected.items():
        assert torch.equal(walk.value(name), value), name
    for path, parameter in model.named_parameters():
        assert torch.equal(walk.new(f"model.{path}"), parameter), path
        assert torch.equal(walk.grad_of(f"model.{path}"), expected[f"grad/model.{path}"])


def test_it_goes_to_places_and_back() -> None:
    walk = Step().replay(*batch())
    assert walk.position == 0
    first = walk.run_to("model.second")
    assert first.where.module.startswith("model.second")
    assert walk.run_to("model.second.fc", phase="backward").where.phase == "backward"
    here = walk.position
    made = walk.value("model.first").clone()
    walk.back(5)
    assert walk.position == here - 5
    walk.step(5)
    assert torch.equal(walk.value("model.first"), made)
    walk.run()
    end = walk.position
    walk.step(5)
    assert walk.position == end
    walk.back(10_000)
    assert walk.position == 0
    op = walk.run_to(f"faults.py:{line_of('scale')}")
    assert op.where.line == line_of("scale")


def test_random_numbers_stay_as_drawn() -> None:
    walk = Step().replay(*batch())
    walk.run_to("model.second")
    drawn = walk.value("model.first").clone()
    name = next(op.name for op in walk.ops if "bernoulli" in op.text)
    mask = walk.value(name).clone()
    walk.back(10)
    torch.rand(5)
    walk.run()
    assert torch.equal(walk.value(name), mask)
    assert torch.equal(walk.value("model.first"), drawn)


def test_what_lies_ahead_is_not_known() -> None:
    walk = Step().replay(*batch())
    with pytest.raises(mg.DefinitionError, match="not known yet"):
        walk.value("model.head")
    with pytest.raises(mg.DefinitionError, match=r"model\.head"):
        walk.value("model.heat")
    with pytest.raises(mg.DefinitionError, match="no op belongs to"):
        walk.run_to("model.third")
    walk.run()
    with pytest.raises(mg.DefinitionError, match="go back first"):
        walk.run_to("model.first")


def test_watches_note_values() -> None:
    walk = Step().replay(*batch())
    watch = walk.watch("model.*.norm")
    walk.run()
    modules = {op.where.module for op, _ in watch.seen}
    assert modules == {"model.first.norm", "model.second.norm"}
    assert "model.first.norm" in str(watch)


def test_micro_batches_and_several_calls() -> None:
    step, (x, y) = Step(), batch()
    step.config.set_gradient_accumulation_steps(3)
    walk = step.replay(x, y)
    walk.run()
    calls = [walk.value("model.head", call=number) for number in range(3)]
    assert [tuple(item.shape) for item in calls] == [(2, 4)] * 3
    assert not torch.equal(calls[0], calls[1])
    assert torch.equal(walk.value("model.head"), calls[2])


def test_gradients_of_a_module_that_is_called_twice_in_each_micro_batch() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(torch.tanh(self.fc(x)))

    model = Twice()
    counterpart, made = copy.deepcopy(model), []
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.set_gradient_accumulation_steps(2)
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    walk = step.replay(x, y)
    walk.run()

    def keep(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        output.retain_grad()
        made.append(output)

    counterpart.fc.register_forward_hook(keep)
    for part, expected in zip(x.chunk(2), y.chunk(2), strict=True):
        (nn.functional.mse_loss(counterpart(part), expected) / 2).backward()
    assert len(made) == 4
    for call, output in enumerate(made):
        assert torch.equal(walk.value("model.fc", call=call), output), call
        assert torch.equal(walk.grad_of("model.fc", call=call), output.grad), call


def test_a_session_at_a_prompt() -> None:
    step, (x, y) = Step(), batch()
    commands = (
        "to model.second backward\nvalue model.first\nnonsense\nvalue nothing\nstep\nback 2\noperands\n"
    )
    commands += (
        "watch *tanh*\nrun\nwatch\nnew model.head.weight\ngrad model.head\nnonfinite\nlist tanh\nquit\n"
    )
    out = io.StringIO()
    session = Session(step.replay(x, y), io.StringIO(commands), out)
    session.cmdloop()
    text = out.getvalue()
    assert "f32[6, 8]" in text
    assert "Unknown syntax: nonsense" in text
    assert "no value 'nothing'" in text
    assert "all results and all new state are finite" in text


def test_it_finds_what_is_not_finite_wherever_it_stands() -> None:
    def root_of_kept(x: Tensor) -> Tensor:
        return (torch.nn.functional.dropout(x.abs(), 0.9) - 1e-3).sqrt()

    walk = Step(Through(root_of_kept)).replay(*batch())
    before = torch.get_rng_state()
    reports = [walk.find_nonfinite()]
    for place in ("model.head", "optimizer.0"):
        walk.run_to(place)
        reports.append(walk.find_nonfinite())
    assert reports[0].found is not None
    assert "sqrt" in reports[0].found.op
    assert reports[1] == reports[2] == reports[0]  # the same numbers are dropped
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tied_weight_goes_by_each_of_its_names() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    graph = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    walk = graph.replay(torch.randn(3, 4), torch.tensor([0, 1, 2]))
    walk.run()
    for look in (walk.value, walk.grad_of, walk.new):
        assert torch.equal(look("model.2.weight"), look("model.0.weight"))


def test_live_state_is_not_touched() -> None:
    step, (x, y) = Step(), batch()
    before = {name: item.clone() for name, item in step.model.state_dict().items()}
    walk = step.replay(x, y)
    walk.run()
    walk.value("model.head.weight").add_(1)
    assert all(torch.equal(before[name], item) for name, item in step.model.state_dict().items())
