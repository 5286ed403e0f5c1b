"""What Monograph needs of torch and numpy that they do not promise to keep, each with what happens without it.

In: nothing of ours. Out: functions with plain names. Private names of torch are written in this folder and nowhere
else, those of its modules and those of its instances. Imports nothing of ours but the ground floor.
"""

OLDEST_TORCH, NEWEST_TORCH = (2, 11), (2, 15)  # that these files are meant for; the tests run with 2.13
