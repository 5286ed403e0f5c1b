"""The program: its ops, its ports and what they are bound to, its text, its rules.

In: what capture recorded. Out: a `Program`, which passes, plans and backends take. Imports `compat/traces`, `ir/call`, `native`.
"""
