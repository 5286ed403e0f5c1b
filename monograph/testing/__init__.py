"""Tools to check operators, modules, backends and passes: is a graph's result the one of eager mode?"""

from monograph.testing.align import Alignment, align
from monograph.testing.collected import AlignCase
from monograph.testing.modes import MODES, Mode
from monograph.testing.report import AlignmentError

__all__ = ["MODES", "AlignCase", "Alignment", "AlignmentError", "Mode", "align"]
