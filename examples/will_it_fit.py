"""A training step of a transformer on the device meta: `monograph memory examples/will_it_fit.py:make` says what it will hold."""

import torch
from torch import nn

import monograph as mg


def make(batch=16):
    """The graph and its batches, of forms alone: nothing is allocated."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(1024, 16, 4096, dropout=0.0, batch_first=True)
        model = nn.TransformerEncoder(layer, 12, enable_nested_tensor=False)
        optimizer = torch.optim.AdamW(model.parameters())
    form = mg.spec((batch, 512, 1024), device="meta")
    return mg.train_graph(model, nn.MSELoss(), optimizer), [(form, form)]
