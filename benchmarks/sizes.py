"""Batches of drawn sizes, from a cold start: builds, seconds of all steps with every wait, and of the later half.

    python -m benchmarks.sizes [--steps 200] [--threads 1] [--sides eager,aten,inductor,declared,compile] [model ...]

One process for each model and side, one after the other, with the same batches in the same order and AdamW: eager mode,
a graph on `aten`, on `inductor`, and on `inductor` with `config.dynamic` for all that varies, and
`torch.compile(dynamic=True)` around model and loss. Nothing compiled is kept
from before. "differs" is the largest distance of a loss from eager mode's; 0 means its bits. Times are processor time,
that of compilers included, but for "wall". The models of transformers need that package; the others do not.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import monograph as mg

SIDES = ("eager", "aten", "inductor", "declared", "compile")
BACKENDS = {"aten": "aten", "inductor": "inductor", "declared": "inductor"}  # of the sides that are graphs
VOCABULARY = 1000
Batch = tuple[Tensor, ...]
_SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 512}


@dataclass(frozen=True)
class Workload:
    """A model, the loss of a batch, and batches of drawn sizes."""

    model: Callable[[], nn.Module]
    loss: Callable[..., Tensor]
    batches: Callable[[random.Random], Iterator[Batch]]


# --- models --------------------------------------------------------------------------------------------------------


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    loss: Tensor = functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    return loss


def _of_tokens(model: nn.Module, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(model(input_ids=tokens, attention_mask=mask).logits, labels)


def _of_pairs(model: nn.Module, tokens: Tensor, mask: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(
        model(input_ids=tokens, attention_mask=mask, decoder_input_ids=labels).logits, labels
    )


def _of_images(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    made = model(images)
    loss: Tensor = functional.cross_entropy(getattr(made, "logits", made), labels)
    return loss


def _of_words(model: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return _cross_entropy(model(tokens), labels)


def _of_episodes(model: nn.Module, states: Tensor, actions: Tensor, returns: Tensor) -> Tensor:
    logits, values = model(states)
    ahead = returns - values
    chosen = functional.log_softmax(logits, 1).gather(1, actions[:, None]).squeeze(1)
    loss: Tensor = ahead.square().mean() - (chosen * ahead.detach()).mean()
    return loss


def _transformer(name: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        package: Any = importlib.import_module("transformers")
        kind, config = name.split("/")
        made: nn.Module = getattr(package, kind)(getattr(package, config)(**settings))
        return made

    return make


class Convolutions(nn.Module):
    """A small residual net."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, stride=4, padding=3)
        self.norms = nn.ModuleList([nn.BatchNorm2d(16) for _ in range(3)])
        self.layers = nn.ModuleList([nn.Conv2d(16, 16, 3, padding=1) for _ in range(3)])
        self.head = nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.max_pool2d(self.stem(images), 2)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            hidden = hidden + functional.relu(norm(layer(hidden)))
        made: Tensor = self.head(functional.adaptive_avg_pool2d(hidden, 1).flatten(1))
        return made


