"""Counters beside other threads, and in the training loops of other libraries: no build for each step."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monograph as mg
from tests.capture.numbers.books import (
    X,
    _outside_as_before,  # noqa: F401
    books,
    every_tenth,
    in_a_module,
    on_the_graph,
    sides,
)
from tests.support import assert_same


@pytest.mark.parametrize("build", [on_the_graph, in_a_module, every_tenth], ids=lambda build: build.__name__)
def test_counters_beside_another_thread(build: Callable[..., Any]) -> None:
    done = threading.Event()
    seen: list[type] = []
    graph, plain = sides(build)

    def watch() -> None:
        while not done.wait(0.0005):
            seen.extend({type(vars(graph)["n"]), type(vars(graph.module)["calls"])} - {int})

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        for step in range(20):
            assert_same(plain.build(X + step), graph(X + step))
            assert repr(books(graph)) == repr(books(plain))
    finally:
        done.set()
        thread.join()
    assert len(graph.builds) <= 2
    assert not seen


class Trained(nn.Module):
    """What both sides of a loop train: it counts, and keeps a log."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.dropout = nn.Linear(3, 1), nn.Dropout(0.25)
        self.num_calls, self.tokens, self.seen_steps = 0, {"n": 0}, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        self.tokens["n"] += x.shape[0]
        self.seen_steps.append(self.num_calls)
        return self.layer(self.dropout(x)) * (1.0 + 1.0 / self.num_calls)


@pytest.mark.parametrize("backend", ["aten", "inductor"])
def test_a_training_loop_that_counts(backend: str) -> None:
    def train(graphed: bool) -> Any:
        torch.manual_seed(0)
        model = Trained()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def loss_of(x: torch.Tensor) -> torch.Tensor:
            return model(x).square().mean()

        class Step(mg.Graph):
            def __init__(self) -> None:
                super().__init__()
                self.model = model
                self.add_optimizer(optimizer)
                self.config.backend(backend)

            def build(self, x: torch.Tensor) -> torch.Tensor:
                loss = loss_of(x)
                loss.backward()
                return loss.detach()

        step = Step() if graphed else None
        losses = []
        for index in range(50 if backend == "aten" else 6):
            x = X + index / 10
            if step is not None:
                losses.append(step(x))
                continue
            optimizer.zero_grad()
            loss = loss_of(x)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        if step is not None:
            assert len(step.builds) <= 2, [item.reason for item in step.builds]
        return losses, model.state_dict(), model.num_calls, model.tokens, model.seen_steps

    expected, got = train(False), train(True)
    assert expected[2:] == got[2:]
    if backend == "aten":
        assert_same(expected[:2], got[:2])
    else:
        torch.testing.assert_close(expected[0], got[0])


def test_in_the_loop_of_lightning() -> None:
    importlib.import_module("tests.support.torchvision_ops")
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self, graphed: bool) -> None:
            super().__init__()
            self.net, self.automatic_optimization = Trained(), False
            self.graphed, self.seen, self.losses = graphed, 0, []

        def loss_of(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.net(x).square().mean() * (1.0 + self.global_step)

        def training_step(self, batch: Any, _index: int) -> None:
            (x,) = batch
            optimizer = self.optimizers(use_pl_optimizer=False)
            if self.graphed:
                if "graph" not in self.__dict__:
                    self.__dict__["graph"] = _graph_of(self, optimizer)
                loss = self.__dict__["graph"](x)
            else:
                optimizer.zero_grad()
                loss = self.loss_of(x)
                loss.backward()
                optimizer.step()
            self.log("loss", loss)
            self.losses.append(loss.detach().clone())

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters(), lr=0.01)

    def fit(graphed: bool) -> Any:
        torch.manual_seed(0)
        module = Module(graphed)
        data = torch.utils.data.TensorDataset(torch.randn(100, 3))
        options = dict.fromkeys(
            ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
        )
        trainer = lightning.Trainer(max_epochs=2, accelerator="cpu", **options)
        trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=4))
        return module

    expected, got = fit(False), fit(True)
    assert_same(expected.losses, got.losses)
    assert_same(expected.state_dict(), got.state_dict())
    assert (expected.seen, expected.net.tokens) == (got.seen, got.net.tokens) == (50, {"n": 200})
    builds = got.__dict__["graph"].builds
    assert len(builds) <= 2, [item.reason for item in builds]


def _gpt2() -> Any:
    importlib.import_module("tests.support.torchvision_ops")
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 50, "n_positions": 16}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, attn_pdrop=0.0)

    class Counting(transformers.GPT2LMHeadModel):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__(config)
            self.num_calls, self.tokens, self.seen_steps = 0, {"n": 0}, []

        def forward(self, input_ids: Any = None, labels: Any = None, **options: Any) -> Any:
            self.num_calls += 1
            self.tokens["n"] += input_ids.numel()
            self.seen_steps.append(self.num_calls)
            return super().forward(input_ids=input_ids, labels=labels, **options)

        def loss_of(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self(input_ids=x, labels=x).loss
            return loss

    torch.manual_seed(0)
    return Counting()


def test_a_model_of_transformers_in_a_loop() -> None:
    def train(graphed: bool) -> Any:
        model = _gpt2()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        graph = _graph_of(model, optimizer) if graphed else None
        losses = []
        for _ in range(50):
            x = torch.randint(0, 50, (2, 8))
            if graph is None:
                optimizer.zero_grad()
                loss = model.loss_of(x)
                loss.backward()
                optimizer.step()
            losses.append(graph(x) if graph is not None else loss.detach())
        assert graph is None or len(graph.builds) <= 2, [item.reason for item in graph.builds]
        return losses, model.state_dict(), model.num_calls, model.tokens, model.seen_steps

    assert_same(train(False), train(True))


def test_in_the_loop_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = _gpt2()
    transformers = importlib.import_module("transformers")
    graphs: list[mg.Graph] = []

    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.config.keep_gradients(True)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = self.model.loss_of(x)
            loss.backward()
            return loss.detach()

    class Loop(transformers.Trainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            model.train()
            if not graphs:
                graphs.append(Step())
            return graphs[0](inputs["input_ids"])

    rows = [{"input_ids": torch.randint(0, 50, (8,))} for _ in range(100)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=50, per_device_train_batch_size=2, report_to=[], disable_tqdm=True,
        save_strategy="no", use_cpu=True,
    )  # fmt: skip
    Loop(model=model, args=arguments, train_dataset=rows).train()
    assert (model.num_calls, model.tokens) == (50, {"n": 800})
    assert len(graphs[0].builds) <= 2, [item.reason for item in graphs[0].builds]


def _graph_of(module: Any, optimizer: Any) -> mg.Graph:
    class Step(mg.Graph):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.add_optimizer(optimizer)

        def build(self, x: torch.Tensor) -> torch.Tensor:
            loss = self.module.loss_of(x)
            loss.backward()
            return loss.detach()

    return Step()
