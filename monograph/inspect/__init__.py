"""What a user can look at: text, drawings, profiles and values of programs and builds.

In: builds. Out: text and pages. Imports `backends`, `capture/step`, `compiler`, `config`, `ir`, `ir/call`, `passes`,
`plan`, `runtime`, `state`.
"""
