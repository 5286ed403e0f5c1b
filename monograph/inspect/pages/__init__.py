"""Tables of modules, pages and drawings of a build: text, HTML, SVG and DOT.

In: builds. Out: texts and files. Imports `compiler`, `inspect`, `inspect/memory`, `ir`, `ir/ops`, `passes/inductor` and `state`.
"""
