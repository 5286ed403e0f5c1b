"""Operators of our own that run functions of torch: updates of fused optimizers, and recurrent layers.

In: what torch's function takes. Out: what it gives, in a form that a program can hold. Imports `ir`.
"""
