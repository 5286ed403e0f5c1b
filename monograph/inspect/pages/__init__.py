"""Pages and drawings of a build: HTML, SVG and DOT.

In: builds. Out: files. Imports `compiler`, `inspect`, `inspect/memory`, `ir`, `passes/inductor`.
"""
