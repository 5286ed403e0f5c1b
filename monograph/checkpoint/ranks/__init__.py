"""One checkpoint of many processes: torch.distributed.checkpoint plans who writes what, and our files are its storage.

In: the state of each rank. Out: a directory with a file of each rank and one manifest, whole or not there at all, and
back to the state of a rank, also of another number of ranks. Imports `checkpoint`, `distributed/agreement`.
"""
