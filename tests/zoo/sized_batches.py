"""Batches of a given size for models of the zoo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.zoo import graph_models, plain_models
from tests.zoo.model import Batch
from tests.zoo.transformers_batches import VOCABULARY, tokens


def seen_lengths(generator: torch.Generator, rows: int, length: int) -> torch.Tensor:
    """A mask of 1 and 0 that hides the end of each row but the first, and at least one token of the last."""
    lengths = torch.randint((length + 1) // 2, length + 1, (rows, 1), generator=generator)
    lengths[-1] = min(int(lengths[-1]), max(length - 1, 1))
    lengths[0] = length
    return (torch.arange(length) < lengths).long()


def text(generator: torch.Generator, rows: int, length: int) -> Batch:
    ids = tokens(generator, rows, length)
    return ({"input_ids": ids, "labels": ids.clone()},)


def padded_text(generator: torch.Generator, rows: int, length: int) -> Batch:
    ids, mask = tokens(generator, rows, length), seen_lengths(generator, rows, length)
    return ({"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)},)


def labelled_text(generator: torch.Generator, rows: int, length: int) -> Batch:
    inputs = dict(padded_text(generator, rows, length)[0])
    return (inputs | {"labels": torch.randint(2, (rows,), generator=generator)},)


def translated_text(generator: torch.Generator, rows: int, source: int, target: int) -> Batch:
    inputs = dict(padded_text(generator, rows, source)[0])
    return (inputs | {"labels": tokens(generator, rows, target)},)


def labelled_images(generator: torch.Generator, rows: int, height: int, width: int) -> Batch:
    pixels = torch.randn(rows, 3, height, width, generator=generator)
    return ({"pixel_values": pixels, "labels": torch.randint(2, (rows,), generator=generator)},)


def images(generator: torch.Generator, rows: int, height: int, width: int) -> Batch:
    return ({"pixel_values": torch.randn(rows, 3, height, width, generator=generator)},)


def segmented_images(generator: torch.Generator, rows: int, height: int, width: int) -> Batch:
    pixels = torch.randn(rows, 3, height, width, generator=generator)
    return ({"pixel_values": pixels, "labels": torch.randint(2, (rows, height, width), generator=generator)},)


def captioned_images(generator: torch.Generator, rows: int, length: int) -> Batch:
    ids = tokens(generator, rows, length)
    ids[:, -1] = VOCABULARY - 1
    return (
        {
            "pixel_values": torch.randn(rows, 3, 8, 8, generator=generator),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "return_loss": True,
        },
    )


def spectrograms(generator: torch.Generator, rows: int, target: int) -> Batch:
    inputs = {"input_features": torch.randn(rows, 8, 16, generator=generator)}
    return (inputs | {"labels": tokens(generator, rows, target)},)


def waves(generator: torch.Generator, rows: int, samples: int) -> Batch:
    inputs = {"input_values": torch.randn(rows, samples, generator=generator)}
    return (inputs, tokens(generator, rows, 3))


def noise(channels: int, **others: Callable[..., Any]) -> Callable[..., Batch]:
    """Noisy images, the noise, and the time step; `others` give further inputs."""

    def batch(generator: torch.Generator, rows: int, height: int, width: int, *more: int) -> Batch:
        clean, noise = torch.randn(2, rows, channels, height, width, generator=generator)
        inputs = {name: make(generator, rows, *more) for name, make in others.items()}
        return clean + noise, noise, inputs | {"timestep": torch.randint(1000, (rows,), generator=generator)}

    return batch


def description(generator: torch.Generator, rows: int, words: int = 5) -> torch.Tensor:
    return torch.randn(rows, words, 16, generator=generator)


def classes(generator: torch.Generator, rows: int) -> torch.Tensor:
    return torch.randint(5, (rows,), generator=generator)


def plain_images(generator: torch.Generator, rows: int, height: int, width: int) -> Batch:
    return (torch.randn(rows, 3, height, width, generator=generator),)


def nodes(generator: torch.Generator, count: int, edges: int, loops: bool = False) -> Batch:
    """A graph with a class for each node."""
    index = torch.randint(count, (2, edges), generator=generator)
    if loops:
        index = torch.cat([index, torch.arange(count).expand(2, -1)], dim=1)
    x = torch.randn(count, graph_models.FEATURES, generator=generator)
    return x, index, torch.randint(graph_models.CLASSES, (count,), generator=generator)


def looped_nodes(generator: torch.Generator, count: int, edges: int) -> Batch:
    return nodes(generator, count, edges, loops=True)


def weighted_nodes(generator: torch.Generator, count: int, edges: int) -> Batch:
    x, index, labels = nodes(generator, count, edges)
    return x, index, torch.randn(edges, 4, generator=generator), labels


def graphs(generator: torch.Generator, count: int, edges: int) -> Batch:
    """Three graphs in one batch."""
    x = torch.randn(count, graph_models.FEATURES, generator=generator)
    graph = (torch.arange(count) * graph_models.GRAPHS // count).clamp(max=graph_models.GRAPHS - 1)
    index = torch.randint(count, (2, edges), generator=generator)
    return x, index, graph, torch.randint(graph_models.CLASSES, (graph_models.GRAPHS,), generator=generator)


def tagged(generator: torch.Generator, rows: int, length: int) -> Batch:
    shape = rows, length
    words = torch.randint(plain_models.WORDS, shape, generator=generator)
    return words, torch.randint(5, shape, generator=generator)


def translations(generator: torch.Generator, rows: int, source: int, target: int) -> Batch:
    words = plain_models.WORDS
    return tuple(torch.randint(words, (rows, length), generator=generator) for length in (source, target))


def cells(generator: torch.Generator, rows: int, height: int, width: int) -> Batch:
    shape = rows, 1, height, width
    return torch.randn(shape, generator=generator), (torch.rand(shape, generator=generator) > 0.5).float()


def points(generator: torch.Generator, rows: int) -> Batch:
    return (torch.rand(rows, 2, generator=generator),)


def vectors(generator: torch.Generator, rows: int) -> Batch:
    return (torch.randn(rows, 4, generator=generator),)


def pictures(generator: torch.Generator, rows: int) -> Batch:
    return torch.randn(rows, 3, 8, 8, generator=generator), torch.randint(2, (rows,), generator=generator)
