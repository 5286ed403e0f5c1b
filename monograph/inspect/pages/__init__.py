"""Pages and drawings of a build: HTML, SVG and DOT.

In: builds. Out: files. Imports `compiler`, `inspect`, `ir`, `passes/inductor`, `plan`.
"""
