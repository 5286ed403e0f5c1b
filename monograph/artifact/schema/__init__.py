"""The arguments and results of a stored program as JSON, without the classes of the user.

In: trees of arguments. Out: schemas, and arguments matched to one. Imports `checkpoint`, `ir`, `ir/call`, `state`.
"""
