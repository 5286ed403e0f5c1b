"""What a step is called with: nested arguments and their leaves, and what a call must match to use a build.

In: Python values. Out: trees, signatures, and sentences about how two of them differ. Imports nothing of ours but
the ground floor.
"""
