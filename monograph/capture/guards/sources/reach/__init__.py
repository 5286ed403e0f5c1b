"""What the code of a step can reach: the places that it may have read from, each with what was there before.

In: each code object that runs, with its frame. Out: the sources that become guards, and what cannot be guarded. Imports
`capture/guards/sources`, `compat`, `errors`.
"""
