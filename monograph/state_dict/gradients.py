"""Gradients that stay from one step to the next."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from monograph.state.find import Owned, tensor_paths
from monograph.state_dict.loading import Loading, Part, mapping


def gradients_part(name: str, owned: Owned, *, kept: bool) -> Part:
    """Gradients that stay from one step to the next."""

    def named() -> dict[str, torch.Tensor]:
        modules = owned.named_modules()
        parameters = {id(p): p for module in modules.values() for p in module.parameters(recurse=False)}
        paths = tensor_paths(modules)
        return {paths[key]: parameter for key, parameter in parameters.items()}

    def read() -> dict[str, torch.Tensor] | None:
        if not kept:
            return None
        # also if there are none: a graph that has some loses them when it loads this
        return {path: p.grad.detach() for path, p in named().items() if p.grad is not None}

    def load(value: Any, loading: Loading) -> None:
        if value is None:
            return
        given, parameters = mapping(value), named()
        loading.unexpected += [f"{name}/{path}" for path in given if path not in parameters]
        for path, parameter in parameters.items():
            gradient = given.get(path)
            if gradient is not None and not isinstance(gradient, torch.Tensor):
                loading.wrong.append(f"{name}/{path} is a {type(gradient).__name__}; expected a tensor")
            elif gradient is not None and gradient.shape != parameter.shape:
                shapes = f"{tuple(gradient.shape)}; here it is {tuple(parameter.shape)}"
                loading.wrong.append(f"{name}/{path} is of shape {shapes}")
            else:
                loading.commits.append(partial(_set_gradient, parameter, gradient))

    return Part(read, load, optional=True)


def _set_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    parameter.grad = None if gradient is None else gradient.to(parameter.device, parameter.dtype, copy=True)
