"""Train MobileNetV2 on CIFAR-10 as a graph: print it, watch it being made, save its state after each epoch, go on.

The standard files of CIFAR-10 are in data/cifar-10-batches-py.
"""

import os
import shutil

import monograph.flow as flow
import monograph.flow.nn as nn
import monograph.flow.vision as flowvision
import monograph.flow.vision.transforms as transforms

BATCH_SIZE = 64
EPOCH_NUM = 1
CHECKPOINT_SAVE_DIR = "./GraphMobileNetV2"

DEVICE = "cuda" if flow.cuda.is_available() else "cpu"
print("Using {} device".format(DEVICE))  # noqa: UP032

training_data = flowvision.datasets.CIFAR10(
    root="data",
    train=True,
    transform=transforms.ToTensor(),
    download=True,
)

train_dataloader = flow.utils.data.DataLoader(training_data, BATCH_SIZE, shuffle=True, drop_last=True)

model = flowvision.models.mobilenet_v2().to(DEVICE)
model.classifer = nn.Sequential(nn.Dropout(0.2), nn.Linear(model.last_channel, 10))
model.train()

loss_fn = nn.CrossEntropyLoss().to(DEVICE)
optimizer = flow.optim.SGD(model.parameters(), lr=1e-3)


class GraphMobileNetV2(flow.nn.Graph):
    def __init__(self):
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.add_optimizer(optimizer)

    def build(self, x, y):
        y_pred = self.model(x)
        loss = self.loss_fn(y_pred, y)
        loss.backward()
        return loss


graph_mobile_net_v2 = GraphMobileNetV2()
if os.path.exists(CHECKPOINT_SAVE_DIR):
    state_dict = flow.load(CHECKPOINT_SAVE_DIR)
    graph_mobile_net_v2.load_state_dict(state_dict)
    print("Going on after step", state_dict["System-Train-TrainStep"].item())

print(graph_mobile_net_v2)
graph_mobile_net_v2.debug(v_level=1)

for t in range(EPOCH_NUM):
    print(f"Epoch {t + 1}\n-------------------------------")
    size = len(train_dataloader.dataset)
    for batch, (x, y) in enumerate(train_dataloader):
        x = x.to(DEVICE)
        y = y.to(DEVICE)
        loss = graph_mobile_net_v2(x, y)
        current = batch * BATCH_SIZE
        if batch % 5 == 0:
            print(f"loss: {loss:>7f}  [{current:>5d}/{size:>5d}]")
    shutil.rmtree(CHECKPOINT_SAVE_DIR, ignore_errors=True)
    flow.save(graph_mobile_net_v2.state_dict(), CHECKPOINT_SAVE_DIR)

print(graph_mobile_net_v2)

flow.save(graph_mobile_net_v2.model.state_dict(), "./graph_model")  # the module's, by the graph or by itself
flow.save(model.state_dict(), "./graph_model")
flow.save(graph_mobile_net_v2, "./1/model")  # the whole step, to be trained on without this file

model = flowvision.models.mobilenet_v2().to(DEVICE)
model.classifer = nn.Sequential(nn.Dropout(0.2), nn.Linear(model.last_channel, 10))
model.load_state_dict(flow.load("./graph_model"))

step = flow.load("./1/model")
print(f"loss of the loaded step: {step.train(x, y):>7f}")
