"""The command `monograph`; its commands are grouped by what they look at.

In: the command line. Out: text and files. Imports public names, and what commands show.
"""
