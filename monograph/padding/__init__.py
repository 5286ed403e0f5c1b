"""Arguments that are padded to the sizes of buckets, and results that are cut back.

In: buckets as the user declares them, and the arguments of a call. Out: padded arguments, how results follow their sizes,
and what the padding costs. Imports `ir/call` and the ground floor.
"""
