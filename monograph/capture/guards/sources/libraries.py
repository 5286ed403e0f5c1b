"""Which code and modules are a library's: of torch, numpy, the standard library or our own, and which of them trace."""

from __future__ import annotations

import sys
from types import CodeType, FrameType

from monograph.compat.modules import BY_NAME
from monograph.user_code.files import is_user_file

# torch's tracing: it handles tensors and nodes, and reads no object of the user's
_TRACING = (
    "fx", "_subclasses", "_ops", "_library", "_prims", "_prims_common", "_refs", "_decomp", "_meta_registrations",
    "_logging", "_dynamo", "_inductor", "_dispatch", "_higher_order_ops", "utils._python_dispatch", "utils._sympy",
    "utils.weak",
)  # fmt: skip
# they work on numbers and texts, in caches and buffers of their own
_WITHOUT_OBJECTS = (
    *("sympy", "mpmath", "antlr4"),
    *("omegaconf.grammar", "omegaconf.grammar_parser", "omegaconf.grammar_visitor"),
)
_TRACERS = tuple(f"torch.{name}" for name in _TRACING) + ("monograph", *_WITHOUT_OBJECTS)
# classes of Graphs, and what users make theirs from
_OWN_STEPS = ("monograph.integrations", "monograph.shortcuts")
# our own modules, optimizers and models, which are part of a step
_OWN_PARTS = ("monograph.flow", "monograph.amp", "monograph.cli.demo", "monograph.testing", *_OWN_STEPS)
_OF_BLOCKS = "monograph.block"
# what looks for one attribute in the dict of a graph, or says that it is not there
_OF_GRAPHS = frozenset({"monograph.graph", "monograph.internals.registry", "monograph.errors"})
_BY_NAME_OF_GRAPHS = frozenset(
    {"__setattr__", "__delattr__", "__getattr__", "_initialised", "forget_module", "no_attribute"}
)
# modules of the standard library; the last has what later versions of it have
STANDARD = (sys.stdlib_module_names - {"__main__"}) | {"typing_extensions"}
_LIBRARIES = STANDARD | {"torch", "numpy", "monograph"}
_NOT_WATCHED = _LIBRARIES - {"types", "argparse"}


def is_tracing(module: str) -> bool:
    """True for modules that record a step, torch's or ours."""
    return _is_within(module, _TRACERS) and not _is_within(module, _OWN_PARTS)


def is_library(code: CodeType, module: str) -> bool:
    """True for code of torch, numpy and the standard library, whose own globals do not change what a step computes."""
    made = code.co_filename.startswith("<") and not code.co_filename.startswith("<frozen")  # by exec()
    return is_library_module(module) or not (made or is_user_file(code.co_filename))


def is_library_module(module: str | None) -> bool:
    """True for the modules of torch, numpy and the standard library, and for our own."""
    name = str(module)
    return name.partition(".")[0] in _LIBRARIES or _is_within(name, _WITHOUT_OBJECTS)


def _is_within(module: str, packages: tuple[str, ...]) -> bool:
    """True for one of these and what is in them, and not for others that begin alike: a user's `monograph_models`."""
    return module.startswith(packages) and any(f"{module}.".startswith(f"{name}.") for name in packages)


def is_watched(module: str) -> bool:
    """True for modules of users and other packages, whose objects are followed by what is read of them."""
    return module.partition(".")[0] not in _NOT_WATCHED or _is_within(module, _OWN_STEPS)


def reading_frame(frame: FrameType) -> FrameType:
    """The frame whose code asks for an attribute: not that of a block of the graph, which hands on what its module has."""
    while frame.f_globals.get("__name__") == _OF_BLOCKS and frame.f_back is not None:
        frame = frame.f_back
    return frame


def takes_apart(frame: FrameType) -> bool:
    """True for code that gets at all attributes of an object, and not at one whose name it is given."""
    code = frame.f_code
    is_graphs = frame.f_globals.get("__name__") in _OF_GRAPHS and code.co_name in _BY_NAME_OF_GRAPHS
    return not (is_graphs or code in BY_NAME)


def is_standard(module: str) -> bool:
    """True for modules of the standard library."""
    return module.partition(".")[0] in STANDARD
