"""How far numbers are apart: bit for bit, in last places, and from float64; and which op is the first to differ.

In: a graph and a call. Out: the report of `verify()`. Imports `capture`, `capture/effects/python_objects`,
`capture/guards/sources`, `capture/optimizers`, `capture/step`, `compiler`, `distributed`, `distributed/programs`,
`inspect`, `internals`, `ir`, `ir/call`, `padding`, `passes`, `state`.
"""
