"""A small script with the loop of pytorch/examples, reinforcement_learning/actor_critic.py."""

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F

from examples.ported import record


class Cart:  # a pole on a cart, as in gym's CartPole
    def __init__(self, seed):
        self.random = np.random.default_rng(seed)

    def reset(self):
        self.state = self.random.uniform(-0.05, 0.05, 4)
        return self.state

    def step(self, action):
        x, v, angle, w = self.state
        force = 10.0 if action else -10.0
        t = (force + 0.05 * w * w * np.sin(angle)) / 1.1
        aw = (9.8 * np.sin(angle) - np.cos(angle) * t) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        av = t - 0.05 * aw * np.cos(angle) / 1.1
        self.state = np.array([x + 0.02 * v, v + 0.02 * av, angle + 0.02 * w, w + 0.02 * aw])
        return self.state, 1.0, bool(abs(self.state[0]) > 2.4 or abs(self.state[2]) > 0.209)


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.action_head, self.value_head = nn.Linear(128, 2), nn.Linear(128, 1)
        self.saved_actions, self.rewards = [], []

    def forward(self, x):
        x = F.relu(self.affine1(x))
        return F.softmax(self.action_head(x), dim=-1), self.value_head(x)


torch.manual_seed(543)
env = Cart(543)
model = Policy()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-2)
eps = np.finfo(np.float32).eps.item()


def select_action(state):
    state = torch.from_numpy(state).float()
    probs, state_value = model(state)
    m = Categorical(probs)
    action = m.sample()
    model.saved_actions.append((m.log_prob(action), state_value))
    return action.item()


def finish_episode():
    R, returns = 0, []
    for r in model.rewards[::-1]:
        R = r + 0.99 * R
        returns.insert(0, R)
    returns = torch.tensor(returns)
    returns = (returns - returns.mean()) / (returns.std() + eps)
    policy_losses, value_losses = [], []
    for (log_prob, value), R in zip(model.saved_actions, returns):
        advantage = R - value.item()
        policy_losses.append(-log_prob * advantage)
        value_losses.append(F.smooth_l1_loss(value, torch.tensor([R])))
    optimizer.zero_grad()
    loss = torch.stack(policy_losses).sum() + torch.stack(value_losses).sum()
    loss.backward()
    optimizer.step()
    model.rewards.clear()
    model.saved_actions.clear()
    return loss


record.begin()
running_reward = 10.0
for episode in range(1, 31):
    state, total = env.reset(), 0.0
    for t in range(1, 200):
        action = select_action(state)
        state, reward, done = env.step(action)
        model.rewards.append(reward)
        total += reward
        if done:
            break
    running_reward = 0.05 * total + 0.95 * running_reward
    record.record(finish_episode())
    if episode % 10 == 0:
        print(f"episode {episode}: last {total:.0f}, average {running_reward:.2f}")
record.final(model)
