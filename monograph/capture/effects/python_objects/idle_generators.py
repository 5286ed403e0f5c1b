"""Random generators of Python and NumPy that a step can get at and leaves alone: their states need no guard.

Each number that is drawn moves the state. So if the trace has left it as it was, no replay draws; unless code has looked at
the state, or set it to what it was. That takes functions with names of their own: those of `random.Random` are written in
Python, and are seen as they run. Those of NumPy are not, so that no code that ran may spell their names or know them.
"""

from __future__ import annotations

import random
from collections.abc import Container, Sequence
from types import (
    BuiltinFunctionType,
    CodeType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)

from monograph.capture.effects.foreign_objects import Effects
from monograph.capture.guards.objects import differences
from monograph.capture.guards.sources.attributes import isinstance_of
from monograph.capture.guards.sources.code_names import names_of
from monograph.capture.guards.sources.hidden import Probe
from monograph.capture.guards.sources.places import Source
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.user_code.files import is_inside

_OF_PYTHON = (random.Random.getstate, random.Random.setstate, random.Random.seed)
# what finds the functions of C that those call
_BEHIND = frozenset({"super", "_random", "__mro__", "mro", "__base__", "__bases__"})
_COPYING = frozenset(
    {
        "__init__", "__getstate__", "__setstate__", "__reduce__", "__reduce_ex__", "copy", "deepcopy", "__copy__",
        "__deepcopy__", "dump", "dumps", "save",
    }
)  # fmt: skip
# what reads or sets the state of one of NumPy's generators, or gives away what has it
_OF_NUMPY = frozenset(
    {
        "get_state", "set_state", "seed", "_legacy_seeding", "bit_generator", "_bit_generator", "get_bit_generator",
        "set_bit_generator", "spawn", "seed_seq", "_seed_seq", "jumped", "advance", "mtrand",
    }
)  # fmt: skip
_KINDS_OF_NUMPY = frozenset({"Generator", "RandomState", "BitGenerator"})
_WRITTEN_IN_C = (BuiltinFunctionType, MethodDescriptorType, MethodWrapperType, WrapperDescriptorType)
_BY_CYTHON = "cython_function_or_method"


def without_idle_generators(
    sources: Sequence[Source], reach: Reach, effects: Effects, moved: Sequence[str]
) -> list[Source]:
    """The sources without generators that the step has left alone. `moved` are those that the trace has moved."""
    probes = [source for source in sources if isinstance(source, Probe)]
    generators = [probe for probe in probes if _is_python(probe) or _is_numpy(probe)]
    changed = {id(effect.source) for effect in effects.found}
    still = [
        probe for probe in generators if id(probe) not in changed and next(differences(probe), None) is None
    ]
    if moved or effects.lost or not still:
        return list(sources)
    idle = set[int]()
    if _python_is_idle(reach):
        idle |= {id(probe) for probe in still if _is_python(probe)}
    if _numpy_is_idle(reach):
        held = {id(value) for source in sources for value in source.recorded.values()}
        idle |= {id(probe) for probe in still if _is_numpy(probe) and not _is_held_bits(probe, held)}
    return [source for source in sources if id(source) not in idle]


def _is_python(probe: Probe) -> bool:
    owner = probe.owner
    return isinstance_of(owner, random.Random) and not isinstance_of(owner, random.SystemRandom)


def _is_numpy(probe: Probe) -> bool:
    classes = type(probe.owner).__mro__
    return any(
        cls.__module__.startswith("numpy.random") and cls.__name__ in _KINDS_OF_NUMPY for cls in classes
    )


def _is_held_bits(probe: Probe, held: Container[int]) -> bool:
    """True for the bits of a generator that code has by themselves: it may ask for their `state`."""
    return (
        any(cls.__name__ == "BitGenerator" for cls in type(probe.owner).__mro__) and id(probe.owner) in held
    )


def _python_is_idle(reach: Reach) -> bool:
    """True if no code that ran can have read or set the state of a `random.Random`."""
    looking = {id(function.__code__) for function in _OF_PYTHON}
    names = frozenset(function.__name__ for function in _OF_PYTHON)
    made_up = reach.looks_by_names or not reach.made_up.isdisjoint(names)
    behind = [code for code in map(_spelled, reach.own_codes()) if not code.isdisjoint(_BEHIND)]
    return (
        looking.isdisjoint(map(id, reach.codes()))
        and not (behind and made_up)
        and all(code.isdisjoint(names) for code in behind)
        and not _knows_function_of_c(reach, names)
    )


def _numpy_is_idle(reach: Reach) -> bool:
    """The same of NumPy's generators."""
    own = reach.own_codes()
    others = (code for code in reach.codes() if not is_inside(code.co_filename))
    return (
        not reach.looks_by_names
        and reach.made_up.isdisjoint(_OF_NUMPY | _COPYING)
        and all(_spelled(code).isdisjoint(_OF_NUMPY | _COPYING) for code in own)
        and all(_spelled(code).isdisjoint(_OF_NUMPY) for code in others)
        and not _knows_function_of_c(reach, _OF_NUMPY)
    )


def _spelled(code: CodeType) -> frozenset[str]:
    names = names_of(code)
    return names.attributes | names.globals | names.stored | names.imports


def _knows_function_of_c(reach: Reach, names: Container[str]) -> bool:
    """True if code knows a function of one of these names, which it may call by another."""
    return any(
        (type(item) in _WRITTEN_IN_C or type(item).__name__ == _BY_CYTHON) and item.__name__ in names
        for item in reach.known()
    )
