"""A small script with the loop of pytorch/examples, dcgan/main.py."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import monograph as mg
from examples.ported import record

nz, ngf, ndf = 16, 16, 16


def weights_init(m):
    if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d)):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.ConvTranspose2d(nz, ngf * 4, 4, 1, 0, bias=False),
            nn.BatchNorm2d(ngf * 4),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf * 4, ngf, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ngf),
            nn.ReLU(True),
            nn.ConvTranspose2d(ngf, 3, 4, 2, 1, bias=False),
            nn.Tanh(),
        )

    def forward(self, x):
        return self.main(x)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(3, ndf, 4, 2, 1, bias=False),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf, ndf * 2, 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Conv2d(ndf * 2, 1, 4, 1, 0, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        return self.main(x).view(-1, 1).squeeze(1)


class Step(mg.Graph):
    def __init__(self, netG, netD, optimizerG, optimizerD):
        super().__init__()
        self.add_optimizer(optimizerG, manual=True)
        self.add_optimizer(optimizerD, manual=True)
        self.netG, self.netD, self.optimizerG, self.optimizerD = netG, netD, optimizerG, optimizerD

    def build(self, real):
        # the discriminator
        self.netD.zero_grad()
        label = torch.full((real.size(0),), 1.0)
        output = self.netD(real)
        errD_real = criterion(output, label)
        errD_real.backward()
        D_x = output.mean()
        noise = torch.randn(real.size(0), nz, 1, 1)
        fake = self.netG(noise)
        label.fill_(0.0)
        output = self.netD(fake.detach())
        errD_fake = criterion(output, label)
        errD_fake.backward()
        D_G_z1 = output.mean()
        errD = errD_real + errD_fake
        self.optimizerD.step()
        # the generator
        self.netG.zero_grad()
        label.fill_(1.0)
        output = self.netD(fake)
        errG = criterion(output, label)
        errG.backward()
        D_G_z2 = output.mean()
        self.optimizerG.step()
        return errD, errG, D_x, D_G_z1, D_G_z2


torch.manual_seed(2)
loader = DataLoader(TensorDataset(torch.rand(200, 3, 16, 16) * 2 - 1), batch_size=32, shuffle=True)
netG, netD = Generator(), Discriminator()
netG.apply(weights_init)
netD.apply(weights_init)
criterion = nn.BCELoss()
fixed_noise = torch.randn(8, nz, 1, 1)
optimizerD = torch.optim.Adam(netD.parameters(), lr=0.0002, betas=(0.5, 0.999))
optimizerG = torch.optim.Adam(netG.parameters(), lr=0.0002, betas=(0.5, 0.999))
step = Step(netG, netD, optimizerG, optimizerD)
step.config.backend(record.BACKEND)
record.begin()
for epoch in range(3):
    for i, (real,) in enumerate(loader):
        errD, errG, D_x, D_G_z1, D_G_z2 = step(real)
        record.record(errD + errG)
        if i % 5 == 0:
            print(
                f"[{epoch}][{i}] D {errD.item():.4f} G {errG.item():.4f} {D_x:.4f} {D_G_z1:.4f} / {D_G_z2:.4f}"
            )
            with torch.no_grad():
                sample = netG(fixed_noise)
record.final(netG, netD)
