"""Libraries that ask whether a tensor is a fake find none in a trace: they would do other things than in eager mode."""

from __future__ import annotations

import threading

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import monograph as mg


class Step(mg.Graph):
    """Asks as transformers does, to leave out a mask that hides nothing where no trace runs."""

    def __init__(self) -> None:
        super().__init__()
        self.config.backend("aten")

    def build(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        traced = isinstance(x, getattr(torch, "_subclasses").FakeTensor)  # noqa: B009
        if not traced and mask.all():
            return x * 2
        return torch.where(mask, x * 3, 0.0)


def test_the_branch_is_that_of_eager_mode() -> None:
    step = Step()
    x, whole, part = torch.ones(4), torch.ones(4, dtype=torch.bool), torch.arange(4) < 2
    for mask in (whole, part, whole, whole, part):
        assert torch.equal(step(x, mask), step.eager(x, mask))
    assert len(step.builds) == 2


def test_the_name_is_there_again() -> None:
    Step()(torch.ones(4), torch.ones(4, dtype=torch.bool))
    assert torch._subclasses.__dict__["FakeTensor"] is FakeTensor
    assert "__getattr__" not in torch._subclasses.__dict__


class Holding(mg.Graph):
    """Keeps the class that it finds in a trace, and asks another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.config.backend("aten")

    def build(self, x: torch.Tensor) -> torch.Tensor:
        found = torch._subclasses.FakeTensor
        others = FakeTensorMode()
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(isinstance(others.from_tensor(WHOLE), found)))
        thread.start()
        thread.join()
        KEPT.append((found, seen))
        return x * 2


WHOLE = torch.ones(3)
KEPT: list[tuple[type, list[bool]]] = []


def test_fakes_of_others_are_fakes() -> None:
    Holding()(torch.ones(3))
    found, seen = KEPT[0]
    assert seen == [True]
    assert isinstance(FakeTensorMode().from_tensor(WHOLE), found)
    assert not isinstance(WHOLE, found)
    assert issubclass(FakeTensor, found)
