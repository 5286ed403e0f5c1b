"""Each example runs small, in the bits of the same loop in eager mode, and is short enough to be read."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import monograph as mg
from tests.support import ROOT

EXAMPLES = ROOT / "examples"
# what each `main` gives is a list of numbers of its training, or one
SMALL: dict[str, dict[str, int]] = {
    "dqn": {"episodes": 3, "batch": 8},
    "finetuning": {"steps": 6, "batch": 4},
    "gan": {"steps": 4, "batch": 8},
    "gpt_text": {"steps": 2, "batch": 2},
    "image_classification": {"epochs": 1},
    "pinn": {"steps": 4, "points": 8},
    "ppo": {"rounds": 2, "carts": 8, "length": 8},
    "recommender": {"steps": 4, "batch": 16},
}
SAME_BITS = {"deployment": {}, "resume": {"steps": 20}}  # those that compare by themselves
NEEDS = {"finetuning": "transformers", "image_classification": "sklearn"}


@pytest.fixture(autouse=True)
def beside_the_examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    torch.manual_seed(0)


def example(name: str) -> ModuleType:
    pytest.importorskip(NEEDS.get(name, "torch"))
    try:
        return importlib.import_module(name)
    except ImportError as error:  # transformers with another library that does not fit
        pytest.skip(f"{NEEDS.get(name)} cannot be used here: {error}")


def eagerly(graph: mg.Graph, *args: Any, **kwargs: Any) -> Any:
    return graph.eager(*args, **kwargs)


@pytest.mark.parametrize("name", SMALL)
def test_an_example_has_the_bits_of_eager_mode(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = example(name)
    ours = module.main(**SMALL[name])
    monkeypatch.setattr(mg.Graph, "__call__", eagerly)
    assert ours == module.main(**SMALL[name])
    assert torch.tensor(ours).isfinite().all()


@pytest.mark.parametrize("name", SAME_BITS)
def test_an_example_that_compares_finds_the_same_bits(name: str) -> None:
    assert example(name).main(**SAME_BITS[name]) is True


@pytest.mark.parametrize("name", [*SMALL, *SAME_BITS])
def test_an_example_is_short_and_listed(name: str) -> None:
    assert len(Path(EXAMPLES, f"{name}.py").read_text().splitlines()) <= 80
    assert f"examples/{name}.py" in (ROOT / "docs" / "examples.md").read_text()
