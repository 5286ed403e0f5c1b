"""What `print(graph)`, `graph.explain()` and `graph.debug()` print: trees of modules and ops, reasons, stages.

In: builds, and events of a capture. Out: text. Imports `capture/guards/sources`, `capture/step`,
`compiler`, `config`, `ir`, `passes`, `runnable`, `state`.
"""
