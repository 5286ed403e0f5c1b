"""Calls of a compiled step, random state, and the judge of equality."""
