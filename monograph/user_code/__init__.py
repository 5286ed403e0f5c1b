"""Which code is the user's and which is that of libraries: files, lines of stacks, frames of errors.

In: file names, frames, errors. Out: an `Origin`, or a shorter traceback. It imports nothing of the package.
"""
