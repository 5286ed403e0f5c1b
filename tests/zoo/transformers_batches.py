"""What models of transformers are trained on: random texts, images and sounds."""

from __future__ import annotations

import torch

from tests.zoo.model import Batch

VOCABULARY = 61


def tokens(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, VOCABULARY, shape, generator=generator)


def padding(generator: torch.Generator, rows: int, length: int) -> torch.Tensor:
    """A mask of 1 and 0: each row has a length of its own, the last always lacks a token."""
    lengths = torch.randint(length // 2, length + 1, (rows, 1), generator=generator)
    lengths[-1] = lengths[-1].clamp(max=length - 1)
    return (torch.arange(length) < lengths).long()


def text(generator: torch.Generator) -> Batch:
    """Tokens that predict the next."""
    ids = tokens(generator, 2, 8)
    return ({"input_ids": ids, "labels": ids.clone()},)


def padded_text(generator: torch.Generator) -> Batch:
    """The same, with padding at the right that is left out of the loss."""
    ids, mask = tokens(generator, 3, 8), padding(generator, 3, 8)
    labels = ids.masked_fill(mask == 0, -100)
    return ({"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels},)


def masked_text(generator: torch.Generator) -> Batch:
    """Padded tokens of which some are hidden and asked for."""
    ids, mask = tokens(generator, 3, 8), padding(generator, 3, 8)
    hidden = (torch.rand(3, 8, generator=generator) < 0.3) & (mask == 1)
    hidden[:, 0] = True
    return (
        {
            "input_ids": ids.masked_fill(hidden, 1).masked_fill(mask == 0, 0),
            "attention_mask": mask,
            "labels": ids.masked_fill(~hidden, -100),
        },
    )


def labelled_text(generator: torch.Generator) -> Batch:
    """Padded tokens with a class for each row."""
    inputs = dict(padded_text(generator)[0])
    return (inputs | {"labels": torch.randint(2, (3,), generator=generator)},)


def unpadded_text(generator: torch.Generator) -> Batch:
    """Tokens to be restored, and a mask that hides none of them."""
    ids = tokens(generator, 2, 8)
    return ({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()},)


def translated_text(generator: torch.Generator) -> Batch:
    """Padded tokens, and those to answer with."""
    return (dict(padded_text(generator)[0]) | {"labels": tokens(generator, 3, 6)},)


def labelled_images(size: int, generator: torch.Generator) -> Batch:
    """Images with a class each."""
    pixels = torch.randn(2, 3, size, size, generator=generator)
    return ({"pixel_values": pixels, "labels": torch.randint(2, (2,), generator=generator)},)


def captioned_images(generator: torch.Generator) -> Batch:
    """Images with a text each, told apart from those of the other images."""
    ids = tokens(generator, 3, 6)
    ids[:, -1] = VOCABULARY - 1
    return (
        {
            "pixel_values": torch.randn(3, 3, 8, 8, generator=generator),
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "return_loss": True,
        },
    )


def segmented_images(generator: torch.Generator) -> Batch:
    """Images with a class for each pixel."""
    return (
        {
            "pixel_values": torch.randn(2, 3, 32, 32, generator=generator),
            "labels": torch.randint(2, (2, 32, 32), generator=generator),
        },
    )


def hidden_patches(generator: torch.Generator) -> Batch:
    """Images of which some patches are hidden."""
    return (
        {
            "pixel_values": torch.randn(2, 3, 8, 8, generator=generator),
            "bool_masked_pos": torch.rand(2, 4, generator=generator) < 0.5,
        },
    )


def spoken_text(generator: torch.Generator) -> Batch:
    """Spectrograms with what is said."""
    return (
        {"input_features": torch.randn(2, 8, 16, generator=generator), "labels": tokens(generator, 2, 5)},
    )


def sounds(generator: torch.Generator) -> Batch:
    """Waves with a class each."""
    return (
        {
            "input_values": torch.randn(2, 200, generator=generator),
            "labels": torch.randint(2, (2,), generator=generator),
        },
    )


def spectrograms(generator: torch.Generator) -> Batch:
    return (
        {
            "input_values": torch.randn(2, 8, 8, generator=generator),
            "labels": torch.randint(2, (2,), generator=generator),
        },
    )


def letters(generator: torch.Generator) -> Batch:
    """Waves with the letters that are heard."""
    return ({"input_values": torch.randn(2, 200, generator=generator)}, tokens(generator, 2, 3))


def boxes(generator: torch.Generator) -> Batch:
    """Images with boxes in them."""
    labels = [
        {
            "class_labels": torch.randint(2, (2,), generator=generator),
            "boxes": torch.rand(2, 4, generator=generator) * 0.5 + 0.2,
        }
        for _ in range(2)
    ]
    return ({"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": labels},)
