"""From the user's `build()` to a program: one run of it is traced on fakes, and what it read becomes guards.

In: a graph's step and the arguments of a call. Out: a program, what it is bound to, and its guards. Imports the folders
in it, `state` and `ir`; it knows no backend.
"""
