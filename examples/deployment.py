"""A classifier is trained, saved with its training step, loaded without its code, trained on, and written as ONNX.

Run it with `python examples/deployment.py`; with `--onnx FILE` it writes an ONNX file too (`pip install 'monograph[onnx]'`).
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import nn

import monograph as mg


class Infer(mg.Graph):
    """The scores of a batch of any size up to 64."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, x):
        return self.model(x).softmax(1)


def drawn(number):
    """Points, and in which of three rings they are."""
    points = torch.randn(number, 2)
    return points, torch.bucketize(points.norm(dim=1), torch.tensor([0.8, 1.5]))


def deploy(path):
    """Train for a while, and save both programs over one state."""
    model = nn.Sequential(nn.Linear(2, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = mg.train_graph(model, nn.CrossEntropyLoss(), optimizer)
    for _ in range(100):
        step(*drawn(64))
    infer = Infer(model.eval())
    with torch.no_grad():
        infer.compile(mg.spec((mg.Dim("batch", max=64), 2)))  # a form is enough
    model.train()
    mg.save({"train": step, "infer": infer}, path)
    return step, infer


def right(scores, target):
    return (scores.argmax(1) == target).float().mean().item()


def main(onnx=None):
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        path = Path(folder, "rings.zip")
        step, infer = deploy(path)
        artifact = mg.load(path)  # in another process, and without the classes above
        x, y = drawn(50)
        print(f"{right(artifact.infer(x), y):.0%} right where it was loaded")
        batches, random = [drawn(64) for _ in range(100)], torch.get_rng_state()
        ours = [step(*batch) for batch in batches]
        torch.set_rng_state(random)
        theirs = [artifact.train(*batch) for batch in batches]
        same = all(map(torch.equal, ours, theirs))
        print(f"{right(artifact.infer(x), y):.0%} right after more training there")
        print(f"the losses have the same bits as those of the graph: {same}")
        mg.save(artifact, path, overwrite=True)
    if onnx is not None:
        mg.export_onnx(infer, onnx)
        print(f"wrote {onnx}")
    return same


if __name__ == "__main__":
    main(sys.argv[2] if sys.argv[1:2] == ["--onnx"] else None)
