"""Where Python code finds what it reads: attributes, globals, closures, entries of containers.

In: the code that ran and the objects that it could reach. Out: places that can be read again without running code
of the user's. Imports `ir/call`, `state`.
"""