class Tagger(nn.Module):
    """A bidirectional LSTM over words."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(128, 12)
        self.layers = nn.LSTM(64, 64, batch_first=True, bidirectional=True)

    def forward(self, tokens: Tensor) -> Tensor:
        made: Tensor = self.head(self.layers(self.words(tokens))[0])
        return made


class Words(nn.Module):
    """A language model of transformer layers with causal attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, 128), nn.Embedding(256, 128)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(128, 4, 256, batch_first=True) for _ in "ab"])
        self.head = nn.Linear(128, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.words(tokens) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        made: Tensor = self.head(hidden)
        return made


class Actor(nn.Module):
    """Chances of two actions, and the value of a state."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.chances, self.value = nn.Linear(4, 128), nn.Linear(128, 2), nn.Linear(128, 1)

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.relu(self.body(states))
        return self.chances(hidden), self.value(hidden).squeeze(1)


# --- batches -------------------------------------------------------------------------------------------------------


def _sentences(drawn: random.Random) -> Iterator[Batch]:
    while True:
        rows, length = 8, drawn.randint(12, 59)
        mask = torch.ones(rows, length, dtype=torch.int64)
        for row in range(1, rows):
            mask[row, drawn.randint(length // 2, length) :] = 0
        yield (
            torch.randint(VOCABULARY, (rows, length)),
            mask,
            torch.randint(VOCABULARY, (rows, length)),
        )


def _sides(drawn: random.Random) -> Iterator[Batch]:
    while True:
        high, wide = drawn.randrange(160, 225, 4), drawn.randrange(160, 225, 4)
        yield torch.randn(8, 3, high, wide), torch.randint(10, (8,))


def _rows_of_images(drawn: random.Random) -> Iterator[Batch]:
    while True:
        rows = drawn.randint(1, 32)
        yield torch.randn(rows, 3, 64, 64), torch.randint(10, (rows,))


def _tagged(drawn: random.Random) -> Iterator[Batch]:
    while True:
        shape = 8, drawn.randint(5, 60)
        yield torch.randint(VOCABULARY, shape), torch.randint(12, shape)


def _windows(drawn: random.Random) -> Iterator[Batch]:
    while True:
        for length in (*[64] * 19, drawn.randint(5, 63)):  # an epoch ends with a short window
            yield torch.randint(VOCABULARY, (8, length)), torch.randint(VOCABULARY, (8, length))


def _episodes(drawn: random.Random) -> Iterator[Batch]:
    while True:
        steps = drawn.randint(5, 200)
        yield torch.randn(steps, 4), torch.randint(2, (steps,)), torch.randn(steps)


WORKLOADS = {
    "bert": Workload(
        _transformer("BertForMaskedLM/BertConfig", vocab_size=VOCABULARY, **_SMALL), _of_tokens, _sentences
    ),
    "gpt2": Workload(
        _transformer(
            "GPT2LMHeadModel/GPT2Config",
            vocab_size=VOCABULARY, n_embd=128, n_layer=2, n_head=4, n_positions=128, bos_token_id=0, eos_token_id=0,
        ),
        _of_tokens,
        _sentences,
    ),
    "llama": Workload(
        _transformer("LlamaForCausalLM/LlamaConfig", vocab_size=VOCABULARY, num_key_value_heads=2, **_SMALL),
        _of_tokens,
        _sentences,
    ),
    "t5": Workload(
        _transformer(
            "T5ForConditionalGeneration/T5Config",
            vocab_size=VOCABULARY, d_model=128, d_ff=256, num_layers=2, num_heads=4, d_kv=32,
        ),
        _of_pairs,
        _sentences,
    ),
    "vit": Workload(
        _transformer("ViTForImageClassification/ViTConfig", image_size=64, patch_size=16, num_labels=10, **_SMALL),
        _of_images,
        _rows_of_images,
    ),
    "convolutions": Workload(Convolutions, _of_images, _sides),
    "tagger": Workload(Tagger, _of_words, _tagged),
    "words": Workload(Words, _of_words, _windows),
    "actor": Workload(Actor, _of_episodes, _episodes),
}  # fmt: skip


# --- one side of one model -----------------------------------------------------------------------------------------


class Step(mg.Graph):
    """Loss, backward, AdamW."""

    def __init__(self, workload: Workload, model: nn.Module, backend: str) -> None:
        super().__init__()
        self.model, self.loss = model, workload.loss
        self.add_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        self.config.backend(backend)

    def build(self, *batch: Tensor) -> Tensor:
        """One step."""
        loss: Tensor = self.loss(self.model, *batch)
        loss.backward()
        return loss


def plain_step(workload: Workload, model: nn.Module, side: str) -> Callable[..., Tensor]:
    """The step in eager mode, or with model and loss compiled."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def loss_of(*batch: Tensor) -> Tensor:
        return workload.loss(model, *batch)

    compute = torch.compile(loss_of, dynamic=True) if side == "compile" else loss_of

    def step(*batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = compute(*batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def declare(graph: Step, batches: Sequence[Batch]) -> None:
    """Say which sizes of some batches are not the same in all of them."""
    for place, tensors in enumerate(zip(*batches, strict=True)):
        for dim in range(tensors[0].dim()):
            if len({tensor.shape[dim] for tensor in tensors}) > 1:
                graph.config.dynamic(f"batch[{place}]", dim)


def measured(name: str, side: str, steps: int) -> dict[str, Any]:
    """What the steps of one side take, in this process."""
    workload = WORKLOADS[name]
    torch.manual_seed(0)
    model = workload.model()
    model.train()
    graph = Step(workload, model, BACKENDS[side]) if side in BACKENDS else None
    step = graph or plain_step(workload, model, side)
    torch.manual_seed(1)
    batches = workload.batches(random.Random(1))
    given = [next(batches) for _ in range(steps)]
    if graph is not None and side == "declared":
        declare(graph, given)
    torch.manual_seed(2)  # dropout
    losses, seconds = [], []
    start, begun = time.perf_counter(), _processor_seconds()
    for batch in given:
        before = time.process_time()
        losses.append(float(step(*batch).detach()))
        seconds.append(time.process_time() - before)
    builds = len(graph.builds) if graph is not None else 0
    return {
        "losses": losses,
        "wall": time.perf_counter() - start,
        "total": _processor_seconds() - begun,
        "steady": sum(seconds[steps // 2 :]),
        "builds": builds,
        "compiled": sum(build.backend == "inductor" for build in graph.builds) if graph is not None else 0,
        "captures": sum(build.stages[0].seconds for build in graph.builds) if graph is not None else 0.0,
    }


def _processor_seconds() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def in_process(name: str, side: str, steps: int, threads: int) -> dict[str, Any]:
    """The same in a process that nothing is known in."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "MONOGRAPH_CACHE_DIR": f"{folder}/monograph",
            "TMPDIR": folder,  # torch keeps compiled headers there, whatever its own folder is
            "TORCHINDUCTOR_CACHE_DIR": f"{folder}/torch",
            "OMP_NUM_THREADS": str(threads),
        }
        command = [sys.executable, "-m", "benchmarks.sizes", "--child", side, "--steps", str(steps), name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1][:100]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def line(name: str, side: str, made: dict[str, Any], eager: dict[str, Any]) -> str:
    """A row of the table."""
    if "error" in made:
        return f"{name:13} {side:9} {made['error']}"
    pairs = zip(made["losses"], eager["losses"], strict=True)
    differs = max(abs(one - other) for one, other in pairs)
    return (
        f"{name:13} {side:9} builds {made['builds']} ({made['compiled']} compiled)  total {made['total']:6.1f} s"
        f"  wall {made['wall']:6.1f} s  captures {made['captures']:5.1f} s  later half {made['steady']:6.2f} s"
        f"  {eager['steady'] / made['steady']:.2f} x eager  differs {differs:.1e}"
    )


def main() -> None:
    """Print a line for each model and side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        print(json.dumps(measured(asked.models[0], asked.child, asked.steps)))
        return
    print(f"torch {torch.__version__}, {asked.threads} thread(s), {asked.steps} steps")
    for name in asked.models or WORKLOADS:
        eager = in_process(name, "eager", asked.steps, asked.threads)
        for side in asked.sides.split(","):
            made = eager if side == "eager" else in_process(name, side, asked.steps, asked.threads)
            print(line(name, side, made, eager), flush=True)


if __name__ == "__main__":
    main()
