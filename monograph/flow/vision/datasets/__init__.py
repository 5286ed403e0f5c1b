"""Data sets, read from the files of their home pages. Nothing is downloaded, and nothing in a file is run."""

from monograph.flow.vision.datasets.cifar import CIFAR10, CIFAR100

__all__ = ["CIFAR10", "CIFAR100"]
