"""OneFlow's optimizers and schedulers; other names are those of `torch.optim`."""

from monograph.flow.optim import lr_scheduler
from monograph.flow.optim.optimizers import LAMB, SGD, Adadelta, Adagrad, Adam, AdamW, RMSprop

__all__ = ["LAMB", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop", "lr_scheduler"]
