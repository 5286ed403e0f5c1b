"""Operators of our own that run functions of torch (updates of fused optimizers, recurrent layers), the
arithmetic of ops, the dtypes that they take, and which draw random numbers.

In: what torch's function takes. Out: what it gives, in a form that a program can hold. Imports `ir` and `ir/call`.
"""
