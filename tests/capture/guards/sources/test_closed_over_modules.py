"""Modules that a function around build() has imported: what the step reads in them counts, as in global ones."""

from __future__ import annotations

import sys
import types

import torch

import monograph as mg


def test_draws_of_a_generator_in_such_a_module_are_not_frozen() -> None:
    import random as generator

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * generator.uniform(0.5, 1.5)

    step, x = mg.trace(scaled), torch.ones(3)
    generator.seed(0)
    expected = [scaled(x) for _ in range(4)]
    generator.seed(0)
    assert all(torch.equal(one, step(x)) for one in expected)


def test_what_changes_in_such_a_module_makes_a_build(monkeypatch) -> None:
    settings = types.ModuleType("settings_of_a_test")
    settings.scale = "two"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, settings.__name__, settings)

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return x * {"two": 2, "three": 3}[settings.scale]  # type: ignore[attr-defined]

    step, x = mg.trace(scaled), torch.ones(3)
    assert step(x)[0] == 2
    settings.scale = "three"  # type: ignore[attr-defined]
    assert step(x)[0] == 3
