"""Traces of torch and their graphs. In: functions to trace, and nodes. Out: graphs of nodes. Imports nothing of ours but the ground floor."""
