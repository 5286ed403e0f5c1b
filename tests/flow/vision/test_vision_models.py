"""Our own models are torchvision's, bit by bit; weights come from files and fit or say why not."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import monograph as mg
import monograph.flow.vision as flowvision
import tests.support.torchvision_ops  # noqa: F401
from monograph.flow.vision.models.neural_style_transfer.stylenet import FastNeuralStyle, neural_style_transfer
from monograph.flow.vision.own.alexnet import AlexNet
from monograph.flow.vision.own.mobilenet_v2 import MobileNetV2
from monograph.flow.vision.own.resnet import BasicBlock, Bottleneck, ResNet
from tests.support import Side, assert_same, train_eagerly
from tests.support.steps import TrainStep

theirs = pytest.importorskip("torchvision").models

CLASSES = {
    MobileNetV2: theirs.MobileNetV2,
    ResNet: theirs.ResNet,
    AlexNet: theirs.AlexNet,
    BasicBlock: theirs.resnet.BasicBlock,
    Bottleneck: theirs.resnet.Bottleneck,
}
OPTIONS = {
    "mobilenet_v2": (MobileNetV2, (), {"num_classes": 7, "width_mult": 0.25}),
    "mobilenet_v2 of other rows": (
        MobileNetV2,
        (),
        {"inverted_residual_setting": [[1, 8, 1, 1], [4, 12, 2, 2]], "round_nearest": 4, "dropout": 0.5},
    ),
    "mobilenet_v2 with group norms": (
        MobileNetV2,
        (),
        {"width_mult": 0.1, "norm_layer": partial(nn.GroupNorm, 4)},
    ),
    "resnet18": (ResNet, (BasicBlock, [2, 2, 2, 2]), {"num_classes": 5}),
    "bottlenecks": (
        ResNet,
        (Bottleneck, [2, 1, 1, 1]),
        {"groups": 4, "width_per_group": 4, "zero_init_residual": True},
    ),
    "dilated": (
        ResNet,
        (Bottleneck, [1, 1, 2, 1]),
        {"width_per_group": 8, "replace_stride_with_dilation": [False, True, True]},
    ),
}
FACTORIES = {
    name: getattr(flowvision.models, name)
    for name in (
        "alexnet",
        "mobilenet_v2",
        "resnet18",
        "resnet34",
        "resnet50",
        "resnet101",
        "resnet152",
        "resnext50_32x4d",
        "resnext101_32x8d",
        "wide_resnet50_2",
        "wide_resnet101_2",
    )
}
tiny_mobilenet = partial(flowvision.models.mobilenet_v2, num_classes=4, width_mult=0.1)


def both(kind: type[nn.Module], args: tuple[Any, ...], options: dict[str, Any]) -> list[nn.Module]:
    """Our model and torchvision's, made with the same seed."""
    made = []
    for swap in ({}, CLASSES):
        torch.manual_seed(3)
        given = [swap.get(arg, arg) if isinstance(arg, type) else arg for arg in args]
        made.append(swap.get(kind, kind)(*given, **options))
    return made


