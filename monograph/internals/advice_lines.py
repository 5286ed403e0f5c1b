"""What to write against builds, by their cause: a line for each."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from typing import Final, TypeAlias

from monograph.capture.optimizers.writes import STEP_SCHEDULER
from monograph.compat.optimizers import LAST_RATES, SCHEDULERS_INSIDE, STEP_COUNT, WITHIN_STEP
from monograph.ir.call.modes import GRADIENTS_THERE
from monograph.ir.call.reason import OF_GROUP, Cause, Reason
from monograph.user_code.files import is_installed_file

ALL_FURTHER: Final = "one build serves all further values of {place}: nothing to do"
_NEEDS: Final = (
    "needs the number itself, as a size, an index, a key, a range, print(), a text, torch.tensor([...]) and the rate of a dropout do; "
    "for one build, use a fixed size and a mask, or a size of a tensor, such as x.shape[0]; give torch.tensor([...]) as an "
    "argument; for a slice that begins there write x[n + torch.arange(k)] = rows; arithmetic alone has one build for all values"
)
_NEEDS_FLOAT: Final = (
    "needs the number itself, as float(), NumPy's functions, print(), the rate of a dropout, the momentum of a norm and "
    "torch.tensor([...]) do: few values need nothing; print after the call what you return, leave float() out, write math.exp(n) "
    "for np.exp(n), give torch.tensor([...]) as an argument"
)
_ABOUT_FUNCTION: Final = (
    "needs the number itself, which {function}() takes as a constant: few values need nothing; {instead}"
)
_ANSWER: Final = "each answer of {place} has a build, and all stay: what is set once, before the first call, costs no further one"
_NO_NUMBERS: Final = (" to nan", " to inf", " to -inf")
_BY_OPS: Final = "a number n that only ops compute with, as x * n and torch.where(x < n, a, b), has one build for all values"
_OF_HUBER: Final = "d = (x - y).abs() and"
_DROPOUT: Final = "x * (torch.rand_like(x) >= n) / (1 - n)"
_INSTEAD: Final = {  # what is the same and has one build for all values of a number n, by the function that takes it
    "cross_entropy": "(1 - n) * F.cross_entropy(x, y) - n * F.log_softmax(x, 1).mean(), with x the logits and y the target, which is "
    "the same where there are no class weights, no ignored labels (ignore_index) and reduction is the mean",
    "dropout": _DROPOUT,
    "dropout1d": "x * (torch.rand(*x.shape[:2], 1) >= n) / (1 - n)",
    "dropout2d": "x * (torch.rand(*x.shape[:2], 1, 1) >= n) / (1 - n)",
    "dropout3d": "x * (torch.rand(*x.shape[:2], 1, 1, 1) >= n) / (1 - n)",
    "scaled_dot_product_attention": "F.scaled_dot_product_attention(n * q, k, v, scale=1.0)",
    "huber_loss": f"{_OF_HUBER} torch.where(d < n, 0.5 * d * d, n * (d - 0.5 * n)).mean()",
    "smooth_l1_loss": f"{_OF_HUBER} torch.where(d < n, 0.5 * d * d / n, d - 0.5 * n).mean()",
    "margin_ranking_loss": "(n - y * (a - b)).clamp(min=0).mean()",
    "triplet_margin_loss": "F.triplet_margin_with_distance_loss(a, p, q, margin=n)",
    "normal": "n * torch.randn(shape)",
    "normal_": "n * torch.randn(shape)",
    "uniform_": "n * torch.rand(shape)",
    "bernoulli": "torch.rand_like(x) < n",
}
# in _NEEDS_FLOAT
_SAID_BY_ALL: Final = frozenset({"tensor", "as_tensor", "scalar_tensor", "full", "batch_norm"})
_OF_FLOATS: Final = re.compile(r" changed from -?[\d.e+-]*[.e][\d.e+-]* to ")
_OF_PARTS: Final = re.compile(
    r"\bhas (?:a new|no) (?:module|parameter|buffer)\b|^the module \S+ is new| changed from absent to a tensor"
)
_OF_KEYS: Final = re.compile(r"(\S+) has (?:a new|no) key ")
_OF_LENGTH: Final = re.compile(
    r"the length of (\S+) changed|(\S+) has (?:a new|no) element |(\S+) changed from \(\) to a tuple"
)
_OF_OBJECTS: Final = re.compile(r" changed from (?:<\w+\.\w+: |\(|datetime\.)")  # of the constants among them
_CONSTANT: Final = (
    "each value of {place} has a build, and all stay: few values need nothing; what changes at each step can be a float or a "
    "tensor among the arguments"
)
_LENGTH: Final = (
    "each length of {place} has a build: what build() only appends costs none where it writes self.items.append(new) itself "
    "and gives the list to no function; or return it, and append it after the call; the last n "
    "fit into one tensor of a fixed size, as last = torch.zeros(n, *new.shape): last.copy_(torch.cat([last[1:], new.detach()[None]])); "
    "leave out the rows that are not filled yet, by a tensor that counts"
)
_EMPTIED: Final = "a new list has a build, and {place}.clear() has none where build() only appends to it: write that for {place} = []"
_GROWS: Final = (
    "; one that grows can have its last size from the beginning, and hold the last n rows: "
    "{place}.copy_(torch.cat([{place}, new])[-n:])"
)
_OF_METRICS: Final = re.compile(r"(\S+)\.(_forward_cache|_computed) changed from None ")
_METRICS: Final = {  # of torchmetrics, by the attribute that keeps a value
    "_forward_cache": "the call of {place} keeps the value of the batch, which a reset takes away: in build() {place}.update(pred, y) has one "
    "build, and {place}.compute() belongs after the step",
    "_computed": "{place}.compute() keeps what it gives, until the next update: call it after the step",
}
_OF_CONTENT: Final = re.compile(r"the (?:content of|values in) (\S+) changed")
_CONTENT: Final = (
    "each content of {place} has a build: read it before the call, and pass what it gives as an argument"
)
_NOW_AND_THEN: Final = (
    "what is done now and then, such as target.load_state_dict(...), can have two builds, by an argument that is True or False, "
    "or be done between two calls"
)
_DRAWN: Final = (
    "draw a number of random or numpy before the call and pass it as an argument, or draw by torch.rand(()) in the step; "
    "so with a batch that random.sample() draws; in place of a branch on it multiply, x + (torch.rand(()) >= p) * f(x)"
)
_SAMPLED: Final = (
    "where build() draws from {place}, as by random.sample(): draw before the call, and pass the batch as an argument, as in "
    "graph(torch.stack(random.sample(buffer, n))); then {place} costs no build, however long it is"
)
_PYTHONS_NUMBERS: Final = re.compile(r"(?:numpy\.)?random\b")
_FUNCTIONS_THAT_SAMPLE: Final = re.compile(  # of numpy's all, which have one label
    r"the content of (?:numpy\.random\b|random\.(?:sample|choices?|shuffle|randrange|randint) )"
)

_BY_PLACE: Final = (  # causes of builds for what users write: each argument, attribute and branch is another thing
    Cause.FORM,
    Cause.NUMBER_GIVEN,
    Cause.CONSTANT_GIVEN,
    Cause.NUMBER,
    Cause.VALUE,
    Cause.FIXED,
    Cause.READ,
    Cause.BRANCH,
    Cause.ONCE,
)
_SIDE: Final = re.compile(r"^not | (?:[<>]=?|[!=]=) ")  # of a branch: what tells it from the other side
_INDEX: Final = re.compile(r"\[-?\d+\]")
_OF_SCHEDULER: Final = re.compile(  # what its step() changes, alone if nothing else does
    rf"(\S+?)(?:\.{SCHEDULERS_INSIDE}\[\d+\])?\.{WITHIN_STEP} changed |"
    rf"build\(\) changes (\S+\.\S+?)\.(?:{LAST_RATES}|{STEP_COUNT}|last_epoch), which"
)
_LINE_READ: Final = re.compile(r".*?:\d+(?= )")  # without what was read there
Thing: TypeAlias = tuple[Cause, str]  # what builds are made for: a cause, and what it is about


def thing_of(reason: Reason) -> Thing:
    """What a build is for, without the value that it has now: elements of one list are one thing, and sides of one branch."""
    if scheduler := _scheduler_of(reason):
        return Cause.ONCE, scheduler
    if reason.cause not in _BY_PLACE:
        return reason.cause, ""
    if reason.cause is Cause.BRANCH:
        return reason.cause, _SIDE.sub(" ", reason.place).strip()
    if reason.cause is Cause.READ:
        line = _LINE_READ.match(reason.place)
        return reason.cause, line[0] if line is not None else ""
    if reason.cause is Cause.VALUE:
        for pattern in (_OF_KEYS, _OF_CONTENT, _OF_LENGTH):
            if found := pattern.match(reason):
                return reason.cause, next(filter(None, found.groups()))
    return reason.cause, _INDEX.sub("", reason.place)


def about_scheduler(reason: Reason) -> str:
    """What to write where build() steps a scheduler; empty if it does not."""
    scheduler = _scheduler_of(reason)
    return (
        f"build() steps {scheduler}, and has a build for each step of it: {STEP_SCHEDULER}"
        if scheduler
        else ""
    )


def _scheduler_of(reason: Reason) -> str:
    found = next(filter(None, map(_OF_SCHEDULER.match, (reason, *reason.others))), None)
    return "" if found is None else found[1] or found[2]


def _about_form(reason: Reason) -> str:
    if not reason.place:
        return "pass tensors that share no memory and begin where it begins: x.clone()"
    line = _OF_FORMS.get(reason.what, "tensors of one kind")
    return f"each form has a build: pass {line.format(place=reason.place)}"


def about_numbers(reason: Reason) -> str:
    return f"{ALL_FURTHER.format(place=reason.place)}; a float argument has it from the first call on"


def about_answer(reason: Reason) -> str:
    """What to write where a function answers another number; empty if the number is in an object."""
    return _ANSWER.format(place=reason.place) if reason.place.endswith("()") else ""


def _about_fixed(reason: Reason) -> str:
    return (
        about_answer(reason) or f"each value of {reason.place} has a build: code of the step {needs(reason)}"
    )


def needs(reason: Reason, function: str = "") -> str:
    """What the number is needed for, and what to write instead; `function` is that of torch which takes it, if it is known."""
    if not _OF_FLOATS.search(reason):
        return _NEEDS
    if not function.isidentifier() or function.startswith("__") or function in _SAID_BY_ALL:
        return _NEEDS_FLOAT
    known = _INSTEAD.get(function)
    instead = _BY_OPS if known is None else f"for one build with a number n write {known}"
    return _ABOUT_FUNCTION.format(function=function, instead=instead)


def _about_values(reason: Reason) -> str:
    if _OF_PARTS.search(reason):
        return (
            "the model has other parts, which costs one build: change parts before the first call, or seldom"
        )
    is_of_list = _OF_LENGTH.match(reason) or _INDEX.search(reason.place)
    if is_of_list and any(map(_FUNCTIONS_THAT_SAMPLE.match, reason.others)):
        return _SAMPLED.format(place=_INDEX.split(reason.place)[0])
    if found := _OF_KEYS.match(reason):
        return (
            f"each set of keys of {found[1]} has a build: keep its keys, and change the values; what build() only adds can be "
            "returned, and stored after the call"
        )
    if found := _OF_CONTENT.match(reason):
        about = _DRAWN if _PYTHONS_NUMBERS.match(found[1]) else _CONTENT
        return about.format(place=found[1])
    if found := _OF_LENGTH.match(reason):
        return (_EMPTIED if reason.endswith(" to 0") else _LENGTH).format(
            place=found[1] or found[2] or found[3]
        )
    if found := _OF_METRICS.match(reason):
        return _METRICS[found[2]].format(place=found[1])
    if " changed from absent to " in reason:
        if _is_of_library(reason.place):
            return (
                f"a library makes {reason.place} at its first use: this costs one build, and nothing is to do"
            )
        return (
            f"{reason.place} was not there before: give it a value before the first call, as in __init__(), and there is no "
            "such build"
        )
    if reason.what == "object" and _OF_OBJECTS.search(reason):
        return _CONSTANT.format(place=reason.place)
    grows = _GROWS if reason.what == "tensor" and reason.startswith("shape of ") else ""
    return (_OF_VALUES.get(reason.what, _OF_VALUES["object"]) + grows).format(place=reason.place)


def _is_of_library(place: str) -> bool:
    module = sys.modules.get(place.partition(".")[0])
    return is_installed_file(str(getattr(module, "__file__", "")))


def _about_hyperparameters(reason: Reason) -> str:
    if reason.what == "fixed":
        return _about_fixed(reason)
    if reason.what == "branch":
        return "each side has a build, and both stay; on one side numbers move without a build"
    found = OF_GROUP.search(f"{reason.place} {reason}")
    place = (
        f'optimizer.param_groups[{found[2]}]["{found[3]}"]' if found else "what the optimizer is made with"
    )
    if is_not_finite(reason):
        return f"{place} is no finite number: look at what sets it, such as a scheduler; finite floats move without a build"
    return f"set {place} before the first call, and keep its type: floats move without a build"


def is_not_finite(reason: Reason) -> bool:
    """True if a number of an optimizer has become a NaN or an infinity."""
    return reason.cause is Cause.HYPERPARAMETER and reason.endswith(_NO_NUMBERS)


def _about_mode(reason: Reason) -> str:
    in_blocks = reason.place.startswith(("grad mode", "autocast"))
    once = (
        "enter `with torch.no_grad():` and the like in build()"
        if in_blocks
        else f"set what {reason.place} is before the first call, and leave it"
    )
    return f"each mode has a build, and both stay; for one build, {once}"


def _about_structure(reason: Reason) -> str:
    """Gradients are there or not, as in accumulation: nobody has to write anything against that."""
    if reason.place == GRADIENTS_THERE:
        return ""
    return "each choice of arguments has a build, and it stays: nothing to do, if there are few"


def _about_state_form(reason: Reason) -> str:
    if str(reason).startswith("requires_grad of"):
        return "each choice of what trains has a build, and it stays: nothing to do, if there are few"
    if "shape of " in str(reason):
        return "each shape there has a build: keep one, or return the tensor from build(), and store it after the call"
    return "set dtype, device and strides of parameters and buffers before the first call"


def _always(text: str) -> Callable[[Reason], str]:
    return lambda reason: text.format(place=reason.place)


def _about_branch(reason: Reason) -> str:
    """Of a branch, which is torch's own where build() has none on that size."""
    on_size = ".size(" in reason.place
    torchs = "torch has some of its own, as in convolutions, and for one of yours " if on_size else ""
    values = f"{torchs}torch.where(condition, a, b) has one for both, where it chooses between values"
    return f"each way of a branch has a build, and both stay; {values}; {_NOW_AND_THEN}"


