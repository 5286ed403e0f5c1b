"""A loss by hand, its gradients, and the same as a graph."""

import monograph.flow as flow
import monograph.flow.nn as nn


def loss(y_pred, y):
    return flow.sum(1 / 2 * (y_pred - y) ** 2)


x = flow.ones(1, 5)
w = flow.randn(5, 3, requires_grad=True)
b = flow.randn(1, 3, requires_grad=True)
z = flow.matmul(x, w) + b

y = flow.zeros(1, 3)
l = loss(z, y)  # noqa: E741
l.backward()
print(l)
print(w.grad.shape, b.grad.shape)


class Loss(nn.Graph):
    def build(self, x, y):
        return loss(flow.matmul(x, w) + b, y)


with flow.no_grad():
    print(Loss()(x, y))