def results(model: nn.Module, x: torch.Tensor) -> dict[str, Any]:
    """The outputs, gradients and buffers of a step in training, and the output in evaluation."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    y = model.train()(x)
    y.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    buffers = dict(model.named_buffers())
    with torch.no_grad():
        return {"y": y, "gradients": gradients, "x": x.grad, "buffers": buffers, "eval": model.eval()(x)}


@pytest.mark.parametrize("name", OPTIONS)
def test_own_models_are_those_of_torchvision(name: str) -> None:
    ours, model = both(*OPTIONS[name])
    assert_same(model.state_dict(), ours.state_dict())
    x = torch.randn(2, 3, 32, 32)
    assert_same(results(model, x), results(ours, x))


def test_own_alexnet_is_that_of_torchvision() -> None:
    ours, model = both(AlexNet, (), {"num_classes": 3, "dropout": 0.3})
    assert_same(model.state_dict(), ours.state_dict())
    x = torch.randn(2, 3, 64, 64)
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    assert_same(expected, ours(x))


@pytest.mark.parametrize("name", FACTORIES)
def test_factories_make_the_models_of_their_names(name: str) -> None:
    with torch.device("meta"):
        expected, model = getattr(theirs, name)(), FACTORIES[name](progress=False)
    shapes = {key: tensor.shape for key, tensor in expected.state_dict().items()}
    assert {key: tensor.shape for key, tensor in model.state_dict().items()} == shapes
    assert [type(module).__name__ for module in model.children()] == [
        type(module).__name__ for module in expected.children()
    ]


def test_own_models_refuse_what_torchvision_refuses() -> None:
    for refused in (
        lambda: MobileNetV2(inverted_residual_setting=[]),
        lambda: MobileNetV2(inverted_residual_setting=[[1, 16, 1, 3]]),
        lambda: ResNet(BasicBlock, [1] * 4, replace_stride_with_dilation=[True]),
        lambda: ResNet(BasicBlock, [1] * 4, groups=2),
    ):
        with pytest.raises(ValueError, match=r"\w+"):
            refused()
    with pytest.raises(NotImplementedError, match="dilation"):
        ResNet(BasicBlock, [1, 1, 1, 2], replace_stride_with_dilation=[False, False, True])


def test_mobilenet_v2_has_its_parts() -> None:
    model = MobileNetV2(num_classes=10).eval()
    assert model.last_channel == 1280
    model.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(model.last_channel, 3))
    assert model.features(torch.randn(1, 3, 32, 32)).shape == (1, 1280, 1, 1)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 3)


def test_the_style_network_has_the_names_of_its_files() -> None:
    model = neural_style_transfer(style_model="candy")
    assert isinstance(model, FastNeuralStyle)
    assert flowvision.models.neural_style_transfer is neural_style_transfer
    convs = ["conv1", "conv2", "conv3", "deconv1", "deconv2", "deconv3"]
    convs += [f"res{i}.conv{j}" for i in range(1, 6) for j in (1, 2)]
    norms = [f"in{i}" for i in range(1, 6)] + [f"res{i}.in{j}" for i in range(1, 6) for j in (1, 2)]
    keys = {f"{conv}.conv2d.{kind}" for conv in convs for kind in ("weight", "bias")}
    assert set(model.state_dict()) == keys | {
        f"{norm}.{kind}" for norm in norms for kind in ("weight", "bias")
    }
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_679_235
    image = model(255 * torch.rand(1, 3, 24, 32))
    assert image.shape == (1, 3, 24, 32)
    assert 0 <= image.min() <= image.max() <= 255
    with pytest.raises(mg.DefinitionError, match="choose one of sketch, candy"):
        neural_style_transfer(style_model="cubism")


def test_old_files_of_the_style_network_are_read(tmp_path: Path) -> None:
    state = dict(FastNeuralStyle().state_dict())
    old = {"in1.running_mean": torch.zeros(32), "res1.in2.running_var": torch.ones(128)}
    torch.save(state | old, tmp_path / "mosaic.pth")
    model = neural_style_transfer(tmp_path / "mosaic.pth", style_model="mosaic")
    assert_same(state, dict(model.state_dict()))


def saved_by_torch(state: dict[str, torch.Tensor], folder: Path) -> Path:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def saved_as_safetensors(state: dict[str, torch.Tensor], folder: Path) -> Path:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def saved_by_monograph(state: dict[str, torch.Tensor], folder: Path) -> Path:
    return mg.save(state, folder / "weights")


@pytest.mark.parametrize("save", [saved_by_torch, saved_as_safetensors, saved_by_monograph])
def test_weights_come_from_a_file(save: Callable[[Any, Path], Path], tmp_path: Path) -> None:
    state = tiny_mobilenet().state_dict()
    path = save(state, tmp_path)
    for pretrained in (path, str(path)):
        assert_same(dict(state), dict(tiny_mobilenet(pretrained=pretrained).state_dict()))


def test_weights_are_never_downloaded() -> None:
    with pytest.raises(mg.CheckpointError, match="nothing is ever downloaded") as raised:
        flowvision.models.resnet50(pretrained=True)
    assert 'resnet50(pretrained="weights.pt")' in raised.value.hint


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    state = tiny_mobilenet().state_dict()
    del state["classifier.1.bias"]
    state["head.weight"] = torch.ones(2)
    state["classifier.1.weight"] = torch.ones(9, 1280)
    with pytest.raises(mg.CheckpointError) as raised:
        tiny_mobilenet(saved_by_torch(state, tmp_path))
    assert str(raised.value).startswith(
        f'the weights in "{tmp_path}/weights.pt" do not fit MobileNetV2: missing: classifier.1.bias; '
        "unexpected: head.weight; of another shape: classifier.1.weight [9, 1280] for [4, 1280]"
    )
    saved_by_torch({"model": state}, tmp_path)
    with pytest.raises(mg.CheckpointError, match="holds no state dict"):
        tiny_mobilenet(tmp_path / "weights.pt")


def test_weights_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    marker = tmp_path / "was run"

    class Malicious:
        def __reduce__(self) -> Any:
            return Path.touch, (marker,)

    torch.save({"weight": Malicious()}, tmp_path / "malicious.pt")
    (tmp_path / "plain.pkl").write_bytes(pickle.dumps({"weight": Malicious()}, protocol=2))
    (tmp_path / "damaged.pt").write_bytes(saved_by_torch({"a": torch.ones(9)}, tmp_path).read_bytes()[:200])
    (tmp_path / "damaged.safetensors").write_bytes(b"\x09")
    (tmp_path / "empty.pt").touch()
    (tmp_path / "folder").mkdir()
    for name in (*(path.name for path in tmp_path.iterdir()), "missing.pt"):
        if name != "weights.pt":
            with pytest.raises(mg.CheckpointError, match=name):
                tiny_mobilenet(tmp_path / name)
    assert not marker.exists()


def cross_entropy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(x), y)


@pytest.mark.long
@pytest.mark.parametrize(
    "make",
    [
        partial(MobileNetV2, width_mult=0.1),
        partial(theirs.MobileNetV2, inverted_residual_setting=[[1, 8, 1, 1], [4, 12, 2, 2]]),
    ],
    ids=["ours", "torchvision"],
)
def test_a_graph_trains_mobilenet_v2_as_eager_does(make: Callable[..., nn.Module]) -> None:
    def side() -> Side:
        torch.manual_seed(0)
        model = make(num_classes=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return Side(model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10))

    torch.manual_seed(1)
    batches = [(torch.randn(4, 3, 32, 32), torch.randint(4, (4,))) for _ in range(3)]
    eager, graphed = side(), side()
    torch.manual_seed(2)
    expected = train_eagerly(eager, cross_entropy, batches)
    step = TrainStep(graphed, cross_entropy)
    torch.manual_seed(2)
    got = [{"loss": step(*batch), **graphed.state()} for batch in batches]
    assert_same(expected, got)
    assert len(step.builds) == 1


def test_models_by_their_names() -> None:
    creator = flowvision.models.ModelCreator
    for name in ("alexnet", "mobilenet_v2", "resnet18", "wide_resnet50_2", "neural_style_transfer"):
        with torch.device("meta"):
            made, expected = creator.create_model(name), getattr(flowvision.models, name)()
        assert type(made) is type(expected)
        assert list(made.state_dict()) == list(expected.state_dict())
    with pytest.raises(mg.DefinitionError, match="no model 'vit'"):
        creator.create_model("vit")
