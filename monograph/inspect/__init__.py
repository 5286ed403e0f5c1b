"""What a user can look at: text, drawings, profiles and values of programs and builds.

In: builds. Out: text and pages. Imports `backends`, `capture`, `compiler`, `config`, `ir`, `passes`, `plan`,
`runtime`, `state`.
"""
