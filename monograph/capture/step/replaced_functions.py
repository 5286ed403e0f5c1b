"""What torch functions do under the trace: they get fakes for real tensors, and give what is known or refuse it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from monograph.capture.accumulation.gradients import MicroGradients
from monograph.capture.effects.python_objects.shared_memory import check_shared_memory, written_so_far
from monograph.capture.guards.sources.code_watch import CodeWatch
from monograph.capture.guards.sources.reach.memory import SharedMemory
from monograph.capture.guards.sources.reach.reach import Reach
from monograph.capture.guards.sources.same_objects import in_lookup
from monograph.capture.numbers.known import READERS
from monograph.capture.numbers.moving import as_numbers, is_moving
from monograph.capture.numbers.overflow import check_room, takes_numbers
from monograph.capture.optimizers.rules import StepRules
from monograph.capture.process.settings import ProcessSettings
from monograph.capture.tensors import functions, recurrent_layers
from monograph.capture.tensors.fakes import Input, Inputs
from monograph.capture.tensors.functional.gradient_sums import ADD, GradientSums
from monograph.capture.tensors.number_arguments import with_plain_ints
from monograph.capture.tensors.readings import UNKNOWN, Readings
from monograph.capture.tensors.sized import answer, asks_for_values
from monograph.capture.tensors.sparse.ops import answer as answer_sparse
from monograph.capture.tensors.sparse.ops import is_about_sparse, makes_sparse
from monograph.compat.modes import FunctionMode, outside_of_modes
from monograph.compat.symbolic_numbers import is_symbolic
from monograph.compat.tensors import DATA_GETTER, EQUALITY, GRADIENT_GETTER, GRADIENT_SETTER, STOPS_GRADIENT
from monograph.compat.traces.nodes import traced_node
from monograph.errors import CaptureError
from monograph.ir.call.signature import Call
from monograph.ir.graph_signature import Argument
from monograph.user_code.lines import Origin, asker, frame_behind, user_place

# of a tensor that a function of torch has made of numbers of Python
_MADE = torch.ops.aten.lift_fresh.default
# between code that asks a tensor for something and `_see`
_PASSING = frozenset(
    function.__code__.co_filename
    for function in (
        torch.Tensor.__repr__,
        torch.overrides.handle_torch_function,
        FunctionMode.__torch_function__,
    )
) | {__file__}


class _About(NamedTuple):
    """What an op has to be looked at for. Ops have slow hashes."""

    op_itself: Any  # so that no id is given twice
    numbers: bool
    sparse: bool
    values: bool

    @classmethod
    def op(cls, func: Any) -> _About:
        return cls(func, takes_numbers(func), makes_sparse(func), asks_for_values(func))


@dataclass(frozen=True)
class OpChoices:
    """Which ops a trace records where there are several for one thing."""

    keeps_layers: bool = True  # recurrent layers that torch unrolls are one op each
    sums_in_place: frozenset[int] = frozenset()  # sums of gradients that are laid out as the first one


class ReplacedFunctions:
    """Looks at every torch function that runs under `mode`, and at every op.

    `call` has the arguments that build() gets, `whole` those of the user's call. `choices` are
    those of an earlier trace.
    """

    def __init__(
        self,
        inputs: Inputs,
        readings: Readings,
        reach: Reach,
        rules: StepRules,
        settings: ProcessSettings,
        watch: CodeWatch,
        micro: MicroGradients | None,
        *,
        call: Call,
        whole: Call,
        choices: OpChoices,
        takes_layers_whole: bool,
    ) -> None:
        self._inputs, self._readings, self._reach = inputs, readings, reach
        self._rules, self._settings, self._watch, self._micro = rules, settings, watch, micro
        self._call, self._whole = call, whole
        self.keeps_layers, self._takes_layers_whole = choices.keeps_layers, takes_layers_whole
        self.sums = GradientSums(choices.sums_in_place)
        self.memory = SharedMemory(reach)
        self.asked_for_offsets = False  # where a tensor begins in its storage
        self.requires_grad_set: dict[int, Origin] = {}  # where, by id of the fake
        self.mode = FunctionMode(self._see, as_numbers)
        self._ops: dict[int, _About] = {}  # by id

    def answer(self, run: Any, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What takes the place of an op that PyTorch has no fake kernel for; UNKNOWN for all others."""
        self._settings.look_at_op()
        if (
            func is ADD
            and (made := self.sums.answer(self._readings.tracer, run, args, kwargs)) is not UNKNOWN
        ):
            return made
        if func is _MADE and (made := self.memory.made(args[0])) is not None:
            return self._inputs.fake(made)
        if (about := self._ops.get(id(func))) is None:
            about = self._ops[id(func)] = _About.op(func)
        if about.numbers:
            check_room(func, args, kwargs)
        if about.sparse or is_about_sparse(args, kwargs):
            return answer_sparse(self._readings, run, func, args, kwargs)
        return answer(self._readings, run, func, args, kwargs) if about.values else UNKNOWN

    def note_written(self) -> None:
        """The code of build() is over: what it has changed up to here it may have read again."""
        if self.memory.is_known:
            self.memory.written = written_so_far(self._readings)

    def check_memory(self) -> None:
        """Raise AliasError for memory that the step changes by ops and reads as numbers of Python, or the other way round."""
        check_shared_memory(self.memory, self._inputs)

    def _see(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Every torch function of build() passes here: real tensors become their fakes.

        Only what runs in the function itself may be code of the step.
        """
        reporting = self._watch.pause()
        try:
            before = args
            args, kwargs = self._inputs.swap_in(args), self._inputs.swap_in(kwargs)
            if func == EQUALITY and args[0] is args[1] and before[0] is not before[1] and in_lookup(_PASSING):
                return True
            if self._inputs.moving.whole:
                args, kwargs = with_plain_ints(func, args), with_plain_ints(func, kwargs)
            self._look_at_call(func, args)
            if func in READERS and (number := self._readings.plain(func, args[0])) is not UNKNOWN:
                return number
            if func in functions.UNGUARDED and (where := asker(_PASSING)).file:
                self._reach.unguarded.setdefault(functions.UNGUARDED[func], where)
            moves = func == torch.Tensor.item and args[0].dtype is not torch.bool
            self._readings.silent = moves or func in functions.CHECKED_BY_PROGRAM
            self._watch.resume(reporting)
            try:
                # called from here: replacements find the caller of a method by the number of frames in between
                is_kept = self.keeps_layers and func in recurrent_layers.LAYERS and self._is_one_op(args)
                replaced = recurrent_layers.call if is_kept else functions.call
                returned = replaced(self._inputs.mode, func, args, kwargs)
            finally:
                self._watch.pause()
            self._settings.check()
            self._readings.silent = False
            self._check_forms(func, args, kwargs)
            return self._look_at_result(func, args, returned)
        finally:
            self._watch.resume(reporting)

    def _is_one_op(self, args: tuple[Any, ...]) -> bool:
        return self._takes_layers_whole or recurrent_layers.sizes_vary(args)

    def _look_at_call(self, func: Any, args: tuple[Any, ...]) -> None:
        if func in STOPS_GRADIENT:
            self.requires_grad_set[id(args[0])] = user_place()
            if func == torch.Tensor.detach_ or False in args[1:]:
                self._check_is_leaf(self._inputs.by_fake.get(id(args[0])))
        if func == GRADIENT_SETTER:
            self._rules.old_gradients.is_set(args[0])
            if args[1] is not None:
                self._rules.gradient_is_set(args[0])
        if func in functions.CHANGES_FORM and id(args[0]) in self._inputs.by_fake:
            raise CaptureError(
                f"build() changes what {self._inputs.by_fake[id(args[0])].path} is by {func.__name__}()",
                hint="work on a view of it; copy_() changes what it holds",
            )
        self.asked_for_offsets |= func == torch.Tensor.storage_offset
        if func in functions.ASK_FOR_INFERENCE and asker(_PASSING).file:
            self._reach.may_ask(torch.is_inference_mode_enabled)

    def _look_at_result(self, func: Any, args: tuple[Any, ...], returned: Any) -> Any:
        if func == torch.Tensor.item and is_symbolic(returned) and not is_moving(returned):
            returned = self._number_of(args[0], returned)
        if func == GRADIENT_GETTER and returned is not None:
            self._rules.gradient_was_read(args[0])
        if func == GRADIENT_GETTER:
            real = self._inputs.real_of(args[0])
            if self._rules.old_gradients.was_read(args[0], returned, frame_behind(_PASSING), real):
                self._inputs.without_gradient.add(id(args[0]))
            self._gradient_of_argument(args[0])
            returned = self._inputs.gradient_of_free(args[0], returned)
        if func == DATA_GETTER and self._micro is not None:
            self._micro.data_was_taken(args[0], returned)
        return returned

    def _check_forms(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise CaptureError if a function has given an argument a form that the caller's tensor cannot get."""
        name, outs = getattr(func, "__name__", "an op"), kwargs.get("out")
        by = " by setting an attribute of it" if name == "__set__" else f" by {name}()"
        for item in (*args[:1], *(outs if isinstance(outs, (tuple, list)) else (outs,))):
            self._inputs.check_form(item, by)

    def _check_is_leaf(self, item: Input | None) -> None:
        """Raise CaptureError for an argument whose gradient goes on outside, where a step cannot stop it."""
        source = None if item is None else item.source
        if item is not None and isinstance(source, Argument) and not self._call.leaves[source.index].is_leaf:
            raise CaptureError(
                f"build() stops the gradient of argument {item.path}, which is no leaf of autograd",
                hint="pass its detach()",
            )

    def _number_of(self, tensor: torch.Tensor, number: Any) -> Any:
        """What `tensor.item()` gives: a number that moves, which Python may keep. Torch's own is `number`."""
        value = self._readings.ask_item(number, tensor)
        carried = getattr(tensor, "real_tensor", None)
        if value is None and carried is not None:
            with outside_of_modes():
                value = carried.item()
        if value is None and (self._micro is not None or traced_node(tensor, self._readings.tracer) is None):
            return number  # of a micro-batch, or inside of a branch
        made = self._inputs.moving.read_out(number, value)
        if self._micro is None and made.node.name not in self._inputs.read_out:
            with torch.no_grad():
                self._inputs.read_out[made.node.name] = tensor.clone()
        return made

    def _gradient_of_argument(self, fake: Any) -> None:
        """A fake has no gradient from before the step; with one, build() would find another than in eager mode."""
        item = self._inputs.by_fake.get(id(fake))
        if item is None or not isinstance(item.source, Argument):
            return
        self._inputs.asked_for_gradient.add(item.source.index)
        leaf = self._whole.leaves[item.source.index]
        if isinstance(leaf, torch.Tensor) and leaf.grad is not None:
            raise CaptureError(
                f"build() asks for the gradient of argument {item.path}, which has one from before the step",
                hint=f"set {item.path}.grad = None before the call",
            )
