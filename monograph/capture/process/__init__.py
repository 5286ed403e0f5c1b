"""What surrounds a trace in the process: signals, other threads, settings of torch, hooks.

In: nothing. Out: context managers around a capture. Imports `state`.
"""
