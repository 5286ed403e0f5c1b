"""Torch's compiler, as far as Monograph uses it: a graph of ops in, a loaded library out, and what is changed in it.

In: a graph over tensors. Out: a function that runs compiled code, kept on disk. Imports `compat/inductor/building`, `compat/inductor/checks`, `compat/inductor/written`, `compat/traces` and
`native`.
"""
