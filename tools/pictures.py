"""Draws the pictures of docs/: `python tools/pictures.py` writes docs/pictures/call.svg and block.svg."""

from pathlib import Path

import torch
from torch import nn

import monograph as mg

PICTURES = Path(__file__).parent.parent / "docs" / "pictures"
FIRST = [  # what the first call does: the name of each step, and two lines about it
    ("build()", "your code runs once,", "on fake tensors"),
    ("capture", "each op is recorded,", "what was read: guards"),
    ("passes", "the program is", "made smaller"),
    ("plan", "order, frees,", "writes in place"),
    ("backend", "the plan becomes", "something that runs"),
]
LATER = [  # what each later call does
    ("guards", "does the build", "still fit?"),
    ("bind", "arguments, state,", "learning rate"),
    ("run", "the ops of", "the whole step"),
    ("write back", "parameters, optimizer", "state, buffers"),
    ("results", "the loss, and what", "build() returned"),
]
BOX = (150, 72)
GAP = 24
LEFT, TOP, BELOW = 20, 46, 190


def box(x: int, y: int, texts: tuple[str, str, str], colour: str) -> str:
    """One step: its name, and what it does."""
    width, height = BOX
    name, *about = texts
    lines = [f'<text x="{x + width // 2}" y="{y + 24}" font-weight="bold" font-size="15">{name}</text>']
    lines += [
        f'<text x="{x + width // 2}" y="{y + 44 + 16 * number}" font-size="12">{line}</text>'
        for number, line in enumerate(about)
    ]
    rect = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" fill="{colour}" stroke="#444"/>'
    return "\n".join([rect, *lines])


def arrow(*points: tuple[int, int]) -> str:
    """A line through these points, with a head at its end."""
    path = " L ".join(f"{x} {y}" for x, y in points)
    return f'<path d="M {path}" fill="none" stroke="#444" stroke-width="1.5" marker-end="url(#head)"/>'


def row(title: str, y: int, steps: list[tuple[str, str, str]], colour: str) -> list[str]:
    """The steps of a call from left to right, under a title."""
    width, height = BOX
    drawn = [f'<text x="{LEFT}" y="{y - 14}" text-anchor="start" font-size="14">{title}</text>']
    for number, texts in enumerate(steps):
        x = LEFT + number * (width + GAP)
        drawn.append(box(x, y, texts, colour))
        if number:
            drawn.append(arrow((x - GAP, y + height // 2), (x - 2, y + height // 2)))
    return drawn


def call_picture() -> str:
    """What happens in the first call, and in each one after it."""
    width = 2 * LEFT + len(FIRST) * (BOX[0] + GAP) - GAP
    height = BELOW + BOX[1] + 20
    last, bend, middle = width - LEFT - BOX[0] // 2, BELOW - 42, BELOW + BOX[1] // 2
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'text-anchor="middle" fill="#111">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
        'orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="#444"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        *row("The first call, and each that no build fits: a build is made", TOP, FIRST, "#fde9c8"),
        *row(
            "Every call, the first included: a build serves it, without your Python code",
            BELOW,
            LATER,
            "#cfe3fa",
        ),
        arrow((last, TOP + BOX[1]), (last, bend), (LEFT // 2, bend), (LEFT // 2, middle), (LEFT - 2, middle)),
        "</svg>",
    ]
    return "\n".join(drawn) + "\n"


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(x)
        x = x + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return x + self.mlp(x)


def block_picture(path: Path) -> None:
    """What `draw()` makes of one block of three."""
    model = nn.Sequential(*(Block() for _ in range(3)))
    step = mg.train_graph(model, nn.MSELoss(), torch.optim.AdamW(model.parameters()))
    step.compile(mg.spec((8, 16, 64)), mg.spec((8, 16, 64)))
    step.draw(path, module="model.1")


if __name__ == "__main__":
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "call.svg").write_text(call_picture())
    block_picture(PICTURES / "block.svg")
