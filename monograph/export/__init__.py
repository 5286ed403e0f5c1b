"""Graphs for other runtimes: ONNX, Triton's model repositories, packages of native code.

In: a graph. Out: files. Imports `artifact`, `artifact/schema`, `backends`, `capture/tensors`, `checkpoint`, `graph`, `internals`, `ir`,
`ir/call`, `passes`, `state`.
"""
