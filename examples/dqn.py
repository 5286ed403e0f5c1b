"""Q-learning with many tiny steps: a walker in a corridor learns to go to the end that pays more.

Acting is a graph without optimizer, learning one with; the target network moves inside of the step. Run it with `python examples/dqn.py`.
"""

import random
from collections import deque
from copy import deepcopy

import torch
from torch import nn

import monograph as mg

LENGTH, ENDS = 9, {0: 0.2, 8: 1.0}  # places of the corridor, and what its ends pay


class Corridor:
    """One step left or right; the left end is nearer, the right end pays more."""

    def reset(self):
        self.place, self.time = 2, 0
        return self.place

    def step(self, action):
        self.place += 1 if action else -1
        self.time += 1
        return self.place, ENDS.get(self.place, 0.0), self.place in ENDS or self.time == 50


class Learn(mg.Graph):
    """A step towards what was paid and what the next place is worth; the target follows slowly."""

    def __init__(self, model, target, optimizer):
        super().__init__()
        self.model, self.target = model, target
        self.add_optimizer(optimizer)

    def build(self, place, action, reward, after, done):
        with torch.no_grad():
            for slow, fast in zip(self.target.parameters(), self.model.parameters(), strict=True):
                slow.lerp_(fast, 0.02)
            worth = reward + 0.95 * (1 - done) * self.target(after).max(1).values
        loss = nn.functional.smooth_l1_loss(self.model(place).gather(1, action).squeeze(1), worth)
        loss.backward()
        return loss


def main(episodes=150, batch=32):
    torch.manual_seed(0)
    dice, memory, env = random.Random(0), deque(maxlen=2000), Corridor()
    layers = nn.Embedding(LENGTH, 16), nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 2)
    model = nn.Sequential(*layers)
    target = deepcopy(model)
    learn = Learn(model, target, torch.optim.Adam(model.parameters(), lr=2e-3))
    act = mg.trace(lambda place: model(place).argmax(1))
    paid, losses = [], []
    for episode in range(episodes):
        place, done = env.reset(), False
        while not done:
            with torch.no_grad():
                best = int(act(torch.tensor([place])))
            action = dice.randrange(2) if dice.random() < max(0.1, 1 - episode / 60) else best
            after, reward, done = env.step(action)
            memory.append((place, action, reward, after, float(done)))
            place = after
            if len(memory) >= batch:
                rows = list(zip(*dice.sample(memory, batch), strict=True))
                places, actions, afters = (torch.tensor(rows[i]) for i in (0, 1, 3))
                rewards, dones = torch.tensor(rows[2]), torch.tensor(rows[4])
                losses.append(learn(places, actions[:, None], rewards, afters, dones).item())
        paid.append(reward)
        if episode % 30 == 29:
            print(f"episode {episode + 1}: {sum(paid[-30:]) / 30:.2f} paid on average, loss {losses[-1]:.5f}")
    return losses


if __name__ == "__main__":
    main()
