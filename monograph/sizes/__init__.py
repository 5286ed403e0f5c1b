"""Sizes that vary from call to call: exact arithmetic on them, and what is known of them beforehand.

In: names of sizes. Out: expressions over them, and ints that compute by them. Imports nothing else of Monograph.
"""
