"""How the rows of transformers are made: from a configuration, and trained on the loss that the model gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig

from tests.zoo.model import Batch, Deviation, Training, ZooModel
from tests.zoo.transformers_batches import VOCABULARY

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SMALL_TEXT = SMALL | {"vocab_size": VOCABULARY, "max_position_embeddings": 32}
ONE_CLASS = {"problem_type": "single_label_classification"}  # else the model sets it in its first call
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def row(
    name: str,
    auto: Any,
    batch: Callable[[torch.Generator], Batch],
    training: Training,
    builds: int = 1,
    deviation: Deviation | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
    **options: Any,
) -> ZooModel:
    """The row of a model type; `auto` is one of the AutoModel classes, `options` go into the configuration. A model that registers hooks in its first call
    has another build for the later ones.
    """
    make = partial(_from_config, auto, name.partition("/")[0], options)
    return ZooModel(name, "transformers", make, batch, loss or own_loss, training, builds, deviation)


def _from_config(auto: Any, model_type: str, options: dict[str, Any]) -> nn.Module:
    module: nn.Module = auto.from_config(AutoConfig.for_model(model_type, **options))
    return module


def own_loss(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss that the model computes from its labels."""
    loss: torch.Tensor = model(**inputs).loss
    return loss


def heard_letters(model: nn.Module, inputs: dict[str, torch.Tensor], letters: torch.Tensor) -> torch.Tensor:
    """The CTC loss of a speech model; its own one asks in Python whether all labels are in the vocabulary."""
    heard = model(**inputs).logits.log_softmax(-1).transpose(0, 1)
    lengths = [(count,) * heard.shape[1] for count in (heard.shape[0], letters.shape[1])]
    return nn.functional.ctc_loss(heard, letters, *lengths)
