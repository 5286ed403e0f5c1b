"""Tensors of arrays, labels of int32 and values with a history: as OneFlow has them, and PyTorch is left as it is."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

import monograph.flow as flow
from monograph.flow import nn
from tests.support import assert_same


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
def test_a_tensor_of_an_array_is_a_copy(dtype):
    array = np.arange(6).astype(dtype).reshape(2, 3)
    made = flow.Tensor(array)
    array[:] = 9
    assert_same(torch.arange(6.0).reshape(2, 3), made)


def test_a_tensor_of_a_tensor_is_a_copy_and_other_arguments_are_torchs():
    source = torch.ones(3)
    made = flow.Tensor(source)
    source.zero_()
    assert_same(torch.ones(3), made)
    assert flow.Tensor(2, 3).shape == (2, 3)
    assert_same(torch.Tensor([1, 2]), flow.Tensor([1, 2]))
    assert type(made) is torch.Tensor


def test_a_script_that_keeps_its_initial_values():
    initial = np.ones((3, 2), np.float32)
    layer = nn.Linear(2, 3)
    layer.weight = nn.Parameter(flow.Tensor(initial))
    optimizer = flow.optim.SGD(layer.parameters(), lr=0.1)
    layer(flow.ones(1, 2)).sum().backward()
    optimizer.step()
    assert (initial == 1).all()
    assert not np.array_equal(layer.weight.numpy(), initial)


def test_it_is_torchs_class_for_everybody_who_asks():
    x = torch.ones(2)
    assert isinstance(x, flow.Tensor)
    assert isinstance(nn.Parameter(x), flow.Tensor)
    assert not isinstance(1, flow.Tensor)
    assert issubclass(torch.Tensor, flow.Tensor)
    assert type(x) == flow.Tensor  # noqa: E721
    assert {torch.Tensor: 1}[flow.Tensor] == 1
    assert flow.Tensor.abs is torch.Tensor.abs

    class Mine(flow.Tensor):
        pass

    mine = torch.ones(2).as_subclass(Mine)
    assert not isinstance(x, Mine)
    assert type(mine + 1) is Mine
    assert Mine != torch.Tensor
    assert_same(x, pickle.loads(pickle.dumps(flow.Tensor(x))))


def test_to_tensor_is_the_value_with_its_history():
    weight = torch.ones(2, requires_grad=True)
    product = weight * 3
    assert product.to(flow.Tensor) is product
    product.to(flow.Tensor).sum().backward()
    assert_same(torch.full((2,), 3.0), weight.grad)


def test_to_tensor_inside_of_build():
    class Step(nn.Graph):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 2)
            self.add_optimizer(flow.optim.SGD(self.layer.parameters(), lr=0.1))

        def build(self, x):
            loss = self.layer(x).to(flow.Tensor).square().sum()
            loss.backward()
            return loss

    step = Step()
    plain = torch.nn.Linear(2, 2)
    plain.load_state_dict(step.layer.to(nn.Module).state_dict())
    x = torch.randn(3, 2)
    expected = plain(x).square().sum()
    assert_same(expected.detach(), step(x))


def test_values_with_a_history_are_read():
    weight = torch.ones(2, requires_grad=True)
    product = weight * 3
    assert product.numpy().tolist() == [3.0, 3.0]
    assert np.asarray(product).tolist() == [3.0, 3.0]
    assert weight.numpy(force=True).tolist() == [1.0, 1.0]
    assert product.requires_grad
    with pytest.raises(TypeError):
        torch.ones(2, dtype=torch.bfloat16).numpy()


PLAIN = """
import sys, torch
{imports}
try:
    (torch.ones(2, requires_grad=True) * 2).numpy()
except RuntimeError as error:
    assert "Can't call numpy() on Tensor that requires grad" in str(error)
    print("refused")
