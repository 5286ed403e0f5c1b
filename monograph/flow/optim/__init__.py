"""OneFlow's optimizers and schedulers; other names are those of `torch.optim`."""

import torch.optim

from monograph.flow.names import forwarding, listing
from monograph.flow.optim import lr_scheduler
from monograph.flow.optim.optimizers import LAMB, SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop

__all__ = ["LAMB", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop", "lr_scheduler"]
__getattr__ = forwarding("optim", torch.optim)
__dir__ = listing(globals(), torch.optim)
