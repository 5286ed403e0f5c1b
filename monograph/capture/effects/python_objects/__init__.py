"""What each step does again to objects of Python: it counts numbers, adds to lists and dicts, stores tensors.

In: what a trace has read and changed. Out: inputs and outputs of the program, and what writes these after a step. Imports
`capture/effects`, `capture/guards`, `capture/guards/sources`, `capture/numbers`, `capture/tensors`, `ir`, `ir/call`, `state`.
"""
