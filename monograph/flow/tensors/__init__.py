"""Tensors where OneFlow and PyTorch part, and those that processes share, with the processes that do."""
