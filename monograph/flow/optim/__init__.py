"""OneFlow's optimizers and schedulers; other names are those of `torch.optim`.

Where PyTorch has the formula of an optimizer, its code does the update. Of the keys of a param group a Graph follows
`clip_grad_max_norm`, `clip_grad_norm_type` and `lr_scale` by itself. In eager mode `clip_grad()` clips, and `lr_scale`
has no effect, as in OneFlow. `contiguous_params` and `fused` said how OneFlow stores and computes; they are taken and
change nothing.
"""

import torch.optim

from monograph.flow.names import forwarding, listing
from monograph.flow.optim import lr_scheduler
from monograph.flow.optim.adam import LAMB, Adam, AdamW
from monograph.flow.optim.gradient_descent import SGD, Adadelta, Adagrad, RMSprop

__all__ = ["LAMB", "SGD", "Adadelta", "Adagrad", "Adam", "AdamW", "RMSprop", "lr_scheduler"]
__getattr__ = forwarding("optim", torch.optim)
__dir__ = listing(globals(), torch.optim)
