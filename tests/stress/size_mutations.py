"""Faults in what lets sizes vary."""

from __future__ import annotations

from tests.stress.mutations import Mutation

SIZES: tuple[Mutation, ...] = (
    Mutation("sizes", "return found.pop() if len(found) == 1 else None", "return found.pop() if found else None", ("sizes",), file="sizes/expression"),
    Mutation("sizes", "return isinstance(other, Size) and self.expression == other.expression", "return isinstance(other, Size) and int(self) == int(other)", ("sizes",)),
    Mutation("sizes", "        return hash(self.expression)\n", "        return hash(int(self))\n", ("sizes",)),
    Mutation("sizes", "inner.dividend // (inner.divisor * divisor)", "inner.dividend // inner.divisor", ("sizes",)),
    Mutation("compat", "asked = isinstance(error, NumbersAsked) and mode.has_formula", "asked = False", ("capture/numbers/test_uses_of_sizes.py",), is_new=True),
    Mutation("compat", "return op(tensor, sizes, *flags, *(factors or [None] * len(sizes)))", "return op(tensor, sizes, *flags, *([None] * len(sizes)))", ("capture/numbers/test_uses_of_sizes.py",), is_new=True),
    Mutation("capture/numbers", "return (size, above, below) if above.bit_length() <= _EXACT else None", "return size, above, below", ("capture/numbers/test_uses_of_sizes.py",), is_new=True),
    Mutation("compat", "isinstance(item, theirs) and id(item.fake_mode) not in _RUNNING", "isinstance(item, theirs)", ("capture/process/test_hidden_fakes.py",), is_new=True),
    Mutation("capture/tensors", "return left.mul_(update).add_(new)", "return left.mul_(reset).add_(new)", ("capture/numbers/test_uses_of_sizes.py",), is_new=True),
    Mutation("capture/tensors", "    if not any(is_moving(size) for item in tensors for size in item.shape):\n        return False\n", "    if True:\n        return False\n", ("capture/numbers/test_uses_of_sizes.py",), is_new=True),
    Mutation("capture/tensors", "apart = apart or bool(ends[0] <= begins[1]) or bool(ends[1] <= begins[0])", "apart = True", ("capture/numbers/test_uses_of_sizes.py",), is_new=True),
    Mutation("capture", "    noted.note_later(sizes)\n", "", ("capture/numbers/test_uses_of_sizes.py",), is_new=True),
)  # fmt: skip
