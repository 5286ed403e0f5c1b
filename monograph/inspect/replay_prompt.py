"""Replay at a prompt: one command a line, as in pdb."""

from __future__ import annotations

import cmd
from typing import IO, Any

import torch

from monograph.errors import MonographError
from monograph.inspect.replay import Replay
from monograph.inspect.summary import summary

_SHOWN = 30  # ops of a listing


class Session(cmd.Cmd):
    """Commands for a Replay."""

    prompt = "(replay) "

    def __init__(
        self,
        replay: Replay,
        stdin: IO[str] | None = None,
        stdout: IO[str] | None = None,
    ) -> None:
        super().__init__(stdin=stdin, stdout=stdout)
        self.use_rawinput = stdin is None
        self.intro = f"{replay!r}\nhelp lists the commands"
        self._replay = replay
        self._watches: list[Any] = []

    # --- going -------------------------------------------------------------------------------------------------------

    def do_step(self, line: str) -> None:
        """step [N]: run the next op, or the next N."""
        self._replay.step(_count(line))
        self._say(str(self._replay))

    def do_back(self, line: str) -> None:
        """back [N]: stand before the op that ran last, or N ops back."""
        self._replay.back(_count(line))
        self._say(str(self._replay))

    def do_to(self, line: str) -> None:
        """to PLACE [PHASE]: go on to a module path, a line (train.py:41) or an op, in a phase (forward, backward, update)."""
        place, _, phase = line.partition(" ")
        self._replay.run_to(place, phase=phase.strip() or None)
        self._say(str(self._replay))

    def do_run(self, _line: str) -> None:
        """run: go to the end of the step."""
        self._replay.run()
        self._say(str(self._replay))

    # --- looking -----------------------------------------------------------------------------------------------------

    def do_list(self, line: str) -> None:
        """list [PATTERN]: the ops, or those whose name or module has the pattern in it."""
        ops = [op for op in self._replay.ops if line in op.name or line in op.where.module]
        for op in ops[:_SHOWN]:
            self._say(str(op))
        if len(ops) > _SHOWN:
            self._say(f"and {len(ops) - _SHOWN} more")

    def do_value(self, line: str) -> None:
        """value NAME: what an op made, what a module returned, a state tensor before the step, an argument."""
        self._show(self._replay.value(line))

    def do_grad(self, line: str) -> None:
        """grad PATH: the gradient of a parameter, or of what a module returned."""
        self._show(self._replay.grad_of(line))

    def do_new(self, line: str) -> None:
        """new PATH: a state tensor after the step."""
        self._show(self._replay.new(line))

    def do_operands(self, _line: str) -> None:
        """operands: what the next op reads."""
        for name, item in self._replay.operands().items():
            self._say(f"{name}: {summary(item)}")

    def do_watch(self, line: str) -> None:
        """watch [PATTERN]: note values that are made from now on, such as *.norm; without a pattern show them."""
        if line:
            self._watches.append(self._replay.watch(line))
            return
        for watch in self._watches:
            self._say(f"{watch.pattern}:\n{watch}")

    def do_nonfinite(self, _line: str) -> None:
        """nonfinite: the first op of the step that makes a NaN or an infinity."""
        self._say(str(self._replay.find_nonfinite()))

    def do_quit(self, _line: str) -> bool:
        """quit: leave."""
        return True

    do_EOF = do_quit  # the name that cmd gives to the end of the input

    def get_names(self) -> list[str]:
        """What `help` lists."""
        return [name for name in super().get_names() if name != "do_EOF"]

    # --- inside ------------------------------------------------------------------------------------------------------

    def onecmd(self, line: str) -> bool:
        """Run a command; a mistake is answered and does not end the session."""
        try:
            return bool(super().onecmd(line))
        except MonographError as error:
            self._say(str(error))
        except ValueError as error:
            self._say(f"{line!r}: {error}")
        return False

    def emptyline(self) -> bool:
        """An empty line does nothing."""
        return False

    def _show(self, item: Any) -> None:
        self._say(str(summary(item)))
        if isinstance(item, torch.Tensor):
            self._say(str(item))

    def _say(self, text: str) -> None:
        self.stdout.write(f"{text}\n")


def _count(line: str) -> int:
    return int(line) if line else 1
