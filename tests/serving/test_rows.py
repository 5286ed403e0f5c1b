"""Which models may have the rows of several requests in one batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monograph.export.batch_independence import rows_are_apart, trials

SHAPE = (4, 6)
torch.manual_seed(0)
TABLE = nn.Embedding(20, 3)
APART = {
    "a product": nn.Sequential(nn.Linear(6, 3), nn.Softmax(1)),
    "statistics of its own": nn.BatchNorm1d(6).eval(),
    "a norm of each row": nn.LayerNorm(6),
    "words": lambda words: TABLE(words % 20).mean(1),
    "words of a small table": TABLE,
}
TOGETHER = {
    "a mean": lambda x: x - x.mean(0),
    "a mean of words": lambda words: TABLE(words) - TABLE(words).mean(0),
    "words from one on": lambda words: TABLE(words - 1 + (words == 0)) - TABLE(words).mean(0),
    "what came before": lambda x: x.cumsum(0),
    "the largest": lambda x: x / (1 + x.max()),
    "how many are large": lambda x: x + (x > 2).sum(0),
    "the place in the batch": lambda x: x + torch.arange(len(x)).view(-1, 1),
    "statistics of the batch": nn.BatchNorm1d(6),
    "chance": nn.Dropout(0.5),
}


def apart(model, dtype):
    def run(batch):
        with torch.no_grad():
            return [model(*batch)]

    return all(rows_are_apart(run, batch) for batch in trials(run, [SHAPE], [dtype]))


@pytest.mark.parametrize("name", APART)
def test_apart(name):
    assert apart(APART[name], torch.int64 if "words" in name else torch.float32)


@pytest.mark.parametrize("name", TOGETHER)
def test_together(name):
    assert not apart(TOGETHER[name], torch.int64 if "words" in name else torch.float32)


def test_a_model_that_takes_no_trial():
    def run(batch):
        raise RuntimeError("never")

    with pytest.raises(RuntimeError, match="never"):
        [rows_are_apart(run, batch) for batch in trials(run, [SHAPE], [torch.int64])]
