"""What models of diffusers are trained on, and for what: to tell noise, or to restore what they were given."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.zoo.model import Batch

SIZE = 8


def sample_of(output: Any) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output.sample


def noise_is_found(
    model: nn.Module, noisy: torch.Tensor, noise: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    """The model is shown a noisy image with its time step, and is to tell the noise."""
    return F.mse_loss(sample_of(model(noisy, **inputs)), noise)


def latents_are_found(
    model: nn.Module, noisy: torch.Tensor, noise: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    """The same for transformers whose output has other channels."""
    return (sample_of(model(noisy, **inputs))[:, : noise.shape[1]] - noise).square().mean()


def images(channels: int, generator: torch.Generator, size: int = SIZE) -> tuple[torch.Tensor, torch.Tensor]:
    clean, noise = torch.randn(2, 2, channels, size, size, generator=generator)
    return clean + noise, noise


def steps(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(1000, (2,), generator=generator)


def noisy_images(generator: torch.Generator) -> Batch:
    return (*images(3, generator), {"timestep": steps(generator)})


def labelled_noise(generator: torch.Generator) -> Batch:
    labels = {"class_labels": torch.randint(5, (2,), generator=generator)}
    return (*images(4, generator), {"timestep": steps(generator)} | labels)


def described_noise(generator: torch.Generator) -> Batch:
    """With what an encoder of texts would say."""
    said = torch.randn(2, 5, 16, generator=generator)
    return (*images(4, generator), {"timestep": steps(generator), "encoder_hidden_states": said})


def pooled_noise(generator: torch.Generator) -> Batch:
    """With the words of a text, and all of it in one vector."""
    noisy, noise, inputs = described_noise(generator)
    return noisy, noise, inputs | {"pooled_projections": torch.randn(2, 16, generator=generator)}


def flux_noise(generator: torch.Generator) -> Batch:
    """Sixteen patches as a row of tokens, with their places."""
    clean, noise = torch.randn(2, 2, 16, 4, generator=generator)
    places = torch.stack([torch.zeros(16), torch.arange(16) // 4, torch.arange(16) % 4], dim=-1)
    inputs = {
        "timestep": torch.rand(2, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 16, generator=generator),
        "pooled_projections": torch.randn(2, 16, generator=generator),
        "img_ids": places,
        "txt_ids": torch.zeros(5, 3),
    }
    return clean + noise, noise, inputs


def only_images(generator: torch.Generator, size: int = SIZE) -> Batch:
    return (torch.randn(2, 3, size, size, generator=generator),)


def is_restored(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Not by model(x), which rounds what is encoded to bytes: the encoder would learn nothing."""
    return F.mse_loss(model.decode(model.encode(x).latents).sample, x)


def is_restored_from_samples(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The loss of a variational autoencoder: a sample is drawn from what the encoder says."""
    said = model.encode(x).latent_dist
    return F.mse_loss(model.decode(said.sample()).sample, x) + 1e-3 * said.kl().mean()


def is_restored_from_codes(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    return F.mse_loss(output.sample, x) + output.commit_loss.mean()


def control(
    model: nn.Module, noisy: torch.Tensor, noise: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    down, middle = model(noisy, **inputs, return_dict=False)
    return sum(item.square().mean() for item in (*down, middle)) + (middle.mean() - noise.mean()).square()


def controlled_noise(generator: torch.Generator) -> Batch:
    noisy, noise, inputs = described_noise(generator)
    return noisy, noise, inputs | {"controlnet_cond": torch.randn(2, 3, 16, 16, generator=generator)}


def priors(generator: torch.Generator) -> Batch:
    clean, noise = torch.randn(2, 2, 16, generator=generator)
    inputs = {
        "timestep": steps(generator),
        "proj_embedding": torch.randn(2, 16, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 16, generator=generator),
    }
    return clean + noise, noise, inputs


def prior_is_found(
    model: nn.Module, noisy: torch.Tensor, noise: torch.Tensor, inputs: dict[str, Any]
) -> torch.Tensor:
    return F.mse_loss(model(noisy, **inputs).predicted_image_embedding, noise)
