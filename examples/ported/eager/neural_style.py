"""A small script with the loop of pytorch/examples, fast_neural_style/neural_style/neural_style.py."""

from collections import namedtuple

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from examples.ported import record

Features = namedtuple("Features", ["relu1", "relu2"])


class Conv(nn.Module):
    def __init__(self, a, b, kernel_size, stride=1, upsample=None):
        super().__init__()
        self.upsample = nn.Upsample(mode="nearest", scale_factor=upsample) if upsample else None
        self.pad = nn.ReflectionPad2d(kernel_size // 2)
        self.conv2d = nn.Conv2d(a, b, kernel_size, stride)

    def forward(self, x):
        if self.upsample:
            x = self.upsample(x)
        return self.conv2d(self.pad(x))


class TransformerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.in1 = Conv(3, 8, 5), nn.InstanceNorm2d(8, affine=True)
        self.conv2, self.in2 = Conv(8, 16, 3, stride=2), nn.InstanceNorm2d(16, affine=True)
        self.conv3, self.in3 = Conv(16, 16, 3), nn.InstanceNorm2d(16, affine=True)
        self.deconv1, self.in4 = Conv(16, 8, 3, upsample=2), nn.InstanceNorm2d(8, affine=True)
        self.deconv2 = Conv(8, 3, 5)

    def forward(self, x):
        y = torch.relu(self.in2(self.conv2(torch.relu(self.in1(self.conv1(x))))))
        y = torch.relu(self.in3(self.conv3(y)) + y)
        return self.deconv2(torch.relu(self.in4(self.deconv1(y))))


class Vgg(nn.Module):
    def __init__(self, requires_grad=False):
        super().__init__()
        self.slice1 = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU())
        if not requires_grad:
            for param in self.parameters():
                param.requires_grad = False

    def forward(self, x):
        h = self.slice1(x)
        return Features(h, self.slice2(h))


def normalize_batch(batch):
    mean = batch.new_tensor([0.485, 0.456, 0.406]).view(-1, 1, 1)
    std = batch.new_tensor([0.229, 0.224, 0.225]).view(-1, 1, 1)
    return (batch.div_(255.0) - mean) / std


def gram_matrix(y):
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


torch.manual_seed(42)
loader = DataLoader(TensorDataset(torch.rand(30, 3, 32, 32) * 255, torch.zeros(30)), batch_size=4)
transformer = TransformerNet()
optimizer = torch.optim.Adam(transformer.parameters(), 1e-3)
mse_loss = nn.MSELoss()
vgg = Vgg(requires_grad=False)
style = (torch.rand(3, 32, 32) * 255).repeat(4, 1, 1, 1)
features_style = vgg(normalize_batch(style))
gram_style = [gram_matrix(y) for y in features_style]
record.begin()
for epoch in range(2):
    transformer.train()
    agg_content_loss, agg_style_loss = 0.0, 0.0
    for batch_id, (x, _) in enumerate(loader):
        n_batch = len(x)
        optimizer.zero_grad()
        y = transformer(x)
        y = normalize_batch(y)
        x = normalize_batch(x)
        features_y, features_x = vgg(y), vgg(x)
        content_loss = 1e2 * mse_loss(features_y.relu2, features_x.relu2)
        style_loss = 0.0
        for ft_y, gm_s in zip(features_y, gram_style):
            gm_y = gram_matrix(ft_y)
            style_loss += mse_loss(gm_y, gm_s[:n_batch, :, :])
        style_loss *= 1e5
        total_loss = content_loss + style_loss
        total_loss.backward()
        optimizer.step()
        record.record(total_loss)
        agg_content_loss += content_loss.item()
        agg_style_loss += style_loss.item()
        if (batch_id + 1) % 4 == 0:
            print(
                f"content {agg_content_loss / (batch_id + 1):.4f}, style {agg_style_loss / (batch_id + 1):.4f}"
            )
record.final(transformer)