"""


@pytest.mark.one_case
@pytest.mark.parametrize("imports", ["import monograph", "__import__('monograph.flow')"])
def test_who_does_not_use_flow_keeps_torchs_error(imports):
    """Also where something else of the process has imported it."""
    code = PLAIN.format(imports=imports)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr


@pytest.mark.every_case
@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_labels_of_any_integers(dtype):
    logits = torch.randn(5, 3)
    classes = torch.tensor([0, 2, 1, 1, 0])
    labels = classes.to(dtype)
    weight = torch.tensor([1.0, 2.0, 3.0])
    functional = torch.nn.functional
    logs = logits.log_softmax(1)
    for ours, theirs in (
        (nn.CrossEntropyLoss(label_smoothing=0.1), torch.nn.CrossEntropyLoss(label_smoothing=0.1)),
        (nn.CrossEntropyLoss(weight, ignore_index=2), torch.nn.CrossEntropyLoss(weight, ignore_index=2)),
    ):
        assert_same(theirs(logits, classes), ours(logits, labels))
        assert repr(ours) == repr(theirs)
        assert isinstance(ours, torch.nn.CrossEntropyLoss)
    assert_same(torch.nn.NLLLoss()(logs, classes), nn.NLLLoss()(logs, labels))
    assert_same(
        functional.cross_entropy(logits, classes, weight), nn.functional.cross_entropy(logits, labels, weight)
    )
    assert_same(
        functional.nll_loss(logs, classes, reduction="sum"),
        nn.functional.nll_loss(logs, labels, reduction="sum"),
    )
    assert_same(functional.one_hot(classes, 4), nn.functional.one_hot(labels, 4))


def test_probabilities_stay_probabilities():
    logits, target = torch.randn(4, 3), torch.rand(4, 3).softmax(1)
    assert_same(torch.nn.functional.cross_entropy(logits, target), nn.CrossEntropyLoss()(logits, target))


def test_labels_of_int32_in_a_graph():
    class Step(nn.Graph):
        def __init__(self, model):
            super().__init__()
            self.model, self.loss = model, nn.CrossEntropyLoss()
            self.add_optimizer(flow.optim.SGD(model.parameters(), lr=0.1))

        def build(self, x, y):
            loss = self.loss(self.model(x), y)
            loss.backward()
            return loss

    model, plain = nn.Linear(4, 3), torch.nn.Linear(4, 3)
    plain.load_state_dict(model.state_dict())
    x, y = torch.randn(5, 4), torch.tensor([0, 2, 1, 1, 0])
    got = Step(model)(x, y.int())
    expected = torch.nn.functional.cross_entropy(plain(x), y)
    expected.backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert_same(expected.detach(), got)
    assert_same(dict(plain.state_dict()), dict(model.state_dict()))


TYPED = [
    "BoolTensor",
    "ByteTensor",
    "CharTensor",
    "DoubleTensor",
    "FloatTensor",
    "HalfTensor",
    "IntTensor",
    "LongTensor",
]


@pytest.mark.every_case
@pytest.mark.parametrize("name", TYPED)
def test_a_typed_constructor_copies(name: str) -> None:
    typed, plain = getattr(flow, name), getattr(torch, name)
    array = torch.ones(3, dtype=plain.dtype).numpy()
    made = typed(array)
    array[0] = 0
    assert_same(torch.ones(3, dtype=plain.dtype), made)
    source = torch.ones(2, dtype=plain.dtype)
    made = typed(source)
    source.zero_()
    assert_same(torch.ones(2, dtype=plain.dtype), made)
    assert typed(2, 3).shape == (2, 3)
    assert_same(plain([1, 0]), typed([1, 0]))
    assert isinstance(made, typed)
    assert not isinstance(torch.ones(1, dtype=torch.complex64), typed)
    assert typed.dtype is plain.dtype
    assert typed == plain
    assert {plain: 1}[typed] == 1
    assert torch.ones(2).type(typed).dtype is plain.dtype
    assert torch.ones(2).type(typed).type() == f"torch.{name}"


def test_typed_constructors_say_what_the_default_is() -> None:
    try:
        with pytest.warns(UserWarning, match="set_default_tensor_type"):
            flow.set_default_tensor_type(flow.DoubleTensor)
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
