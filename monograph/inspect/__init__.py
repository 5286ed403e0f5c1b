"""What a user can look at: profiles, values and replays of steps. Texts are in `printed`, drawings in `pages`.

In: builds. Out: text and pages. Imports `backends`, `compiler`, `ir`, `ir/ops`, `ir/call`, `passes`, `passes/inductor`, `plan`, `runnable`, `runtime`,
`state`.
"""
