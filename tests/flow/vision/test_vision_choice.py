"""torchvision's classes where it can be imported, our own where it cannot; and never for `import monograph`."""

from __future__ import annotations

import os
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.warm import run_script

WITHOUT = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())

import pickle
from pathlib import Path
import numpy
import torch
import monograph as mg
import monograph.flow.vision as flowvision
import monograph.flow.vision.transforms as transforms
from monograph.flow.vision.models.neural_style_transfer.stylenet import neural_style_transfer

assert not [name for name in sys.modules if name.split(".")[0] in BLOCKED]
assert flowvision.models.MobileNetV2.__module__ == "monograph.flow.vision.own.mobilenet_v2"

folder = Path("data/cifar-10-batches-py")
folder.mkdir(parents=True)
rows = numpy.random.default_rng(0).integers(0, 256, (4, 3072), dtype=numpy.uint8)
for name in ("test_batch", *(f"data_batch_{i}" for i in range(1, 6))):
    (folder / name).write_bytes(pickle.dumps({"data": rows, "labels": [0, 1, 2, 3]}))
(folder / "batches.meta").write_bytes(pickle.dumps({"label_names": list("abcd")}))
chain = transforms.Compose([
    transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip(), transforms.Resize(16),
    transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3),
])
data = flowvision.datasets.CIFAR10(root="data", train=True, transform=chain, download=True)
print(type(flowvision.datasets.CIFAR10("data")[0][0]).__module__)
x, y = next(iter(torch.utils.data.DataLoader(data, batch_size=4)))
step = mg.train_graph(
    model := flowvision.models.mobilenet_v2(num_classes=4, inverted_residual_setting=[[1, 8, 1, 2]]),
    torch.nn.CrossEntropyLoss(),
    torch.optim.SGD(model.parameters(), lr=0.1),
)
assert step(x, y).isfinite()
for make in (flowvision.models.resnet18, neural_style_transfer):
    make().eval()(torch.rand(1, 3, 32, 32))
try:
    transforms.ColorJitter
except mg.UnavailableError as error:
    print(error.message, "|", error.hint.split(",")[0])
try:
    transforms.ToPILImage()(x[0])
except ImportError as error:
    print(error)
"""

WITH = """
import tests.support.torchvision_ops
import torchvision
import monograph.flow.vision as flowvision

assert flowvision.models.MobileNetV2 is torchvision.models.MobileNetV2
assert flowvision.models.ResNet is torchvision.models.ResNet
assert flowvision.models.AlexNet is torchvision.models.AlexNet
assert type(flowvision.models.resnet18()) is torchvision.models.ResNet
for name in flowvision.transforms.__all__ + ["ColorJitter"]:
    assert getattr(flowvision.transforms, name) is getattr(torchvision.transforms, name), name
assert not hasattr(flowvision.transforms, "Nothing")
"""


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    return run_script(["script.py"], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})


@pytest.mark.parametrize(
    ("blocked", "image", "told"),
    [
        (("torchvision", "PIL"), "numpy", "ToPILImage needs Pillow: pip install pillow"),
        (("torchvision",), "PIL.Image", ""),
    ],
)
def test_everything_runs_without_torchvision(
    tmp_path: Path, blocked: tuple[str, ...], image: str, told: str
) -> None:
    if "PIL" not in blocked:
        pytest.importorskip("PIL")
    done = run(f"BLOCKED = {blocked}\n{WITHOUT}", tmp_path)
    assert done.returncode == 0, done.stderr
    jitter = "there is no transform ColorJitter without torchvision | pip install 'monograph[vision]'; without it there are CenterCrop"
    assert done.stdout.strip().split("\n") == [image, jitter, *filter(None, [told])]


def test_classes_are_those_of_torchvision_where_it_is(tmp_path: Path) -> None:
    if find_spec("torchvision") is None:
        pytest.skip("torchvision comes with the extra `vision`")
    done = run(WITH, tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_torchvision_for_another_torch_is_as_none(tmp_path: Path) -> None:
    (tmp_path / "torchvision.py").write_text(
        'raise RuntimeError("operator torchvision::nms does not exist")\n'
    )
    done = run(
        "import monograph.flow.vision as v; print(v.models.ResNet.__module__, v.transforms.Resize.__module__)",
        tmp_path,
    )
    assert done.stdout.split() == ["monograph.flow.vision.own.resnet", "monograph.flow.vision.own.transforms"]


def test_monograph_itself_imports_neither(tmp_path: Path) -> None:
    done = run("import sys, monograph; print({'torchvision', 'PIL'} & set(sys.modules))", tmp_path)
    assert done.stdout.strip() == "set()", done.stderr
