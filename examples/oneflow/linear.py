"""A module of one's own, eagerly and as a graph."""

import monograph.flow as flow
import monograph.flow.nn as nn


class ModuleMyLinear(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(flow.randn(in_features, out_features))
        self.bias = nn.Parameter(flow.randn(out_features))

    def forward(self, input):
        return flow.matmul(input, self.weight) + self.bias


linear_model = ModuleMyLinear(4, 3)


class GraphMyLinear(nn.Graph):
    def __init__(self):
        super().__init__()
        self.model = linear_model

    def build(self, input):
        return self.model(input)


graph_mylinear = GraphMyLinear()
input = flow.randn(1, 4)
print(linear_model(input))
out = graph_mylinear(input)
print(out)