_OF_FORMS: Final = {  # what to pass in the place of an argument, by the field of its key that differs
    "shape": "{place} with one number of dimensions",
    "stride": "{place}.contiguous()",
    "dtype": "{place}.to(dtype)",
    "device": "{place}.to(device)",
    "requires_grad": "{place}.detach(), unless its gradient is asked for",
    "hooks": "{place} without hooks of its own",
    "unresolved": "{place}.resolve_conj().resolve_neg()",
    "attributes": "{place} without attributes of its own",
}
_OF_VALUES: Final = {  # what to write in the place of a value, by its kind
    "number": "each value of {place} has a build: what changes from step to step can be a tensor or a float argument",
    "bool": "each value of {place} has a build, and both stay; for one build pass a tensor, by which torch.where(it, a, b) chooses "
    f"between values; {_NOW_AND_THEN}",
    "text": "each value of {place} has a build, and all stay: few texts need nothing; keep a text that is another one at each "
    "step, such as the name of a file, out of the step",
    "function": "each function has a build: make that in {place} once, since a lambda or a partial that is made anew is another "
    "one each time",
    "None": "there is a build with {place} and one without it, and both stay; for one build, give it a value from the first step on",
    "option": "each value of {place} has a build, and all stay",
    "kinds": "each kind of value in {place} has a build: let it be of one kind, such as a tensor or a float",
    "tensor": "write into the tensor in {place}, as {place}.copy_(new) does; one that has another shape at each step can be an "
    "argument",
    "object": "each object in {place} has a build: make it once and keep it there, since one that is made anew at each step has "
    "a build each time; change its tensors, and the numbers that the step only computes with; give numbers for torch.tensor([...]) as an argument, a tensor made outside of build()",
}
LINES: Final[Mapping[Cause, Callable[[Reason], str]]] = {
    Cause.FORM: _about_form,
    Cause.NUMBER_GIVEN: _always(f"each value of {{place}} has a build: code of the step {_NEEDS}"),
    Cause.CONSTANT_GIVEN: _about_values,
    Cause.STRUCTURE: _about_structure,
    Cause.IDENTITY: _always("pass x.clone() where two arguments, or an argument and state, are to be apart"),
    Cause.NUMBER: about_numbers,
    Cause.VALUE: _about_values,
    Cause.HYPERPARAMETER: _about_hyperparameters,
    Cause.TRAINING: _always(
        "each mode has a build, and both stay: going back and forth makes no further one"
    ),
    Cause.TORCH_MODE: _about_mode,
    Cause.SETTING: _always("set graph.config before the first call"),
    Cause.MEMBER: _always("set modules and add optimizers in __init__, or before the first call"),
    Cause.STATE: _always(
        "write into the tensor that is there: parameter.data.copy_(new), load_state_dict(...)"
    ),
    Cause.OPTIMIZER: _always(
        "the optimizer has other state or other groups, which costs one build: nothing to do, unless it changes often"
    ),
    Cause.STATE_FORM: _about_state_form,
    Cause.HOOK: _always("register hooks once, before the first call, and leave them there"),
    Cause.READ: _always(
        "what differs at each step can stay a tensor: torch.where(condition, a, b) for a branch, a fixed size and a mask for "
        "a size, x[index.view(1)] for an index, x.index_copy_(dim, indices, new) to write there; "
        f"{_NOW_AND_THEN}"
    ),
    Cause.BRANCH: _about_branch,
    Cause.FIXED: _about_fixed,
    Cause.ONCE: _always("move what changes {place} out of build()"),
    Cause.ROOM: _always(
        'config.max_builds(n, keep="recent") with a larger n keeps all builds that are in use'
    ),
}
