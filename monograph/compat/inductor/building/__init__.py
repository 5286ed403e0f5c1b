"""The C++ compiler as Inductor calls it: for which processor, what is compiled at once, and what it waits for.

In: calls of Inductor's. Out: the same libraries, sooner. Imports nothing of ours but the ground floor.
"""
