"""The models of the examples have the shapes, sizes and names of the papers."""

from __future__ import annotations

import runpy

import pytest
import torch

from tests.support import ROOT

MODELS = ROOT / "examples" / "models"
MobileNetV2 = runpy.run_path(str(MODELS / "mobilenet_v2.py"))["MobileNetV2"]
GPT = runpy.run_path(str(MODELS / "gpt.py"))["GPT"]


def test_mobilenet_v2_has_the_parameters_of_the_paper() -> None:
    model = MobileNetV2(num_classes=1000)
    assert sum(p.numel() for p in model.parameters()) == 3_504_872
    assert [name for name, _ in model.named_children()] == ["features", "classifier"]


@pytest.mark.parametrize(("first_stride", "size"), [(1, 2), (2, 1)])
def test_mobilenet_v2_takes_small_images(first_stride: int, size: int) -> None:
    model = MobileNetV2(first_stride=first_stride)
    x = torch.randn(2, 3, 32, 32)
    assert model.features(x).shape == (2, 1280, size, size)
    assert model(x).shape == (2, 10)


def test_gpt_sees_no_later_token() -> None:
    torch.manual_seed(0)
    model = GPT(11, context=8, width=16, num_layers=2, num_heads=2).eval()
    tokens = torch.randint(11, (2, 8))
    changed = tokens.clone()
    changed[:, 5:] = (tokens[:, 5:] + 1) % 11
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 8, 11)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.equal(before[:, 5:], after[:, 5:])


def test_gpt_ties_its_embedding_to_the_output() -> None:
    model = GPT(11, context=8, width=16, num_layers=1, num_heads=2)
    assert model.head.weight is model.tokens.weight
