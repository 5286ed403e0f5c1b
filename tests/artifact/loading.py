"""A process without the models: loads each artifact, infers, trains on, and writes down what came of it.

It is run as a script outside of the repository: `python loading.py DIRECTORY NAME ...`. The data lies beside.
"""

from __future__ import annotations

import copy
import os
import sys
from pathlib import Path

import torch

import monograph as mg


def results(directory: Path, name: str, data: dict) -> dict:
    """Inference at several sizes, then the losses of further steps, and the state at the end."""
    artifact = mg.load(directory / name)
    inferred = {count: artifact.infer(x) for count, x in data["inputs"].items()}
    losses = [artifact.train(x, y) for x, y in data["batches"]]
    state = copy.deepcopy(artifact.state_dict())
    saved = mg.save(artifact, directory / f"{name}-again.zip")
    x, y = data["batches"][0]
    random = torch.get_rng_state()
    again = mg.load(saved).train(x, y)
    torch.set_rng_state(random)
    return {
        "inferred": inferred,
        "losses": losses,
        "model": state["model"],
        "optimizer": state["optimizer.0"],
        "random": random,
        "next": [artifact.train(x, y), again],
    }


def main(directory: Path, names: list[str]) -> None:
    """All of them."""
    # as `tests/support/threads.py` does, which cannot be imported here
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    here = [key for key, module in sys.modules.items() if "examples" in str(getattr(module, "__file__", ""))]
    assert not here, here
    for name in ("examples", "tests.artifact.plain"):
        try:
            __import__(name)
        except ImportError:
            continue
        raise AssertionError(f"{name} can be imported")
    for name in names:
        torch.save(
            results(directory, name, torch.load(directory / f"{name}.data")), directory / f"{name}.out"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
