"""The state of a graph as one dict, and checkpoints on disk that a crash cannot spoil."""
