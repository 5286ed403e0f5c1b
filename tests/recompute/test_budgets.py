"""`config.set_memory_budget`: what it takes, what it refuses, and steps under it with eager's bits."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from benchmarks.workloads import gpt, resnet, vit
from examples.models.gpt import GPT
from monograph.config import GraphConfig
from monograph.errors import ConfigError, PlanError
from monograph.ir.meta import origin
from monograph.ir.text import bytes_text
from monograph.recompute.recompute import limit_of, peak_of
from monograph.settings import MemoryBudget, Settings
from tests.support import assert_same

Made = tuple[nn.Module, Callable[[torch.Tensor, torch.Tensor], torch.Tensor], torch.Tensor, torch.Tensor]


def text_model() -> Made:
    model = GPT(64, context=16, width=32, num_layers=3, num_heads=2, dropout=0.1)
    text = torch.randint(64, (4, 17))
    return model, gpt.token_loss, text[:, :-1].contiguous(), text[:, 1:].contiguous()


def image_model() -> Made:
    model = resnet.ResNet(resnet.Sizes(4, 32, (2, 1), 8))
    model.head = nn.Sequential(nn.Dropout(0.2), model.head)  # type: ignore[assignment]
    return model, F.cross_entropy, torch.randn(4, 3, 32, 32), torch.randint(10, (4,))


def patch_model() -> Made:
    model = vit.VisionTransformer(vit.Sizes(3, 32, 2, 4, 16, 4))
    for layer in model.layers:
        layer.wide = nn.Sequential(layer.wide, nn.Dropout(0.1))  # type: ignore[assignment]
    return model, F.cross_entropy, torch.randn(4, 3, 16, 16), torch.randint(10, (4,))


def made(make: Callable[[], Made]) -> tuple[Made, torch.optim.Optimizer]:
    torch.manual_seed(0)
    found = make()
    return found, torch.optim.AdamW(found[0].parameters())


def trained(
    make: Callable[[], Made], budget: int | str | None
) -> tuple[mg.Graph, list[torch.Tensor], nn.Module]:
    (model, loss, x, y), optimizer = made(make)
    step = mg.train_graph(model, loss, optimizer)
    step.config.backend("aten")
    step.config.set_memory_budget(budget)
    if budget is None:  # nothing is computed again
        step.config.enable_straighten_algorithm("SpeedFirst")
    torch.manual_seed(1)
    return step, [step(x, y) for _ in range(3)], model


def whole_of(step: mg.Graph) -> int:
    """What a step holds that drops nothing, with each update as soon as its gradient is there."""
    found = limit_of(step.builds[0].plan.program, Settings(memory_budget=MemoryBudget(share=1.0)))
    assert found is not None
    return found


def held(step: mg.Graph) -> int:
    return step.builds[0].memory.peak_bytes


def eagerly(make: Callable[[], Made]) -> tuple[list[torch.Tensor], nn.Module]:
    (model, loss, x, y), optimizer = made(make)
    torch.manual_seed(1)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        now = loss(model(x), y)
        now.backward()
        optimizer.step()
        losses.append(now.detach())
    return losses, model


@pytest.mark.one_case
@pytest.mark.parametrize("make", [text_model, image_model, patch_model])
def test_steps_under_a_budget_have_the_bits_of_eager(make):
    losses, model = eagerly(make)
    whole = whole_of(trained(make, None)[0])
    for budget in ("0.8x", whole * 6 // 10):
        step, found, other = trained(make, budget)
        assert_same(losses, found)
        assert_same(model.state_dict(), other.state_dict())
        program = step.builds[0].plan.program
        assert held(step) <= whole * 8 // 10
        assert any(origin(node).again for node in program.ops())
        assert step.diff("recompute")


def test_what_is_computed_again_says_so():
    step, _, _ = trained(text_model, "0.7x")
    copies = [line for line in str(step.builds[0].plan.program).splitlines() if "_again = " in line]
    assert copies
    assert all("ward, again  " in line for line in copies)
    assert any("gpt.py:" in line and "model.blocks.0" in line for line in copies)


def test_memory_says_what_a_share_is_of():
    step, _, _ = trained(text_model, "0.7x")
    (_, _, *batch), _ = made(text_model)
    whole = whole_of(trained(text_model, None)[0])
    assert f"its budget '0.7x' is that share of {bytes_text(whole)}, which it holds" in str(
        step.memory(*batch)
    )
    assert "budget" not in str(trained(text_model, whole)[0].memory(*batch))


@pytest.mark.parametrize("make", [text_model, patch_model])
def test_a_budget_that_a_step_fits_anyway_changes_nothing(make: Callable[[], Made]) -> None:
    def peak(budget: int | str | None) -> int:
        (model, loss, x, y), optimizer = made(make)
        step = mg.train_graph(model, loss, optimizer)
        if budget is not None:
            step.config.set_memory_budget(budget)
        return step.memory(x, y).peak_bytes

    default = peak(None)
    (found,) = {peak(default), peak(10 * default), peak("4x")}
    assert 0.99 * default < found <= default  # counters of the optimizer stand elsewhere
    assert peak(default - 1000) < default


def test_random_numbers_are_drawn_once():
    plain, few = (trained(text_model, budget)[0].builds[0].plan.program for budget in (None, "0.7x"))
    drawn = [
        [node.name for node in program.ops() if "bernoulli" in str(node.target)] for program in (plain, few)
    ]
    assert drawn[0] == drawn[1] != []


def test_an_impossible_budget_says_what_is_possible_and_changes_nothing():
    (model, loss, x, y), optimizer = made(text_model)
    step = mg.train_graph(model, loss, optimizer)
    step.config.backend("aten")
    step.config.set_memory_budget(1000)
    before = {name: item.clone() for name, item in model.state_dict().items()}
    with pytest.raises(PlanError, match="cannot run in 1000 bytes above its parameters") as caught:
        step(x, y)
    assert_same(before, dict(model.state_dict()))
    assert not step.builds
    assert not optimizer.state
    least = int(caught.value.hint.partition("(")[2].partition(")")[0])
    step.config.set_memory_budget(least)
    step(x, y)
    step.config.set_memory_budget("0.01x")
    with pytest.raises(
        PlanError, match=r"'0\.01x' is that share of .* KiB, which it holds with nothing computed again"
    ):
        step(x, y)
    step.config.set_memory_budget(least - 1)
    with pytest.raises(PlanError, match=rf"holds .* \({least:,} bytes\) at least"):
        step(x, y)


def test_what_no_compiled_step_can_hold_runs_op_by_op():
    torch.manual_seed(0)
    layer = nn.Linear(32, 1024)
    step = mg.train_graph(layer, nn.CrossEntropyLoss(), torch.optim.SGD(layer.parameters(), lr=0.1))
    step.config.backend("inductor")
    x, y = torch.randn(2048, 32), torch.randint(1024, (2048,))
    logits = 2048 * 1024 * 4
    step.config.set_memory_budget(logits * 5 // 4)  # compiled, the gradients of logits are beside them
    assert step.memory(x, y).peak_bytes <= logits * 5 // 4
    step(x, y)
    assert step.backend == "aten"


@pytest.mark.parametrize(
    "budget",
    [
        0,
        -1,
        True,
        math.nan,
        1.5,
        "",
        "x",
        "0x",
        "0.0x",
        "half",
        "-0.5x",
        "nanx",
        "infx",
        "2XB",
        "0 MiB",
        "0.1 bytes",
        "-2MiB",
        "2 M",
        [1],
    ],
)
def test_what_is_no_budget_is_refused(budget):
    config = GraphConfig()
    config.set_memory_budget("0.5x")
    before = config.settings
    with pytest.raises(ConfigError, match="neither a number of bytes nor a share"):
        config.set_memory_budget(budget)
    assert config.settings is before


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("2 MiB", 2**21),
        ("1.5GiB", 3 * 2**29),
        ("32 kib", 2**15),
        ("2MB", 2 * 10**6),
        ("0.1 KB", 100),
        ("7 bytes", 7),
    ],
)
def test_a_budget_may_have_a_unit(text, nbytes):
    config = GraphConfig()
    config.set_memory_budget(text)
    assert config.settings.memory_budget == MemoryBudget(nbytes)


def test_an_impossible_budget_is_said_once(caplog):
    (model, loss, x, y), optimizer = made(text_model)
    step = mg.train_graph(model, loss, optimizer)
    step.config.backend("auto")
    step.config.set_memory_budget(1000)
    with caplog.at_level(0, logger="monograph"), pytest.raises(PlanError, match="cannot run in 1000 bytes"):
        step(x, y)
    assert not [record for record in caplog.records if "1000 bytes" in record.getMessage()]


def test_the_configuration_shows_it():
    config = GraphConfig()
    assert "memory_budget=None" in repr(config)
    config.set_memory_budget("0.5x")
    assert "memory_budget='0.5x'" in repr(config)
    config.set_memory_budget(2**30)
    assert "memory_budget=1073741824" in repr(config)
    config.set_memory_budget(None)
    assert config.settings == GraphConfig().settings


def test_another_budget_is_another_build():
    (model, loss, x, y), optimizer = made(text_model)
    step = mg.train_graph(model, loss, optimizer)
    step.config.backend("aten")
    step(x, y)
    step.config.set_memory_budget("0.7x")
    step(x, y)
    step(x, y)
    assert [build.settings.memory_budget is None for build in step.builds] == [True, False]


@pytest.mark.long
def test_micro_batches_are_held_to_it_too():
    def run(budget: int | str | None) -> tuple[mg.Graph, torch.Tensor, nn.Module]:
        (model, loss, x, y), optimizer = made(text_model)
        step = mg.train_graph(model, loss, optimizer)
        step.config.backend("aten")
        step.config.set_gradient_accumulation_steps(2)
        step.config.set_memory_budget(budget)
        if budget is None:
            step.config.enable_straighten_algorithm("SpeedFirst")
        return step, step(x.repeat(8, 1), y.repeat(8, 1)), model

    (plain, loss, model), (few, found, other) = run(None), run("0.6x")
    assert_same([loss, dict(model.state_dict())], [found, dict(other.state_dict())])
    assert held(few) <= whole_of(plain) * 6 // 10
    with pytest.raises(PlanError, match="cannot run in 1000 bytes") as caught:
        run(1000)
    least = int(caught.value.hint.partition("(")[2].partition(")")[0])
    assert held(run(least)[0]) <= least


def test_memory_is_compressed_as_far_as_a_third_of_the_time_goes():
    (model, loss, x, y), optimizer = made(text_model)
    step = mg.train_graph(model, loss, optimizer)
    step.config.backend("aten")
    step(x, y)
    step.config.enable_compress_memory()
    step(x, y)
    plain, compressed = (peak_of(build.plan.program) for build in step.builds)
    assert compressed < plain * 8 // 10
