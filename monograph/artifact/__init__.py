"""Artifacts: programs and their state, which run without the code of the model.

In: a graph that was called. Out: files, and an `Artifact` that runs them. Imports `graph`, `checkpoint`, and the folders
in it.
"""
