"""SINGA's way of working: compile from shapes, train_one_batch, and a save that is ONNX with states beside it.

Run it with `python examples/singa_style.py [--steps N] [--out DIR]`; the digits come from scikit-learn if it is
installed, and are made up otherwise. docs/singa.md says which call of SINGA is which call here.
"""

import argparse
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import monograph as mg

BATCH = 64
HELD_OUT = 5 * BATCH
HAS_ONNX = all(find_spec(name) for name in ("onnx", "onnxruntime", "onnxscript"))


class Forward(mg.Graph):
    """The forward pass of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def build(self, x: Tensor) -> Any:
        return self.model.forward(x)


class TrainOneBatch(mg.Graph):
    """The `train_one_batch` of a model, which steps the optimizer itself."""

    def __init__(self, model: "Model") -> None:
        super().__init__()
        self.model, self.as_written = model, model.train_one_batch
        self.add_optimizer(model.optimizer, manual=True)

    def build(self, x: Tensor, y: Tensor) -> Any:
        return self.as_written(x, y)


class Model(nn.Module):
    """Subclass it, set `self.optimizer`, and write `forward` and `train_one_batch`."""

    optimizer: Optimizer
    uses_graph = False

    def train_one_batch(self, x: Tensor, y: Tensor) -> Any:
        """Forward, loss, backward and update. `compile` puts the graph of it in its place."""
        raise NotImplementedError

    def compile(self, inputs: Sequence[Any], is_train: bool = True, use_graph: bool = True) -> None:
        """Find all shapes. `inputs` are specs or tensors: x alone, or x and y for the training step as well."""
        vars(self).pop("train_one_batch", None)  # the graph of an earlier compile
        self.training_graph, self.inference_graph = TrainOneBatch(self), Forward(self)
        self.uses_graph = use_graph
        self.eval()
        with torch.no_grad():
            self.inference_graph.compile(inputs[0])
        self.train(is_train)
        if len(inputs) > 1:
            self.training_graph.compile(*inputs)
        if use_graph:
            self.train_one_batch = self.training_graph

    def __call__(self, x: Tensor) -> Any:
        """The forward pass; in evaluation mode it is a graph too, without gradients."""
        if self.training or not self.uses_graph:
            return super().__call__(x)
        with torch.no_grad():
            return self.inference_graph(x)

    def get_params(self) -> Iterator[tuple[str, Tensor]]:
        """The parameters by name, to be read or filled in place."""
        return ((name, parameter.detach()) for name, parameter in self.named_parameters())

    def save(self, directory: Path, state: dict[str, Any] | None = None, overwrite: bool = False) -> None:
        """Write all that training goes on from, with a state of your own, and the forward pass as ONNX."""
        saved = {"training": self.training_graph.state_dict(), "own": state or {}}
        mg.save(saved, directory / "states", overwrite=overwrite)
        if HAS_ONNX:
            mg.export_onnx(self.inference_graph, directory / "model.onnx", state=state)
        else:
            warnings.warn('no model.onnx is written: pip install "monograph[onnx]"', stacklevel=2)

    def load(self, directory: Path, include_state: bool = True) -> dict[str, Any]:
        """Load what `save` wrote, or only the weights in the ONNX file; gives the state of your own.

        If all weights fit, training goes on where it was. Else each that does not is warned of, the others are
        loaded, and the optimizer stays as it is.
        """
        if not include_state:
            return mg.load_onnx_weights(directory / "model.onnx", self)
        saved = mg.load(directory / "states")
        training, own = saved["training"], saved["own"]
        if not (misfits := find_misfits(training["model"], self.state_dict())):
            self.training_graph.load_state_dict(training)
            return own
        for name, misfit in misfits.items():
            warnings.warn(f"{name}: {misfit}", stacklevel=2)
        fitting = {name: tensor for name, tensor in training["model"].items() if name not in misfits}
        self.load_state_dict(fitting, strict=False)
        return own


def find_misfits(stored: dict[str, Tensor], present: dict[str, Tensor]) -> dict[str, str]:
    """The names that are on one side only, or have two shapes."""
    there, here = ({name: tuple(tensor.shape) for name, tensor in side.items()} for side in (stored, present))
    return {
        name: f"{there.get(name, 'missing')} in the file, {here.get(name, 'unexpected')} in the model"
        for name in {**here, **there}
        if there.get(name) != here.get(name)
    }


class DigitNet(Model):
    """A small convolutional net. Its lazy layers get their shapes in `compile`."""

    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.LazyConv2d(16, 3, padding=1), nn.LazyBatchNorm2d(), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.classifier = nn.Sequential(nn.Flatten(), nn.Dropout(0.2), nn.LazyLinear(num_classes))
        self.loss_fn = nn.CrossEntropyLoss()
        self.optimizer = SGD(self.parameters(), lr=0.05, momentum=0.9)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x))

    def train_one_batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out = self.forward(x)
        loss = self.loss_fn(out, y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return out, loss


def load_digits() -> tuple[Tensor, Tensor]:
    """Images [N, 1, 8, 8] with labels [N], in a fixed random order."""
    generator = torch.Generator().manual_seed(0)
    if find_spec("sklearn"):
        from sklearn import datasets

        digits = datasets.load_digits()
        x, y = torch.from_numpy(digits.images).float().div(16.0).unsqueeze(1), torch.from_numpy(digits.target)
    else:
        y = torch.randint(10, (1797,), generator=generator)
        patterns = torch.rand(10, 1, 8, 8, generator=generator)
        x = patterns[y] + 0.3 * torch.randn(1797, 1, 8, 8, generator=generator)
    order = torch.randperm(len(y), generator=generator)
    return x[order], y[order].long()


def train(model: Model, x: Tensor, y: Tensor, steps: range) -> list[Tensor]:
    """The losses of these steps; the number of a step decides its batch."""
    losses = []
    for step in steps:
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(x)
        _, loss = model.train_one_batch(x[rows], y[rows])
        losses.append(loss)
    return losses


def compiled_net() -> DigitNet:
    model = DigitNet()
    model.compile([mg.spec((BATCH, 1, 8, 8)), mg.spec((BATCH,), torch.int64)], is_train=True, use_graph=True)
    return model


def run(num_steps: int, directory: Path) -> None:
    torch.manual_seed(0)
    model = compiled_net()
    print(model.training_graph)
    memory = model.training_graph.builds[-1].plan.memory
    print(
        f"\nthe state holds {memory.state_bytes:,} bytes, and a step {memory.peak_bytes:,} more at most, in "
        f"{memory.peak_node}; no data was seen yet"
    )

    for name, values in model.get_params():
        if name.endswith("0.weight"):
            values.uniform_(-0.3, 0.3)

    x, y = load_digits()
    train_x, train_y = x[:-HELD_OUT], y[:-HELD_OUT]
    half = num_steps // 2
    losses = train(model, train_x, train_y, range(half))
    model.save(directory, state={"step": half}, overwrite=True)
    losses += train(model, train_x, train_y, range(half, num_steps))
    print(f"\n{num_steps} steps: loss {losses[0].item():.4f} to {losses[-1].item():.4f}")

    again = compiled_net()
    state = again.load(directory)
    resumed = train(again, train_x, train_y, range(state["step"], num_steps))
    pairs = list(zip(losses[half:], resumed, strict=True))
    pairs += zip(model.state_dict().values(), again.state_dict().values(), strict=True)
    same = sum(torch.equal(a, b) for a, b in pairs)
    print(f"resumed from step {half}: {same} of {len(pairs)} losses and tensors have the same bits")

    model.eval()
    right = sum(
        (model(images).argmax(1) == labels).sum()
        for images, labels in zip(x[-HELD_OUT:].split(BATCH), y[-HELD_OUT:].split(BATCH), strict=True)
    )
    print(f"held-out accuracy {right / HELD_OUT:.1%}, by a graph")

    if HAS_ONNX:
        state = again.load(directory, include_state=False)
        print(f"the weights of step {state['step']} came back from model.onnx")
    else:
        print('nothing of ONNX was tried: pip install "monograph[onnx]"')

    model.train()
    print(f"\n{model.training_graph.profile(train_x[:BATCH], train_y[:BATCH])}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument(
        "--out", type=Path, help="where to save, over an earlier save; a temporary directory by default"
    )
    chosen = parser.parse_args()
    if chosen.steps < 1:
        parser.error("--steps is one or more")
    if chosen.out is not None:
        run(chosen.steps, chosen.out)
        return
    with tempfile.TemporaryDirectory() as directory:
        run(chosen.steps, Path(directory))


if __name__ == "__main__":
    main()
