"""What a list holds, told by addresses: equal objects are others, the same objects are the same."""

import pytest
import torch

from monograph.capture.guards import identities as module

READERS = pytest.mark.parametrize("read", [module._from_memory, module._from_ids])


@READERS
def test_the_same_objects_are_the_same(read):
    items = [torch.ones(1), torch.ones(3), None, 1.5, "text", (1, 2)]
    assert read(items) == read(list(items)) == module.identities(items)
    assert read([]) == b""


@pytest.mark.every_case
@READERS
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (torch.ones(1), torch.ones(1)),
        (float("1.5"), float("1.5")),
        (1, True),
        (float("nan"), float("nan")),
    ],
)
def test_equal_objects_are_others(read, first, second):
    assert first is not second
    assert read([None, first]) != read([None, second])
    assert read([first, second]) != read([second, first])
    assert read([first]) != read([first, first])
