"""The parts of `align`: a case, its calls in eager mode and as a graph, their records compared, and the report of a failure.

In: a function or module with arguments. Out: nothing, or an AlignmentError with a script that fails on its own.
"""
