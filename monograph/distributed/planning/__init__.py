"""What a step of many processes will hold, send and take, planned by one: the programs of ranks are made, checked and not run.

In: a graph, the arguments of a step, how many processes there would be. Out: a plan of them, or the error of a step
that could not run. Imports `backends`, `capture`, `capture/accumulation`, `capture/step`, `compiler`, `distributed`,
`distributed/agreement`, `distributed/pipeline`, `distributed/programs`, `inspect/memory`, `internals`, `ir`, `ir/call`,
`ir/ops`, `passes`, `plan`, `runnable`, `state`.
"""
