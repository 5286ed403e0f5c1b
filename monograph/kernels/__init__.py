"""Which kernel computes a matrix product, a convolution or attention fastest here: candidates are timed.

In: ops with their sizes and strides. Out: the winner, written as ordinary ops, and remembered. Imports
`compat/inductor`, `ir`, `ir/call`, `native`, `passes`.
"""
