"""What Monograph needs of `torch.distributed` that it does not promise to keep, each with what happens without it.

In: nothing of ours. Out: functions with plain names. Imports nothing of ours.
"""
