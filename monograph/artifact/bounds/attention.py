"""Attention, and the layers around it that torch runs as one op in evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch

from monograph.artifact.bounds.describe import described_result
from monograph.artifact.bounds.given import Given, Rule

aten = torch.ops.aten


def _attention(given: Given) -> None:
    """Attention divides by its sizes and reads rows as in memory. Its gradient goes by what the op itself gives."""
    tensors = [given.tensor(name) for name in ("query", "key", "value")]
    query, key, values = tensors
    for name, item in zip(("query", "key", "value"), tensors, strict=True):
        given.need(len(item.shape) == 4 and 0 not in item.shape and item.dtype is query.dtype, name)
        given.need(item.stride[3] == 1 or item.shape[3] == 1, name)
    given.need(
        key.shape == values.shape and key.shape[3] == query.shape[3] and key.shape[:2] == query.shape[:2],
        "key",
    )
    if "grad_out" in given.values:
        out, logsumexp = described_result(aten._scaled_dot_product_flash_attention_for_cpu.default, *tensors)[
            :2
        ]
        given.need_like(out, "grad_out", "out")
        given.need_like(logsumexp, "logsumexp")
    if given["attn_mask"] is not None:
        mask = given.tensor("attn_mask").shape
        full = (*query.shape[:3], key.shape[2])
        given.need(
            len(mask) in (2, 4) and all(a in (1, b) for a, b in zip(mask[::-1], full[::-1], strict=False)),
            "attn_mask",
        )


def _encoder_layer(given: Given) -> None:
    """A whole layer: every weight has the form that the sizes of `src` and of the first linear layer ask for."""
    _heads(given, "src", "num_heads")
    src, wide, units = given.tensor("src"), given.tensor("ffn_weight_1").shape[:1], (given["embed_dim"],)
    given.need_form((*wide, *units), src.dtype, "ffn_weight_1")
    given.need_form((*units, *wide), src.dtype, "ffn_weight_2")
    given.need_form(wide, src.dtype, "ffn_bias_1")
    given.need_form(units, src.dtype, "ffn_bias_2", *(f"norm_{name}" for name in _NORMS))


def _many_heads(given: Given) -> None:
    """Attention with its linear layers, of sequences to themselves or to others of their length."""
    _heads(given, "query", "num_head")
    given.need_like(given.tensor("query"), "key", "value")


_NORMS: Final = ("weight_1", "bias_1", "weight_2", "bias_2")


def _heads(given: Given, name: str, heads: str) -> None:
    """Check the sequences, what projects them, and the mask."""
    x, units, count = given.tensor(name), given["embed_dim"], given[heads]
    given.need(len(x.shape) == 3 and 0 not in x.shape and x.dtype.is_floating_point, name)
    given.need(x.shape[2] == units and count > 0 and units % count == 0, "embed_dim", heads)
    for part, rows in (("qkv", 3 * units), ("proj", units)):
        given.need_form((rows, units), x.dtype, f"{part}_weight")
        given.need_form((rows,), x.dtype, f"{part}_bias")
    if given["mask"] is not None:
        batch, steps, _ = x.shape
        forms = {0: (steps, steps), 1: (batch, steps), 2: (batch, count, steps, steps)}
        given.need(given["mask_type"] in forms, "mask_type")
        mask = given.tensor("mask")
        given.need(mask.shape == forms[given["mask_type"]] and mask.dtype in (torch.bool, x.dtype), "mask")


ATTENTION: Final[Mapping[str, Rule]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _attention,
    "aten::_transformer_encoder_layer_fwd": _encoder_layer,
    "aten::_native_multi_head_attention": _many_heads,
}
