"""What is in the code that Inductor writes: quotients of sizes, and the memory that is taken and given back.

In: that code, or the lines that become it. Out: other code, or what the lines hold. Imports nothing of ours but the ground floor.
"""
