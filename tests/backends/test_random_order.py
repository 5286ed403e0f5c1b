"""Compiled steps draw eager's random numbers, element by element, however images lie in them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from monograph.kernels import tuned as choices_module
from tests.support import new_cache

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: nn.functional.dropout(x, 0.2) == 0,
    "dropout of channels": lambda x: nn.functional.dropout2d(x, 0.2) == 0,
    "native_dropout": lambda x: torch.native_dropout(x, 0.2, True)[1],
    "randn_like": torch.randn_like,
    "normal_": lambda x: torch.empty_like(x).normal_(),
    "exponential_": lambda x: torch.empty_like(x).exponential_(),
    "bernoulli": lambda x: torch.bernoulli((x > 0) * 0.5 + 0.25),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_((x > 0) * 0.5 + 0.25),
    "poisson": lambda x: torch.poisson((x > 0) * 2.0 + 0.5),
}


@pytest.fixture(autouse=True)
def own_memory(tmp_path, monkeypatch):
    """Each test begins knowing nothing."""
    monkeypatch.setenv("MONOGRAPH_CACHE_DIR", new_cache(tmp_path))
    monkeypatch.setattr(choices_module, "_IN_PROCESS", {})


def favour_channels_last(monkeypatch):
    """Trials in which convolutions of channels-last images are the fastest, and copies take no time."""

    def seconds_of(forms, inputs, _workshop):
        contiguous = len(inputs[0].shape) != 4 or inputs[0].stride[1] != 1
        return {form.name: 9.0 if contiguous and len(inputs) > 1 else 1e-6 for form in forms}

    monkeypatch.setattr("monograph.kernels.select.seconds_of", seconds_of)


class Draws(mg.Graph):
    """Images, and what each of the functions draws for them."""

    def __init__(self, images: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.images = images
        self.config.backend("inductor")

    def build(self, *args: torch.Tensor) -> dict[str, Any]:
        """One after the other, so that a number too many shows in all that follow."""
        images = self.images(*args)
        return {name: draw(images) for name, draw in DRAWS.items()}


def check_draws(step: Draws, *args: torch.Tensor) -> None:
    """The compiled step draws what eager draws, and leaves the generator where eager leaves it."""
    state = torch.get_rng_state()
    expected, after = step.eager(*args), torch.get_rng_state()
    torch.set_rng_state(state)
    found = step(*args)
    assert step.backend == "inductor"
    assert [name for name in DRAWS if not torch.equal(found[name], expected[name])] == []
    assert torch.equal(torch.get_rng_state(), after)


@pytest.mark.long
def test_behind_images_that_lie_channels_last(monkeypatch):
    favour_channels_last(monkeypatch)
    step = Draws(nn.Sequential(nn.Conv2d(2, 4, 3, bias=False), nn.SiLU()))
    check_draws(step, torch.randn(4, 2, 6, 6))
    (layout,) = (item for item in step.builds[0].choices if item.op == "layout of images")
    assert layout.winner == "channels_last"


@pytest.mark.long
def test_behind_a_sum_of_images_that_lie_in_two_ways():
    step = Draws(torch.add)
    contiguous, last = torch.randn(4, 3, 5, 6), torch.randn(4, 5, 6, 3).permute(0, 3, 1, 2)
    check_draws(step, last, contiguous)
    check_draws(step, contiguous, last)


@pytest.mark.long
def test_what_is_drawn_into_a_small_buffer(caplog):
    """Small buffers lie on the stack, but not those that eager's kernels draw into."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 3))
    step = mg.train_graph(model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1))
    step.config.backend("inductor")
    step(torch.randn(16, 8), torch.randint(3, (16,)))
    assert step.builds[-1].backend == "inductor", caplog.text
