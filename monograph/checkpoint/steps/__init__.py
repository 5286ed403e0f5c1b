"""A directory of checkpoints, one for each saved step.

In: a state, and the number of its step. Out: its checkpoint, and the newest one that is whole. Imports `checkpoint`,
`checkpoint/ranks`.
"""
