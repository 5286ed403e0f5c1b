"""Traces of torch and their graphs. In: functions to trace, and nodes. Out: graphs of nodes. Imports the rest of `compat`."""
