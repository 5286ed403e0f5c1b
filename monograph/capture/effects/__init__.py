"""What a step changes besides its results: state of modules, attributes, containers, arguments, gradients.

`side_effects.py` puts the parts together. What each step does again to objects of Python is in `python_objects`.

In: the objects that the step has touched. Out: outputs of the program, each with the place that it goes to. Imports
`capture/guards`, `capture/guards/sources`, `capture/numbers`, `capture/tensors`, `ir`, `ir/call`, `state`.
"""
