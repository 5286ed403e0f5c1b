"""A small script with the loop of pytorch/examples, mnist_forward_forward/main.py."""

import torch
from sklearn.datasets import load_digits
from torch import nn

from examples.ported import record


def overlay_y_on_x(x, y, classes=10):
    x_ = x.clone()
    x_[:, :classes] *= 0.0
    x_[range(x.shape[0]), y] = x.max()
    return x_


class Layer(nn.Linear):
    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features)
        self.relu = nn.ReLU()
        self.opt = torch.optim.Adam(self.parameters(), lr=0.03)
        self.threshold, self.num_epochs = 2, 30

    def forward(self, x):
        x_direction = x / (x.norm(2, 1, keepdim=True) + 1e-4)
        return self.relu(torch.mm(x_direction, self.weight.T) + self.bias.unsqueeze(0))

    def train(self, x_pos, x_neg):
        for i in range(self.num_epochs):
            g_pos = self.forward(x_pos).pow(2).mean(1)
            g_neg = self.forward(x_neg).pow(2).mean(1)
            loss = torch.log1p(torch.exp(torch.cat([-g_pos + self.threshold, g_neg - self.threshold]))).mean()
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            record.record(loss)
            if i % 10 == 0:
                print("loss:", loss.item())
        return self.forward(x_pos).detach(), self.forward(x_neg).detach()


class Net(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.layers = [Layer(a, b) for a, b in zip(dims, dims[1:])]

    def predict(self, x):
        goodness_per_label = []
        for label in range(10):
            h, goodness = overlay_y_on_x(x, label), []
            for layer in self.layers:
                h = layer(h)
                goodness.append(h.pow(2).mean(1))
            goodness_per_label.append(sum(goodness).unsqueeze(1))
        return torch.cat(goodness_per_label, 1).argmax(1)

    def train(self, x_pos, x_neg):
        for i, layer in enumerate(self.layers):
            print("training layer:", i)
            x_pos, x_neg = layer.train(x_pos, x_neg)


torch.manual_seed(1)
digits = load_digits()
x = torch.tensor(digits.data[:500], dtype=torch.float32) / 16
y = torch.tensor(digits.target[:500])
net = Net([64, 100, 100])
x_pos = overlay_y_on_x(x, y)
x_neg = overlay_y_on_x(x, (y + torch.randint(1, 10, y.shape)) % 10)
record.begin()
net.train(x_pos, x_neg)
print("train error:", 1.0 - net.predict(x).eq(y).float().mean().item())
record.final(*net.layers)
