"""How a captured step is called, as forms: its arguments by their names, and what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from monograph.artifact.schema import tree as forms
from monograph.artifact.schema.tree import FLOAT, INT, Form, Leaf, ValueForm
from monograph.checkpoint.errors import Refused
from monograph.checkpoint.leaves import Json
from monograph.ir.call.parameters import argument_name
from monograph.ir.call.signature import TensorKey, constant_of
from monograph.ir.call.tree import Tree
from monograph.ir.graph_signature import BoundProgram, Result
from monograph.ir.meta import TensorMeta, form, output_nodes, tensor_meta
from monograph.ir.program import Program


def arguments_to_json(tree: Tree, keys: Sequence[Any], names: tuple[str, ...]) -> Json:
    """Each argument by its name, those that were given by position first."""
    positional, named = tree.children
    left = iter(keys)
    rows = [
        [argument_name(names, index), _argument(child, left)]
        for index, child in enumerate(positional.children)
    ]
    others = [[name, _argument(child, left)] for name, child in zip(named.keys, named.children, strict=True)]
    return {"positional": rows, "named": others}


def returned(bound: BoundProgram, program: Program, keys: Sequence[Any]) -> Form:
    """What a call returns; `program` is the bound program after its passes."""
    outputs = output_nodes(program.graph)
    return Form(bound.result_tree, tuple(_returned(result, outputs, keys) for result in bound.results))


def _returned(result: Result, outputs: Sequence[Any], keys: Sequence[Any]) -> Leaf:
    if result.kind == "output":
        return form(outputs[result.index]) or FLOAT
    if result.kind == "argument":
        return _leaf(keys[result.index])
    if isinstance(result.value, torch.Tensor):
        return tensor_meta(result.value.detach())
    return ValueForm(result.value)


def _argument(tree: Tree, keys: Iterator[Any]) -> Json:
    return forms.to_json(Form(tree, tuple(_leaf(next(keys)) for _ in range(_num_leaves(tree)))))


def _num_leaves(tree: Tree) -> int:
    return 1 if tree.kind is None else sum(map(_num_leaves, tree.children))


def _leaf(key: Any) -> Leaf:
    if isinstance(key, TensorKey):
        if key.hooks:
            raise Refused(
                "an argument has hooks, which an artifact cannot hold", "register none on arguments"
            )
        return TensorMeta(tuple(key.shape), key.dtype, tuple(key.stride), key.device, key.requires_grad)
    if key is float or key is int:
        return FLOAT if key is float else INT
    return ValueForm(constant_of(key))
