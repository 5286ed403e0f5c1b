"""The proof that training goes on from a checkpoint as if it had never stopped: two new processes, one interrupted.

In: the name of a function that makes a graph and its batches. Out: a verdict, bit for bit. Imports `checkpoint` and `ir`.
"""
