"""A small script with the loop of pytorch/examples, gat/main.py."""

import torch
from torch import nn
from torch.nn import functional as F

from examples.ported import record


class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, n_hidden, n_heads, dropout=0.4):
        super().__init__()
        self.n_heads, self.n_hidden, self.dropout = n_heads, n_hidden, dropout
        self.W = nn.Parameter(torch.empty(in_features, n_hidden * n_heads))
        self.a = nn.Parameter(torch.empty(n_heads, 2 * n_hidden, 1))
        nn.init.xavier_normal_(self.W)
        nn.init.xavier_normal_(self.a)

    def forward(self, h, adj_mat):
        n_nodes = h.shape[0]
        h = F.dropout(torch.mm(h, self.W), self.dropout, training=self.training)
        h = h.view(n_nodes, self.n_heads, self.n_hidden).permute(1, 0, 2)
        source = torch.matmul(h, self.a[:, : self.n_hidden, :])
        target = torch.matmul(h, self.a[:, self.n_hidden :, :])
        e = F.leaky_relu(source + target.mT, 0.2)
        e = torch.where(adj_mat > 0, e, -9e16 * torch.ones_like(e))
        attention = F.dropout(F.softmax(e, dim=-1), self.dropout, training=self.training)
        return torch.matmul(attention, h).mean(dim=0)


class GAT(nn.Module):
    def __init__(self, in_features, n_hidden, n_heads, num_classes):
        super().__init__()
        self.gat1 = GraphAttentionLayer(in_features, n_hidden, n_heads)
        self.gat2 = GraphAttentionLayer(n_hidden, num_classes, 1)

    def forward(self, x, adj_mat):
        return F.log_softmax(self.gat2(F.elu(self.gat1(x, adj_mat)), adj_mat), dim=1)


def train_iter(epoch, model, optimizer, criterion, input, target, mask_train, mask_val):
    model.train()
    optimizer.zero_grad()
    output = model(*input)
    loss = criterion(output[mask_train], target[mask_train])
    loss.backward()
    optimizer.step()
    record.record(loss)
    loss_train, acc_train = test(model, criterion, input, target, mask_train)
    loss_val, acc_val = test(model, criterion, input, target, mask_val)
    if epoch % 10 == 0:
        print(f"epoch {epoch}: {loss_train:.4f} {acc_train:.4f} {loss_val:.4f} {acc_val:.4f}")


def test(model, criterion, input, target, mask):
    model.eval()
    with torch.no_grad():
        output = model(*input)
        output, target = output[mask], target[mask]
        loss = criterion(output, target)
        acc = (output.argmax(dim=1) == target).float().sum() / len(target)
    return loss.item(), acc.item()


torch.manual_seed(13)
labels = torch.randint(5, (300,))
features = F.one_hot(labels, 5).float() @ torch.randn(5, 32) + torch.randn(300, 32)
adj_mat = ((labels[:, None] == labels) & (torch.rand(300, 300) < 0.05)).float() + torch.eye(300)
idx = torch.randperm(300)
idx_val, idx_train = idx[:100], idx[100:]
gat_net = GAT(32, 16, 4, 5)
optimizer = torch.optim.Adam(gat_net.parameters(), lr=0.005, weight_decay=5e-4)
criterion = nn.NLLLoss()
record.begin()
for epoch in range(30):
    train_iter(epoch + 1, gat_net, optimizer, criterion, (features, adj_mat), labels, idx_train, idx_val)
record.final(gat_net)
