"""A small GPT learns to write like Python's own documentation, letter by letter.

Run it with `python examples/gpt_text.py`; the text is in the standard library.
"""

from pydoc_data.topics import topics

import torch
from models.gpt import GPT
from torch import nn

import monograph as mg

LENGTH = 64  # letters


class Train(mg.Graph):
    """A step on pieces of text: each letter is predicted from those before it."""

    def __init__(self, model, optimizer):
        super().__init__()
        self.model = model
        self.add_optimizer(optimizer)

    def build(self, letters):
        loss = nn.functional.cross_entropy(
            self.model(letters[:, :-1]).flatten(0, 1), letters[:, 1:].flatten()
        )
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        return loss


@torch.no_grad()
def written(model, start, number):
    """More letters, drawn one at a time."""
    letters = start
    for _ in range(number):
        odds = model(letters[:, -LENGTH:])[:, -1].softmax(-1)
        letters = torch.cat([letters, odds.multinomial(1)], dim=1)
    return letters[0].tolist()


def main(steps=200, batch=16):
    torch.manual_seed(0)
    text = "\n".join(topics.values()).encode("ascii", "ignore")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = GPT(128, context=LENGTH, width=64, num_layers=2)
    step = Train(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    loss = None
    for number in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (batch,))
        loss = step(torch.stack([data[start : start + LENGTH + 1] for start in starts]))
        if number % 50 == 0:
            print(f"step {number}: loss {loss.item():.3f}")
    model.eval()
    print(bytes(written(model, data[None, :LENGTH], 100)).decode())
    return loss.item()


if __name__ == "__main__":
    main()
