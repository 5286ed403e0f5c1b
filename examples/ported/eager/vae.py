"""A small script with the loop of pytorch/examples, vae/main.py."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from examples.ported import record


class VAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 200), nn.Linear(200, 8), nn.Linear(200, 8)
        self.fc3, self.fc4 = nn.Linear(8, 200), nn.Linear(200, 64)

    def forward(self, x):
        h = F.relu(self.fc1(x.view(-1, 64)))
        mu, logvar = self.fc21(h), self.fc22(h)
        std = torch.exp(0.5 * logvar)
        z = mu + torch.randn_like(std) * std
        return self.decode(z), mu, logvar

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))


def loss_function(recon_x, x, mu, logvar):
    bce = F.binary_cross_entropy(recon_x, x.view(-1, 64), reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


def train(epoch):
    model.train()
    train_loss = 0.0
    for data, _ in train_loader:
        optimizer.zero_grad()
        recon_batch, mu, logvar = model(data)
        loss = loss_function(recon_batch, data, mu, logvar)
        loss.backward()
        train_loss += loss.item()
        optimizer.step()
        record.record(loss)
    print(f"epoch {epoch}: average loss {train_loss / len(train_loader.dataset):.4f}")


def test():
    model.eval()
    test_loss = 0.0
    with torch.no_grad():
        for data, _ in test_loader:
            test_loss += loss_function((out := model(data))[0], data, *out[1:]).item()
    print(f"test loss {test_loss / len(test_loader.dataset):.4f}")


torch.manual_seed(1)
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target)
train_loader = DataLoader(TensorDataset(images[:1500], labels[:1500]), batch_size=128, shuffle=True)
test_loader = DataLoader(TensorDataset(images[1500:], labels[1500:]), batch_size=128)
model = VAE()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
record.begin()
for epoch in range(4):
    train(epoch)
    test()
    with torch.no_grad():
        sample = model.decode(torch.randn(64, 8))
record.final(model)
