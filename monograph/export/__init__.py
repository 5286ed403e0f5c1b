"""Graphs for other runtimes: ONNX, Triton's model repositories, packages of native code.

In: a graph. Out: files. Imports `artifact` and `graph`.
"""
