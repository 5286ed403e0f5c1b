"""Export a style-transfer network for deployment, load it without its code and run it again.

The weights are in sketch.pth, a state dict of the network.
"""

import monograph.flow as flow
import monograph.flow.nn as nn
from monograph.flow.vision.models.neural_style_transfer.stylenet import neural_style_transfer


class MyGraph(nn.Graph):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def build(self, *input):
        return self.model(*input)


if __name__ == "__main__":
    fake_image = flow.ones((1, 3, 256, 256))
    model = neural_style_transfer(pretrained="sketch.pth", progress=True)
    model.eval()
    graph = MyGraph(model)
    out = graph(fake_image)

    flow.save(graph, "1/model")

    loaded = flow.load("1/model")
    print(out.shape, "the same again:", flow.equal(loaded(fake_image), out))
