"""Artifacts over HTTP: the Open Inference Protocol, version 2, with batches of what arrives together.

Source: the specification of KServe's "V2" protocol and its extension for binary tensors. Needs the extra `serve`.
"""
