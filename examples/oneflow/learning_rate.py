"""A schedule that prints its learning rates while a graph trains."""

import monograph.flow as flow
import monograph.flow.nn as nn

model = nn.Linear(3, 1)
optimizer = flow.optim.SGD(model.parameters(), lr=1e-3)
scheduler = flow.optim.lr_scheduler.CosineDecayLR(optimizer, decay_steps=100, alpha=0.98, verbose=True)


class Train(nn.Graph):
    def __init__(self):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer, lr_sch=scheduler)

    def build(self, x):
        loss = self.model(x).sum()
        loss.backward()
        return loss


graph = Train()
for _ in range(3):
    graph(flow.ones(2, 3))
