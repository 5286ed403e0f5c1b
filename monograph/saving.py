"""The state of a Graph: read, loaded, added to, and the proof that it is all that training goes on from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from monograph.definition import Definition
from monograph.errors import DefinitionError
from monograph.mistakes import left_schedulers
from monograph.resume.factory import Factory
from monograph.resume.proof import ResumeReport, prove_resume
from monograph.state_dict.loading import LeftOut, Part, Stateful, load_parts, read_parts
from monograph.state_dict.parts import Contents, graph_parts


class Saving(Definition):
    """The part of a Graph that is saved and resumed."""

    def state_dict(self, *, python_random: bool = False) -> dict[str, Any]:
        """Everything that decides how training goes on, as one dict; its tensors are the live ones.

        Modules are under the names of their attributes, in torch's format; `optimizer.0` and `scheduler.0` are in
        torch's format too; then come what was registered, the number of steps and the state of torch's random
        generators. `python_random=True` adds those of Python and NumPy.
        """
        return self._state(python_random=python_random)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LeftOut:
        """Take over a state, at any time: all of it, or nothing if something does not fit.

        Live tensors are changed in place, so that builds stay. With `strict=True` every missing and unexpected entry
        is an error; with `strict=False` what is there is loaded by its name. Gives `missing_keys` and
        `unexpected_keys`, as `nn.Module` does. Raises CheckpointError.
        """
        return self._load_state(state_dict, strict=strict)

    def register_state(self, name: str, obj: Stateful) -> None:
        """Make an object with `state_dict` and `load_state_dict` part of the graph's state, such as a data loader."""
        self._check_initialised("register_state()")
        lacking = [
            what for what in ("state_dict", "load_state_dict") if not callable(getattr(obj, what, None))
        ]
        if not isinstance(name, str) or not name or name in self._registered or lacking:
            problem = (
                f"a {type(obj).__name__} has no {lacking[0]}()"
                if lacking
                else f"{name!r} is registered already"
                if name in self._registered
                else f"{name!r} is no name"
            )
            raise DefinitionError(
                f"register_state(): {problem}",
                hint="pass a name of its own, and an object with state_dict() and load_state_dict(); of data loaders "
                "torchdata.stateful_dataloader.StatefulDataLoader has them",
            )
        self.__dict__["_registered"] = {**self._registered, name: obj}

    def prove_resume(
        self, factory: str | Factory, *, steps: int = 3, more: int = 3, python_random: bool = False
    ) -> ResumeReport:
        """Prove that training from a checkpoint gives the bits of training without a break.

        `factory` is a function of a module, or its name "module:function" or "file.py:function". It returns a graph
        like this one and its batches, the same on each call: a tuple has the arguments of a step, a dict those with
        names. From the present state one new process trains `steps`, saves and trains `more`; another loads that and
        trains `more`. This graph is not touched.
        """
        start = self.state_dict(python_random=python_random)
        return prove_resume(factory, start=start, steps=steps, more=more, python_random=python_random)

    def _state(self, *, python_random: bool = False) -> dict[str, Any]:
        self._check_whole()
        with self._store.lock:
            return read_parts(self._parts(python_random=python_random))

    def _load_state(self, state_dict: Mapping[str, Any], *, strict: bool) -> LeftOut:
        with self._store.lock:
            left_out = load_parts(self._parts(), state_dict, strict=strict)
            left_schedulers(self._optimizers)
            if not left_out.missing_keys:
                self._store.torn = ""
            return left_out

    def _parts(self, *, python_random: bool = False) -> dict[str, Part]:
        self._check_not_swapped("saves or loads its state")
        contents = Contents(
            name=type(self).__name__,
            settings=self._config.settings,
            owned=self._owned(),
            store=self._store,
            declared=self._first_state,
            builds=tuple(self._cache.all),
            registered=self._registered,
            known_tensors=self._known_tensors,
            python_random=python_random,
        )
        return graph_parts(contents)
