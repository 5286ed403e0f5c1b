"""Compiled steps of the tests are kept in a cache of their own, which the workers of one run share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="package")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory):
    """The cache directory of this run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if base.name.startswith("popen-") else base) / "compiled"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MONOGRAPH_CACHE_DIR", str(folder))
        yield folder


def libraries(folder: Path) -> list[Path]:
    """The compiled steps in a cache."""
    return sorted(folder.glob("steps/*/step.so"))
