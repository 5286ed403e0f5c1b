"""What Monograph needs of torch and numpy that they do not promise to keep, each with what happens without it.

In: nothing of ours. Out: functions with plain names. Private names of torch's modules are written in this folder and
nowhere else. Imports nothing of ours but the ground floor.
"""
