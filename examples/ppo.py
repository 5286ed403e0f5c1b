"""PPO with many tiny steps: a cart learns to stop at a point. The clipped ratio anneals, and that makes no new build.

Run it with `python examples/ppo.py`.
"""

import torch
from torch import nn
from torch.distributions import Normal

import monograph as mg


class Carts:
    """Many carts side by side; each sees its place and speed, is pushed, and pays for being away from 0."""

    def __init__(self, number):
        self.place, self.speed = torch.rand(number) * 2 - 1, torch.zeros(number)

    def see(self):
        return torch.stack([self.place, self.speed], 1)

    def push(self, force):
        self.speed = 0.9 * self.speed + 0.1 * force.clamp(-1, 1)
        self.place = self.place + 0.2 * self.speed
        return -self.place.abs()


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        self.log_std = nn.Parameter(torch.zeros(1))

    def forward(self, seen):
        return Normal(self.actor(seen).squeeze(-1), self.log_std.exp()), self.critic(seen).squeeze(-1)


class Learn(mg.Graph):
    def __init__(self, policy, optimizer):
        super().__init__()
        self.policy = policy
        self.add_optimizer(optimizer)

    def build(self, seen, force, log_prob, advantage, worth, clip):
        odds, value = self.policy(seen)
        ratio = (odds.log_prob(force) - log_prob).exp()
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - clip, 1 + clip) * advantage).mean()
        loss = (value - worth).square().mean() - gain - 1e-3 * odds.entropy().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 0.5)
        return loss


def main(rounds=40, carts=32, length=32):
    torch.manual_seed(0)
    policy = Policy()
    learn = Learn(policy, torch.optim.Adam(policy.parameters(), lr=5e-3))
    paid = []
    for number in range(rounds):
        env, rows = Carts(carts), []
        with torch.no_grad():
            for _ in range(length):
                odds, value = policy(seen := env.see())
                force = odds.sample()
                rows.append((seen, force, odds.log_prob(force), value, env.push(force)))
            seen, force, log_prob, value, reward = (torch.stack(column) for column in zip(*rows, strict=True))
            worth = torch.stack([reward[t:].sum(0) / 10 for t in range(length)])
            batch = [part.flatten(0, 1) for part in (seen, force, log_prob, worth - value, worth)]
        for rows in torch.randperm(carts * length).split(256):
            learn(*(part[rows] for part in batch), clip=0.2 * (1 - number / rounds))
        paid.append(reward.mean().item())
        if number % 10 == 0:
            print(f"round {number}: {paid[-1]:.3f} on average; {len(learn.builds)} build")
    return paid


if __name__ == "__main__":
    main()
