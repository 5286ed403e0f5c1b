"""What the server of `tests.support.warm` has done before it forks: imported what scripts import, and captured a step."""

import torch
from torch import nn

import monograph as mg
from tests.support.threads import set_threads

set_threads()
_MODEL, _X = nn.Linear(2, 2), torch.ones(1, 2)
if torch.backends.cuda.is_built():  # there a backward() starts threads, and no fork may do another one
    mg.trace(_MODEL).compile(_X)
else:
    mg.train_graph(_MODEL, nn.MSELoss(), torch.optim.SGD(_MODEL.parameters(), lr=0.1)).compile(_X, _X)
