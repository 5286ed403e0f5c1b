"""Other libraries' training loops, each in a file that needs its package.

In: what such a loop calls for each batch. Out: the same, by a Graph. Nothing imports these files but users and each
other; they import public names, and besides `config`, `internals` and the report of `numerics`.
"""
