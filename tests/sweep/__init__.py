"""The sweep through torch's own test databases."""

from __future__ import annotations

import importlib

from hypothesis import settings

# importing torch's test tools loads a Hypothesis profile of theirs: the tests of this project keep their own
_active = settings.get_current_profile_name()
importlib.import_module("torch.testing._internal.common_utils")
settings.load_profile(_active)
