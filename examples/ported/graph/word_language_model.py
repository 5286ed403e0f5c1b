"""A small script with the loop of pytorch/examples, word_language_model/main.py."""

import math

import torch
from torch import nn
from torch.nn import functional as F

import monograph as mg
from examples.ported import record

ntoken, ninp, nhid, nlayers, bptt, clip = 200, 64, 64, 2, 20, 0.25


class RNNModel(nn.Module):
    def __init__(self, dropout=0.2):
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        self.decoder.weight = self.encoder.weight  # tied
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.drop(self.encoder(input)), hidden)
        return F.log_softmax(self.decoder(self.drop(output)).view(-1, ntoken), dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return weight.new_zeros(nlayers, bsz, nhid), weight.new_zeros(nlayers, bsz, nhid)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    return data[: nbatch * bsz].view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    return h.detach() if isinstance(h, torch.Tensor) else tuple(repackage_hidden(v) for v in h)


def get_batch(source, i):
    seq_len = min(bptt, len(source) - 1 - i)
    return source[i : i + seq_len], source[i + 1 : i + 1 + seq_len].view(-1)


def evaluate(source):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(10)
    with torch.no_grad():
        for i in range(0, source.size(0) - 1, bptt):
            data, targets = get_batch(source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * criterion(output, targets).item()
    return total_loss / (len(source) - 1)


class Step(mg.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model
        self.config.keep_gradients()

    def build(self, data, targets, hidden, lr):
        output, hidden = self.model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), clip)
        for p in self.model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        self.model.zero_grad()
        return loss, hidden


def train():
    model.train()
    hidden = model.init_hidden(20)
    for i in range(0, train_data.size(0) - 1, bptt):
        data, targets = get_batch(train_data, i)
        hidden = repackage_hidden(hidden)
        loss, hidden = step(data, targets, hidden, lr)
        record.record(loss)


torch.manual_seed(1111)
corpus = (torch.randn(8000).cumsum(0).abs() * 5).long() % ntoken
train_data, val_data = batchify(corpus[:7000], 20), batchify(corpus[7000:], 10)
model = RNNModel()
criterion = nn.NLLLoss()
lr, best_val_loss = 20.0, None
step = Step(model)
step.config.backend(record.BACKEND)
record.begin()
for epoch in range(3):
    train()
    val_loss = evaluate(val_data)
    print(f"epoch {epoch}: valid loss {val_loss:.2f}, perplexity {math.exp(val_loss):.2f}")
    if not best_val_loss or val_loss < best_val_loss:
        best_val_loss = val_loss
    else:
        lr /= 4.0
record.final(model)
