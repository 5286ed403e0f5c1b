"""What the server of `tests.support.warm` has done before it forks: imported what scripts import, and captured a step."""

import torch
from torch import nn

import monograph as mg
from tests.support.threads import set_threads

set_threads()
_MODEL = nn.Linear(2, 2)
mg.train_graph(_MODEL, nn.MSELoss(), torch.optim.SGD(_MODEL.parameters(), lr=0.1)).compile(
    torch.ones(1, 2), torch.ones(1, 2)
)
