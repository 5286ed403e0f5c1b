"""The inside of a graph: what the user has added, what they most likely do not mean, and the builds for its calls.

In: a graph, and the arguments of a call. Out: a build that serves it, with the state that it runs on.
Imports `amp`, `backends`, `block`, `cache`, `capture`, `capture/effects`, `capture/guards/sources`, `capture/numbers`,
`capture/optimizers`, `capture/process`, `capture/step`, `checkpoint/steps`, `compiler`, `config`, `distributed`,
`distributed/agreement`, `distributed/pipeline`, `eager`, `elementwise`,
`inspect/printed`, `ir`, `ir/call`, `passes`, `plan`, `runnable`, `runtime`, `state`.
"""
