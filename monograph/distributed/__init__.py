"""Steps of many processes on torch.distributed.

In: process groups of the user's. Out: what ranks agree on. Imports nothing of ours but the ground floor.
"""
