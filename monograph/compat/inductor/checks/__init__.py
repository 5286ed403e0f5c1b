"""What compiled code looks at while it runs: indices, divisors, the error codes of torch's kernels.

In: code that Inductor writes. Out: code that ends with an error. Imports nothing of ours but the ground floor.
"""
