"""From whatever went wrong in a trace to an error for the user: what happened, at which line, what to do."""

from __future__ import annotations

from monograph._torch import DATA_DEPENDENT
from monograph.errors import (
    CaptureError,
    DataDependentError,
    MonographError,
    is_user_file,
    user_place,
    user_place_of,
)

_MEMORY_READ = "its data is not allocated yet"  # what torch says where its C++ reads a tensor by itself


def first_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def translated(error: Exception) -> Exception:
    """The error for the user: what happened at which of their lines, and what to do."""
    place = user_place_of(error)
    if not place.file:  # build() itself is not the user's: of mg.train_graph, for example
        place = user_place()
    if isinstance(error, MonographError):
        if error.where is None and place.file:
            error.where = place
        return error
    if type(error).__name__ in DATA_DEPENDENT or _MEMORY_READ in str(error):
        return DataDependentError(
            "Python asked for the value of a tensor while the step was being captured",
            where=place,
            hint="use torch.where or torch.cond, a padded form instead of boolean-mask indexing, "
            "or return it and look at it outside of build()",
        )
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is not None and is_user_file(traceback.tb_frame.f_code.co_filename):
        return error  # raised by the user's own code: theirs to see as it is
    return CaptureError(
        f"capture failed: {first_line(error)}",
        where=place,
        hint="graph.eager(...) runs the same step without a capture: if it fails there too, the step is at fault",
    )
