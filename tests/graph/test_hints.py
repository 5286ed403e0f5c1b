"""Mistakes whose cause is not where they show: the message names the cause."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch
from torch import nn

import monograph as mg
from tests.support.steps import line_of


def classifier():
    model = nn.Linear(8, 3)
    return mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))


def test_labels_without_a_dtype():
    with pytest.raises(mg.CaptureError) as caught:
        classifier().compile(mg.spec((8, 8)), mg.spec((8,)))
    assert "mg.spec(shape, torch.int64)" in caught.value.hint
    with pytest.raises(mg.CaptureError) as caught:
        classifier()(torch.randn(8, 8), torch.zeros(8))
    assert ".long()" in caught.value.hint
    classifier().compile(mg.spec((8, 8)), mg.spec((8,), torch.int64))


@pytest.mark.parametrize(
    "function",
    [
        lambda table, index: nn.functional.embedding(index, table),
        lambda table, index: table.gather(0, index.unsqueeze(1)),
        lambda table, index: nn.functional.nll_loss(table, index),
        lambda table, index: nn.functional.one_hot(index, 3).sum() + table,
    ],
)
def test_indices_without_a_dtype(function):
    try:
        function(torch.empty(4, 3, device="meta"), torch.empty(4, device="meta"))
    except (RuntimeError, IndexError):
        pass
    else:
        pytest.skip("the kernel of this torch for tensors without data takes such indices")
    with pytest.raises(mg.CaptureError) as caught:
        mg.trace(function).compile(mg.spec((4, 3)), mg.spec((4,)))
    assert "mg.spec(shape, torch.int64)" in caught.value.hint


def test_a_batch_that_comes_as_one_argument():
    x, y = torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)
    for packed in ((x, y), [x, y]):
        with pytest.raises(mg.CaptureError) as caught:
            classifier()(packed)
        assert f"as one {type(packed).__name__} of 2: unpack it, step(*batch)" in caught.value.hint
    step = classifier()
    step(x, y)
    with pytest.raises(mg.CaptureError) as caught:
        step((x, y))
    assert "unpack it, step(*batch)" in caught.value.hint

    class Own(mg.Graph):
        def build(self, x, y):
            return x + y

    with pytest.raises(mg.SignatureError) as caught:
        Own()((x, y))
    assert "unpack it, step(*batch)" in caught.value.hint


def test_arguments_that_are_not_inputs_and_a_target():
    for batch in ((torch.randn(4, 8),), (torch.randn(4, 8),) * 3):
        with pytest.raises(mg.CaptureError) as caught:
            classifier()(*batch)
        assert "the last argument is the target, and those before it go to the model" in caught.value.hint
        assert "unpack" not in caught.value.hint

    class Wrong(nn.Linear):
        def forward(self, x):
            return super().forward(x, x)

    model = Wrong(8, 3)
    step = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(
        Exception, match="positional argument"
    ) as caught:  # it is not the step that is called wrongly
        step(torch.randn(4, 8), torch.zeros(4, dtype=torch.int64))
    assert "the last argument" not in getattr(caught.value, "hint", "")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_that_build_makes(layout):
    padded = mg.trace(lambda x: torch.nested.nested_tensor([x, x], layout=layout).to_padded_tensor(0.0))
    # torch may read the sizes where it makes the tensor, or where it is used
    with pytest.raises(mg.MonographError, match="nested tensor") as caught:
        padded(torch.ones(2, 3))
    assert caught.value.where.file == __file__
    assert "a padded tensor and a mask" in caught.value.hint


def test_a_build_that_only_prepares_to_run():
    with pytest.raises(mg.DefinitionError, match=r"build\(\) of Yields has a yield") as caught:

        class Yields(mg.Graph):
            def build(self, x):  # at: yields
                yield x

    assert caught.value.where.file == __file__
    assert caught.value.where.line == line_of("yields", __file__)
    with pytest.raises(mg.DefinitionError, match="is async") as caught:

        class Waits(mg.Graph):
            async def build(self, x):  # at: waits
                return x

    assert caught.value.where.line == line_of("waits", __file__)

    def one_by_one(x):
        yield x

    with pytest.raises(mg.DefinitionError, match="one_by_one has a yield"):
        mg.trace(one_by_one)

    def doubled(x):
        return sum(item for item in (x, x))  # a generator inside is none of build()'s

    assert mg.trace(doubled)(torch.ones(1)) == 2


TOLD = """
import logging, sys, torch
import monograph as mg
from tests.support.steps import line_of
if sys.argv[1] == "shown":
    logging.basicConfig(level="INFO")
elif sys.argv[1] == "file":
    logging.basicConfig(level="INFO", filename=sys.argv[2])
double = mg.trace(lambda x: x * 2)
double.debug(0)
double(torch.ones(2))
"""


@pytest.mark.long
@pytest.mark.parametrize("log", ["none", "shown", "file"])
def test_what_debug_tells_comes_once(log, tmp_path):
    command = [sys.executable, "-c", TOLD, log, str(tmp_path / "log")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout + done.stderr).count("start capture.") == 1
    if log == "file":
        assert (tmp_path / "log").read_text().count("start capture.") == 1


def test_a_handler_of_another_level_shows_nothing(capsys):
    handler = logging.StreamHandler(sys.stderr)
    handler.setLevel(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        double = mg.trace(lambda x: x * 2)
        double.debug(0)
        double(torch.ones(2))
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().out.count("start capture.") == 1


def test_validation_through_a_training_step_under_no_grad():
    step = classifier()
    with torch.no_grad(), pytest.raises(mg.CaptureError) as caught:
        step(torch.randn(8, 8), torch.zeros(8, dtype=torch.int64))
    assert "under torch.no_grad()" in caught.value.hint
    assert "a Graph without optimizer" in caught.value.hint


def test_a_loss_that_depends_on_nothing_that_is_trained():
    model = nn.Linear(8, 3)
    step = mg.train_graph(
        model, lambda logits, _: logits.detach().sum(), torch.optim.SGD(model.parameters(), lr=0.1)
    )
    with pytest.raises(mg.CaptureError) as caught:
        step(torch.randn(8, 8), torch.zeros(8))
    assert "look for detach()" in caught.value.hint


def test_what_only_a_module_has():
    step = classifier()
    with pytest.raises(mg.DefinitionError, match="a Graph is no module") as caught:
        step.to("cpu")
    assert "step.model.to" in caught.value.hint
    assert not hasattr(step, "parameters")
    with pytest.raises(AttributeError, match="no attribute 'something'"):
        _ = step.something


def test_values_of_the_user_are_kept_beside_the_state() -> None:
    model = nn.Linear(4, 2)
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(mg.CheckpointError) as caught:
        step.load_state_dict({**step.state_dict(), "epoch": 3})
    assert '{"step": step.state_dict(), "epoch": 3}' in str(caught.value.hint)
    with pytest.raises(mg.CheckpointError) as caught:
        step.load_state_dict({"step": step.state_dict(), "epoch": 3})
    assert caught.value.hint == "the state of a graph is in it: graph.load_state_dict(state['step'])"
