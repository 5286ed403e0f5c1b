"""A recorded step, with everything outside of it put back as it was."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx, nn

from monograph.capture.effects.attribute_values import PutAgain
from monograph.capture.effects.foreign_objects import check_micro_batches_alike
from monograph.capture.effects.held_fakes import holds_numbers_alone, not_repeatable
from monograph.capture.effects.python_objects.only_added import other_uses
from monograph.capture.guards.sources.places import Content
from monograph.capture.optimizers.autocast import about_kept_casts
from monograph.capture.optimizers.on_parts import about_whole
from monograph.capture.retraces import Retraces, not_carried
from monograph.capture.step.generators import KnownGenerators
from monograph.capture.step.notes import check_strict, notes_of
from monograph.capture.step.request import Request
from monograph.capture.step.traced_step import TracedStep
from monograph.distributed.names import about_lonely
from monograph.errors import CaptureError
from monograph.ir.graph_signature import Write
from monograph.state.signals import interruptible
from monograph.state.snapshot import Snapshot
from monograph.user_code.files import is_user_file
from monograph.user_code.lines import Origin

AttributeValue: TypeAlias = tuple[Any, Any, Any]  # the dict or container, the name or key, and the value


@dataclass(frozen=True)
class LeftInAttributes:
    """What a step leaves in attributes of the objects that it knows, besides the state of modules."""

    plain: list[AttributeValue]  # set at the capture, for good
    moving: list[Write]  # at each step another number
    made: list[Write]  # at the first step, or each time something else: no replay does it again
    put_again: PutAgain


@dataclass(frozen=True)
class Traced:
    """A recorded step, with everything outside put back as it was."""

    step: TracedStep
    recorded: fx.GraphModule
    left: LeftInAttributes
    once: Sequence[str]  # what no replay does again
    notes: Sequence[str]
    why_plain: str  # why numbers in Python objects that have changed are constants
    moved: Sequence[str]  # the generators of Python and NumPy that it draws from


def trace_step(
    request: Request,
    modules: Mapping[str, nn.Module],
    snapshot: Snapshot,
    generators: KnownGenerators,
    *,
    with_values: bool,
) -> Traced:
    """Trace the step, and put back what it has changed."""
    snapshot.random.touched = with_values
    moved: list[str] = []
    with interruptible() as hold:
        try:
            recording = Retraces(request, modules, snapshot, with_values=with_values).record()
            step = recording.step
            left = _left_in_attributes(step)
            numbers = {path for path, live, _ in snapshot.containers if holds_numbers_alone(live)}
            deques = {path for path, live, _ in snapshot.containers if isinstance(live, deque)}
            moved = [name for name in snapshot.random.moved() if not (with_values and name == "torch")]
            hold.on = True
        except BaseException:
            hold.on = True  # an interrupt in the middle of what follows would leave fakes in the modules
            raise
        finally:
            changed = snapshot.roll_back()
            moved += ["a generator"] if generators.restore() and not with_values else []
    if "torch" in moved or "a generator" in moved:
        raise CaptureError(
            "build() reseeds a random generator of torch, or draws from it outside of tensor ops",
            hint="seed before the step, not in build()",
        )
    in_parts = request.settings.accumulation_steps > 1
    if changed := [*not_carried(step, changed), *step.effects.held]:
        of_numbers = changed[0] in numbers | step.effects.numbers
        label, used_at = _changed_list(step, snapshot, changed[0]) if of_numbers else (changed[0], None)
        raise not_repeatable(
            label,
            step.reach.line_of(label) or used_at,
            of_numbers=of_numbers,
            in_parts=in_parts,
            is_deque=changed[0] in deques | step.effects.deques,
            used_at=used_at,
        )
    if in_parts:
        check_micro_batches_alike(step.effects, [name for name in moved if name != "torch"])
    check_strict(step)
    notes = notes_of(step, moved, why_still=recording.why_still)
    if not request.settings.stages:
        notes += about_lonely(recording.graph.graph, request.owned, step.replicas, step.averaged.ran)
    notes += about_whole(request.owned)
    notes += about_kept_casts(request.owned) if request.is_first else []
    once = [*step.effects.once, *(write.about for write in left.made), *step.optimizers.asked_early()]
    return Traced(step, recording.graph, left, once, notes, recording.why_plain, moved)


def _changed_list(step: TracedStep, snapshot: Snapshot, label: str) -> tuple[str, Origin | None]:
    """What a user calls a container that a step has changed; if it is a list, or has one, the line that does more than to add."""
    live = next((live for path, live, _ in snapshot.containers if path == label), None)
    contents = [source for source in step.reach.sources if isinstance(source, Content)]
    found = next((s for s in contents if s.content is live or (live is None and s.label == label)), None)
    if found is None:
        return label, None
    inside = {id(item) for item in found.content.values()} if isinstance(found.content, dict) else ()
    for source in (found, *(source for source in contents if id(source.content) in inside)):
        uses = other_uses(source.content, step.reach, step.reads) if type(source.content) is list else ()
        for use in uses:
            if use is not None and is_user_file(use.file):
                return source.label, use
    return found.label, None


def _left_in_attributes(step: TracedStep) -> LeftInAttributes:
    values, reads = step.side_effects.values, step.reads
    plain = values.kept(reads)
    moving = values.moving(reads) + step.objects.writes
    made = values.made_lazily(reads) + values.exchanged(reads)
    put_again = values.put_again(reads, moving)
    values.check_put(reads, in_parts=step.request.settings.accumulation_steps > 1)
    return LeftInAttributes(plain, moving, made, put_again)
