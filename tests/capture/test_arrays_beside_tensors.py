"""Memory that a step knows as a tensor and as numbers of Python: arrays of NumPy, buffers, what `.numpy()` gives."""

from __future__ import annotations

import array
import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monograph as mg
from tests.support.steps import graph

Build = Callable[[Any, torch.Tensor], torch.Tensor]
X = torch.ones(2)


def _weights() -> Any:
    return np.array([1.0, 2.0], dtype=np.float32)


READ_AS_BOTH: dict[str, Build] = {
    "an item": lambda self, x: (torch.from_numpy(self.a) * x).sum() * self.a[1].item(),
    "a maximum": lambda self, x: (torch.tensor(self.a) * x).sum() / self.a.max().item(),
    "a branch": lambda self, x: torch.as_tensor(self.a) * x if self.a[1] > 2.5 else x,
    "a tensor that the graph holds": lambda self, x: self.t * x * float(self.a[1]),
    "a branch on the tensor": lambda self, x: x * 2 if torch.from_numpy(self.a).sum() > 4.5 else x,
}


@pytest.mark.parametrize("build", READ_AS_BOTH.values(), ids=READ_AS_BOTH)
def test_an_array_is_read_as_a_tensor_and_as_a_number(build: Build):
    a = _weights()
    step = graph(build, a=a, t=torch.from_numpy(a))
    for number in (2.0, 3.0, 4.0, 2.0):
        a[1] = number
        assert torch.equal(step(X), build(step, X))


def test_an_array_that_is_a_tensor_alone_needs_no_new_build():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        mask = self.a
        return torch.from_numpy(mask) * x + torch.as_tensor(self.a, dtype=torch.float64)

    a = _weights()
    step = graph(build, a=a)
    for number in (2.0, 3.0, 4.0):
        a[1] = number
        assert torch.equal(step(X), build(step, X))
    assert len(step.builds) == 1


def test_a_tensor_made_of_an_array_is_written_into_it():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.from_numpy(self.a).add_(x)
        return torch.from_numpy(self.a).sum() * x

    step, beside = (graph(build, a=_weights()) for _ in range(2))
    for _ in range(3):
        assert torch.equal(step(X), build(beside, X))
        assert np.array_equal(step.a, beside.a)
    assert len(step.builds) == 1


def _bytes_and_tensor() -> tuple[Any, torch.Tensor]:
    memory = bytearray(_weights().tobytes())
    return memory, torch.frombuffer(memory, dtype=torch.float32)


def _array_and_tensor() -> tuple[Any, torch.Tensor]:
    memory = array.array("f", [1.0, 2.0])
    return memory, torch.frombuffer(memory, dtype=torch.float32)


def _shown_by(make: Callable[[torch.Tensor], Any]) -> Callable[[], tuple[Any, torch.Tensor]]:
    def made() -> tuple[Any, torch.Tensor]:
        tensor = torch.ones(2)
        return make(tensor), tensor

    return made


SHOWN: dict[str, Callable[[], tuple[Any, torch.Tensor]]] = {
    "numpy()": _shown_by(torch.Tensor.numpy),
    "reversed": _shown_by(lambda tensor: tensor.numpy()[::-1]),
    "DLPack": _shown_by(np.from_dlpack),
    "memoryview": _shown_by(lambda tensor: memoryview(tensor.numpy())),
    "ctypes": _shown_by(lambda tensor: (ctypes.c_float * 2).from_address(tensor.data_ptr())),
    "in a list": _shown_by(lambda tensor: [tensor.numpy()]),
    "a bytearray": _bytes_and_tensor,
    "an array": _array_and_tensor,
}


@pytest.mark.parametrize("make", SHOWN.values(), ids=SHOWN)
def test_what_a_step_changes_by_ops_and_reads_by_python_is_refused(make: Callable[[], tuple[Any, Any]]):
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.t.add_(1.0)
        return x * float(np.ravel(self.a)[0])

    memory, tensor = make()
    before = tensor.clone()
    with pytest.raises(mg.errors.AliasError, match=r"can read the same memory as graph.a") as info:
        graph(build, a=memory, t=tensor)(X)
    assert info.value.where.file == __file__
    assert torch.equal(tensor, before)


def test_numbers_of_a_parameter_are_those_from_before_the_update():
    def train(step: Any) -> list[float]:
        return [step(X).item() for _ in range(3)]

    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss = self.model(x).sum() * float(self.a[0, 0])
        loss.backward()
        return loss

    def made() -> Any:
        torch.manual_seed(0)
        model = nn.Linear(2, 1)
        return _holding_model(build, model)

    assert train(made()) == train(made().eager)


def _holding_model(build: Build, model: nn.Linear) -> Any:
    step = graph(build, model=model)
    step.a = model.weight.detach().numpy()
    step.add_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    return step


def test_a_parameter_that_build_changes_is_not_read_as_numbers():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.model.weight.mul_(2.0)
        loss = self.model(x).sum() * float(self.a[0, 0])
        loss.backward()
        return loss

    with pytest.raises(mg.errors.AliasError, match=r"changes model.weight.*as graph.a"):
        _holding_model(build, nn.Linear(2, 1))(X)


def test_an_argument_that_shows_an_array_is_not_changed_where_that_is_read():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        x.add_(1.0)
        return x * float(self.a[0])

    step = graph(build, a=_weights())
    with pytest.raises(mg.errors.AliasError, match=r"changes x, .*as graph.a"):
        step(torch.from_numpy(step.a))


def test_python_changes_an_array_before_a_tensor_is_made_of_it():
    def build(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.a[0] += 1
        return torch.from_numpy(self.a) * x

    step, beside = (graph(build, a=_weights()) for _ in range(2))
    for _ in range(3):
        assert torch.equal(step(X), build(beside, X))


def _changed_after(self: Any, x: torch.Tensor) -> torch.Tensor:
    made = torch.from_numpy(self.a) * x
    self.a[0] += 1
    return made


def _changed_beside(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.a[0] += 1
    return self.t * x


@pytest.mark.parametrize("build", [_changed_after, _changed_beside])
def test_python_changes_what_an_op_reads(build: Build):
    a = _weights()
    with pytest.raises(mg.errors.AliasError, match=r"Python code in build.* changes graph.a"):
        graph(build, a=a, t=torch.from_numpy(a))(X)
